"""Errors of the disk, with their remedies."""

from __future__ import annotations

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
