"""Steps on a POSIX file system that the store needs besides those of `peer.durable`."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from peer.store.errors import StoreError, StoreFull
from protocol.errors import os_reason

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FILES = {errno.EMFILE, errno.ENFILE}
_NO_RESERVE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems that cannot reserve."""


@contextmanager
def disk(doing: str) -> Iterator[None]:
    """Turn an OSError into a StoreError that names the operation and the remedy."""
    try:
        yield
    except OSError as e:
        raise disk_error(doing, e) from None


def disk_error(doing: str, e: OSError) -> StoreError:
    """Return the StoreError of a failed operation."""
    why = os_reason(e)
    if e.errno in _FULL:
        return StoreFull(f"{doing}: {why}; free some disk space, or name a folder on another disk")
    if e.errno in _DENIED:
        return StoreError(f"{doing}: {why}; make the folder writable for this user, or name another one")
    if e.errno in _FILES:
        return StoreError(f"{doing}: {why}; raise the limit of open files (ulimit -n)")
    return StoreError(f"{doing}: {why}; check the disk")


def write_no_sync(path: Path, data: bytes, *, scratch: Path) -> None:
    """Write without the flushes of `durable.write_durably`: for data that is checked when read and can be remade."""
    draft = scratch / secrets.token_hex(12)
    draft.write_bytes(data)
    os.rename(draft, path)


def remove(path: Path) -> None:
    """Unlink a file. It is no error if it is gone already."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def reserve(fd: int, size: int, start: int = 0) -> None:
    """Make a file at least `start + size` bytes long.

    The disk space from `start` on is reserved if the file system can: a full disk shows now, not half-way.
    """
    if size == 0:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, start, size)
            return
        except OSError as e:
            if e.errno not in _NO_RESERVE:
                raise
    if os.fstat(fd).st_size < start + size:
        os.ftruncate(fd, start + size)
