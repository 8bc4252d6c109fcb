"""Files that survive a power cut: written whole or not at all, or appended to line by line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a new file and flush it to disk; `mode` is subject to the umask. Raises OSError."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Put these bytes under a name, whole or not at all, on disk when this returns. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        write(draft, data, mode)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


class LineFile:
    """A file of lines that grows at its end. All methods raise OSError, and block.

    A kill in the middle of a line leaves a torn one, which the next `append` ends: a reader must skip lines that do
    not parse. With `max_bytes`, a full file becomes the older of two, and the older one before it is deleted.
    """

    def __init__(self, path: Path, *, max_bytes: int = 0, mode: int = 0o666):
        self.path = path
        self._older = path.with_suffix(f".old{path.suffix}")
        self._max_bytes = max_bytes
        self._mode = mode

    def read(self, limit: int) -> list[bytes]:
        """Return the lines, oldest first, from at most the last `limit` bytes of each file."""
        lines: list[bytes] = []
        for path in (self._older, self.path) if self._max_bytes else (self.path,):
            try:
                with path.open("rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
                    lines += file.read(limit).splitlines()
            except FileNotFoundError:
                continue
        return lines

    def append(self, lines: Iterable[bytes]) -> None:
        """Add lines (without their ends); they are on disk when this returns."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, self._mode)
        try:
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            left = b"\n" * torn + b"".join(line + b"\n" for line in lines)
            while left:  # a disk that fills up takes a part, and refuses the rest
                left = left[os.write(fd, left) :]
            os.fsync(fd)
            if size == 0:  # the file may be new
                self._give_to_the_folders_owner(fd)
                sync(self.path.parent)
            full = 0 < self._max_bytes <= os.fstat(fd).st_size
        finally:
            os.close(fd)
        if full:
            os.replace(self.path, self._older)

    def _give_to_the_folders_owner(self, fd: int) -> None:
        """Let a service read what root wrote into its folder."""
        if os.geteuid() == 0:
            folder = os.stat(self.path.parent)
            with suppress(OSError):  # some file systems refuse it to root, too
                os.fchown(fd, folder.st_uid, folder.st_gid)

    def rewrite(self, lines: Iterable[bytes]) -> None:
        replace(self.path, b"".join(line + b"\n" for line in lines), self._mode)
