"""Durable steps on a POSIX file system: files that are whole or absent, whatever happens while they are written.

A write is a temporary name, fsync, rename, and fsync of the folder. The effect of a finished call survives a crash.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`, however much of it the system writes at once. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def write_durably(
    path: Path, parts: Iterable[bytes | bytearray | memoryview], *, scratch: Path | None = None, flush: bool = True
) -> int:
    """Replace `path` by a file of these parts. Return its bytes. Raises OSError, after which the old file is there.

    `scratch`: a folder of the same file system for the temporary file; by default it is hidden in the same folder.
    Without `flush` a power cut may lose it, and a kill does not.
    """
    if scratch is not None:
        draft = scratch / secrets.token_hex(12)
    else:
        draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    size = 0
    try:
        with open(draft, "wb") as file:
            for part in parts:
                size += file.write(part)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        publish(draft, path) if flush else os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return size


def link_into(path: Path, other: Path) -> None:
    """Give a file a second name, which may be on another disk. Neither is written to again. Raises OSError."""
    temporary = other.with_name(f".{other.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        # Another disk, or one without links.
        write_durably(other, [path.read_bytes()])
    else:
        publish(temporary, other)


def publish(temporary: Path, path: Path) -> None:
    """Give a finished, flushed file its name. Raises OSError."""
    os.replace(temporary, path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
