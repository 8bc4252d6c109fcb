"""Output of commands to stdout: a terminal, a file, or a pipe whose reader may close it early."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO, cast

from rich.console import Console

FILE_WIDTH = 160
"""Minimum width of output to a file or a pipe, so that tables are not cut there."""


def discard_stdout() -> None:
    """Let all that is written to stdout from now on vanish, what waits in its buffer too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _LastingFile:
    """Stdout for a process that goes on without it: on a full disk, or when its terminal is gone."""

    def __init__(self, file: TextIO):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            discard_stdout()
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            discard_stdout()


class Output(Console):
    """A console on stdout. It raises BrokenPipeError when its reader is gone; if it `lasts`, it writes to nobody."""

    def __init__(self, *, lasts: bool = False, soft_wrap: bool = False):
        file = cast(TextIO, _LastingFile(sys.stdout)) if lasts and sys.stdout is not None else None
        super().__init__(file=file, highlight=False, soft_wrap=soft_wrap)
        if not self.is_terminal:
            self.width = max(self.width, FILE_WIDTH)

    @property
    def is_live(self) -> bool:
        """True if lines can be redrawn in place."""
        return self.is_terminal and not self.is_dumb_terminal

    def on_broken_pipe(self) -> None:
        """Raise the error. Rich would end the process with code 1."""
        raise BrokenPipeError
