"""Errors of the disk, with their remedies."""

from __future__ import annotations

import errno

from protocol.errors import CairnError


class StoreError(CairnError):
    """The store cannot do what was requested."""


class StoreBusy(StoreError):
    """Another process uses this store."""


class StoreFull(StoreError):
    """The disk, or the share of it that the store may use, is full."""


class BlobMissing(StoreError):
    """The store does not hold this blob."""


class BlobCorrupt(BlobMissing):
    """The bytes on disk did not match the digest. The blob was removed, so it is missing now."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS}


def disk_error(e: OSError, doing: str) -> StoreError:
    """Return the error to show: what failed, why, and the remedy."""
    why = (e.strerror or str(e)).lower()
    if e.errno in _FULL:
        return StoreFull(f"{doing}: {why}; free some disk space, or name a folder on another disk")
    if e.errno in _CLOSED:
        return StoreError(f"{doing}: {why}; make the folder writable for this user, or name another one")
    return StoreError(f"{doing}: {why}; check the disk")
