"""Sources of token shards: a verified file of this peer, or a folder at an address that the spec names.

A source returns ranges of bytes, with a deadline and a fixed size, and never more than was requested. The reader checks
the bytes.
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from peer.errors import PeerError
from peer.training.background import BackgroundTask
from protocol.data_address import check_address
from protocol.ids import Digest
from protocol.merkle import CHUNK, blob_leaves, chunk_count

MAX_STUCK = 8
"""Calls to an address that never returned, after which it is not used any more."""


class SourceError(PeerError):
    """A source did not return the requested bytes. The message says why."""


class LocalFiles:
    """Shards on this disk, as blobs of the peer's store or as prepared files."""

    name = "this disk"

    def __init__(self, paths: Mapping[Digest, Path]):
        self._paths = dict(paths)

    def leaves(self, shard: Digest, size: int) -> bytes:
        """Return the leaf hashes of a shard of `size` bytes, concatenated and unverified. Raise SourceError.

        They come from a `.leaves` file of the right size beside the shard; otherwise the shard is hashed.
        """
        path = self._path(shard)
        try:
            for beside in (path.with_suffix(".leaves"), path.with_name(path.name + ".leaves")):
                if beside != path and beside.is_file() and beside.stat().st_size == 32 * chunk_count(size):
                    return beside.read_bytes()
            if path.stat().st_size != size:
                raise SourceError(f"{path} has {path.stat().st_size} bytes, the spec says {size}")
            with path.open("rb") as file:
                return b"".join(blob_leaves(chunk)[0] for chunk in iter(lambda: file.read(CHUNK), b""))
        except OSError as e:
            raise SourceError(f"{path}: {e.strerror or e}") from None

    def chunk(self, shard: Digest, offset: int, size: int) -> bytes:
        """Return `size` bytes at an offset, unverified. Raise SourceError."""
        path = self._path(shard)
        try:
            with path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), size, offset)
        except OSError as e:
            raise SourceError(f"{path}: {e.strerror or e}") from None

    def _path(self, shard: Digest) -> Path:
        if shard not in self._paths:
            raise SourceError(f"shard {shard.short} is not on this disk")
        return self._paths[shard]


class RemoteFolder(ABC):
    """A folder at an address of the spec, with DIGEST.tokens and DIGEST.leaves. It answers as `LocalFiles` does."""

    def __init__(self, address: str, timeout: float):
        self.name = address.rstrip("/")
        self._timeout = timeout

    def leaves(self, shard: Digest, size: int) -> bytes:
        return self._range(f"{shard}.leaves", 0, 32 * chunk_count(size))

    def chunk(self, shard: Digest, offset: int, size: int) -> bytes:
        return self._range(f"{shard}.tokens", offset, size)

    @abstractmethod
    def _range(self, file: str, start: int, size: int) -> bytes:
        """Return at most `size` bytes, whatever the other side sends, within the deadline. Raise SourceError."""


ShardSource = LocalFiles | RemoteFolder


def at_address(address: str, timeout: float) -> RemoteFolder:
    """Return the source at an address of the spec. Raise SpecError."""
    protocol = check_address(address)
    return HttpFolder(address, timeout) if protocol in ("http", "https") else FsspecFolder(address, timeout)


class HttpFolder(RemoteFolder):
    """A folder on an ordinary web server that answers range requests (RFC 9110 section 14)."""

    def _range(self, file: str, start: int, size: int) -> bytes:
        if not size:
            return b""
        url = f"{self.name}/{file}"
        until = time.monotonic() + self._timeout
        request = urllib.request.Request(url, headers={"Range": f"bytes={start}-{start + size - 1}"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                if response.status != 206 and start:
                    raise SourceError(f"{url}: the server does not answer range requests (status {response.status})")
                data = bytearray()
                while len(data) < size and (piece := response.read1(size - len(data))):
                    data += piece
                    if time.monotonic() > until:
                        raise SourceError(f"{url}: {len(data)} of {size} bytes after {self._timeout:.0f} s")
                return bytes(data)
        except urllib.error.HTTPError as e:
            raise SourceError(f"{url}: status {e.code}") from None
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise SourceError(f"{url}: {getattr(e, 'reason', None) or e or type(e).__name__}") from None


class FsspecFolder(RemoteFolder):
    """A folder on any file system of fsspec. Each call has a thread, since few file systems have deadlines."""

    _stuck = 0

    def _range(self, file: str, start: int, size: int) -> bytes:
        if self._stuck >= MAX_STUCK:
            raise SourceError(f"{self.name}: {MAX_STUCK} calls never came back")

        def call() -> bytes:
            import fsspec.core

            fs, folder = fsspec.core.url_to_fs(self.name)
            return bytes(fs.cat_file(f"{folder}/{file}", start=start, end=start + size))

        reading = BackgroundTask(call, "read")
        reading.wait(self._timeout)
        if not reading.is_done:
            self._stuck += 1
            raise SourceError(f"{self.name}/{file}: no answer in {self._timeout:.0f} s")
        try:
            return reading.result()
        except FileNotFoundError:
            raise SourceError(f"{self.name}/{file}: is not there") from None
        except Exception as e:  # noqa: BLE001 - any file system, any error
            raise SourceError(f"{self.name}/{file}: {str(e) or type(e).__name__}") from None
