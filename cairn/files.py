"""Files that commands write for people."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coordinator import durable
from protocol.errors import CairnError, os_reason


@contextmanager
def private_files() -> Iterator[None]:
    """Give all files that are made within, also by child processes, mode 0600, and folders 0700."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def write_whole(path: Path, data: str | bytes, *, mode: int = 0o666) -> None:
    """Write the whole file, on disk when this returns, or nothing. Raises CairnError."""
    try:
        durable.replace(path, data.encode() if isinstance(data, str) else data, mode)
    except OSError as e:
        raise CairnError(f"{path}: cannot be written: {os_reason(e)}: name another place") from None


def refuse_existing(path: Path, text: str | None = None, *, force: bool) -> None:
    """Raise CairnError if there is no such folder, or a file without this text, which only `force` may replace."""
    if not path.parent.is_dir():
        why = "not a directory:" if path.parent.exists() else "there is no such folder: make it, or"
        raise CairnError(f"{path}: cannot be written: {why} name another place")
    with suppress(OSError):
        if text is not None and path.is_file() and path.read_bytes() == text.encode():
            return
    if path.exists() and not force:
        raise CairnError(f"{path}: is there already: take another name, or --force to write over it")


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Write a whole file; one with another text is replaced only with `force`. Raises CairnError."""
    refuse_existing(path, text, force=force)
    write_whole(path, text)
