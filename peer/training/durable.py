"""Files that are whole or absent, whatever happens while they are written: temporary name, fsync, rename, fsync."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_durably(path: Path, parts: Iterable[bytes | bytearray | memoryview]) -> int:
    """Write the parts as the file `path`, which then is on disk. Returns its bytes. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    size = 0
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                size += file.write(part)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def give(path: Path, other: Path) -> None:
    """The same file under a second name, which may be on another disk. Neither is written to again. Raises OSError."""
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
    """Give a finished, synced file its name. Raises OSError."""
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
