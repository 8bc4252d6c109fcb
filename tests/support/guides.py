"""Guides of docs/ as a reader follows them: what they say to write and to run, and what that shows.

A comment on a line of its own, before an indented block, says what the block is:

    <!--file:NAME-->   a file that the reader writes
    <!--run-->         lines for a shell, which must succeed
    <!--background-->  a line for a terminal of its own: it goes on beside the others
    <!--shows-->       lines that the block before prints, in this order and among others
    <!--at-end-->      the same of the last background block, which ends by itself

In the lines that are shown, each number stands for any, and `...` for any text.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_PARTS = re.compile(
    r"^## (?P<section>.+)$|^<!--(?P<kind>file:\S+|run|background|shows|at-end)-->\n\n(?P<block>(?:(?: {4}.*)?\n)+)",
    re.M,
)

SECONDS = 600.0
"""Seconds after which a command, or what it is to show, is given up: each imports torch, and the cores are shared."""


@dataclass(frozen=True)
class Block:
    section: str
    kind: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page that a test can follow."""
    found, section = [], ""
    for part in _PARTS.finditer(page):
        if part["section"]:
            section = part["section"]
        else:
            found.append(Block(section, part["kind"], dedent(part["block"]).strip() + "\n"))
    return found


def missing(shown: str, printed: str) -> list[str]:
    """Return the lines of `shown` that do not follow one another in what was printed."""
    lines = iter(printed.splitlines())
    return [line for line in shown.splitlines() if not any(_pattern(line).fullmatch(other) for other in lines)]


def _pattern(line: str) -> re.Pattern[str]:
    words = line.split()
    return re.compile(r"\s*" + r"\s+".join(_word(word) for word in words) + r"\s*")


def _word(word: str) -> str:
    pieces = re.split(r"(\.\.\.|\d[\d,.:_]*\d|\d)", word)
    return "".join(
        ".*" if piece == "..." else r"[\d,.:_]+" if piece[:1].isdigit() else re.escape(piece) for piece in pieces
    )


class Reader:
    """Somebody with a home and a clone of their own, who follows a guide. Use with `with`.

    `placeholders` are words of the guide, with what they stand for. `options` are added to commands of cairn that
    begin with the key: ports and devices for a test.
    """

    def __init__(self, page: str, home: Path, options: Mapping[str, Sequence[str]]):
        self.blocks = blocks((DOCS / page).read_text())
        self.placeholders: dict[str, str] = {}
        self.home, self.clone = home, home / "clone"
        self._output = home / "output"
        for folder in (self.clone / "docs", self._output, home / "bin"):
            folder.mkdir(parents=True)
        for file in DOCS.glob("*.md"):
            (self.clone / "docs" / file.name).write_bytes(file.read_bytes())
        self._write_command(options)
        self._background: list[tuple[Block, subprocess.Popen[bytes], Path]] = []
        self._printed = Path(os.devnull)

    def _write_command(self, options: Mapping[str, Sequence[str]]) -> None:
        added = "\n".join(f'"{begin}"*) set -- "$@" {shlex.join(words)} ;;' for begin, words in options.items())
        command = self.home / "bin" / "cairn"
        command.write_text(
            f'#!/bin/sh\ncase "$*" in\n{added}\nesac\nexec {shlex.quote(sys.executable)} -m cairn "$@"\n'
        )
        command.chmod(0o755)
        python = self.home / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for background in self._background:
            _signal(background[1], signal.SIGKILL)

    def follow(self, *sections: str) -> None:
        """Do what these sections say, in the order of the page."""
        for block in [b for b in self.blocks if b.section in sections]:
            self.blocks.remove(block)
            self._do(block)

    def stop(self) -> None:
        """Press Ctrl-C in each terminal where something runs, newest first. All must end in order."""
        while self._background:
            block, process, output = self._background.pop()
            _signal(process, signal.SIGINT)
            assert process.wait(SECONDS) == 0, block.text + output.read_text()

    def _do(self, block: Block) -> None:
        text = block.text
        for word, meaning in self.placeholders.items():
            text = re.sub(rf"\b{word}\b", meaning, text)
        match block.kind:
            case "run":
                process = self._start(text)
                assert process.wait(SECONDS) == 0, f"{text}\n{self._printed.read_text()}"
            case "background":
                self._background.append((block, self._start(text), self._printed))
            case "shows":
                self._see(text, self._printed)
            case "at-end":
                _, process, output = self._background.pop()
                assert process.wait(SECONDS) == 0, output.read_text()
                assert not missing(text, output.read_text()), output.read_text()
            case _:
                file = self.clone / block.kind.removeprefix("file:")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)

    def _see(self, text: str, output: Path) -> None:
        """Wait until the lines are there: what runs in the background prints them when it has come so far."""
        running = [process for _, process, printed in self._background if printed == output]
        wait_until(
            lambda: not missing(text, output.read_text()) or all(p.poll() is not None for p in running),
            f"the output has {text}", seconds=SECONDS, every=0.2,
        )  # fmt: skip
        assert not missing(text, output.read_text()), output.read_text()

    def _start(self, text: str) -> subprocess.Popen[bytes]:
        self._printed = self._output / f"{len(list(self._output.iterdir()))}.txt"
        path = f"{self.home / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "HOME": str(self.home), "PATH": path, "PYTHONPATH": str(ROOT)}
        environment.pop("CAIRN_HOME", None)
        with open(self._printed, "wb") as output:
            return subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", text], cwd=self.clone, env=environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal all processes of a terminal, as Ctrl-C does."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
