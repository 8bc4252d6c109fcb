"""A blob that is still arriving: chunks in any order, each checked before it is written; survives a restart.

It may stay so: of a slice only some chunks are wanted, and the file has room for those alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from peer.store.disk import disk, reserve, write_at
from peer.store.errors import BlobMissing, StoreError
from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.merkle import CHUNK, chunk_count, chunk_size, leaf_hash


def bits(flags: bytes | bytearray) -> bytes:
    """One bit for each byte that is not 0, the lowest bit of the first byte for flag 0."""
    out = bytearray(-(-len(flags) // 8))
    for i, flag in enumerate(flags):
        if flag:
            out[i >> 3] |= 1 << (i & 7)
    return bytes(out)


class Partial:
    """Made by `Store.partial`, which has checked `leaves` against the digest. Thread-safe.

    One object a blob, shared by all who fetch it at the same time; each of them calls `close` once. What has arrived
    can be read for as long as the store keeps it, also while nobody fetches it.
    """

    def __init__(
        self,
        path: Path,
        digest: Digest,
        size: int,
        leaves: Sequence[bytes],
        *,
        mutex: threading.RLock,
        finished: Callable[[Partial], None],
        chunks: Collection[int] | None = None,
    ):
        """`chunks`: only these are wanted, as yet. Raises MalformedError when the blob has no such chunk."""
        self.digest = digest
        self.size = size
        self.leaves = list(leaves)
        self.path = path
        self._mutex = mutex  # the store's; always taken before our own
        self._finished = finished
        self._lock = threading.Lock()
        self._whole = False
        self._gone = False
        self._users = 1
        self._have = bytearray(chunk_count(size))
        self._left = len(self._have)
        self._wanted: set[int] = set()
        self._room = 0
        missing = self._unwanted(chunks)
        with disk(f"making room for blob {digest.short} ({size:,} bytes)"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.fstat(self._fd).st_size == size and size:
                    self._recheck(missing)
                else:
                    os.ftruncate(self._fd, 0)
                self._make_room(missing)
            except OSError:
                os.close(self._fd)
                os.unlink(path)
                raise

    def _recheck(self, chunks: Collection[int]) -> None:
        """After a restart: what lies on disk counts only where it hashes to its leaf."""
        for index in chunks:
            data = os.pread(self._fd, chunk_size(self.size, index), index * CHUNK)
            self._have[index] = leaf_hash(data) == self.leaves[index]
        self._left = len(self._have) - sum(self._have)

    def _unwanted(self, chunks: Collection[int] | None) -> dict[int, int]:
        """Of these chunks (None: all), those for which there is no room yet, with their sizes."""
        named = range(len(self._have)) if chunks is None else chunks
        return {i: chunk_size(self.size, i) for i in named if i not in self._wanted}

    def _make_room(self, chunks: dict[int, int]) -> None:
        if len(chunks) == len(self._have):
            reserve(self._fd, self.size)
        else:
            os.ftruncate(self._fd, self.size)
            for index, size in chunks.items():
                reserve(self._fd, size, index * CHUNK)
        self._wanted.update(chunks)
        self._room += sum(chunks.values())

    @property
    def done(self) -> bool:
        """The whole blob is in the store, or was given up."""
        return self._gone

    @property
    def idle(self) -> bool:
        """Nobody fetches it now."""
        return self._users <= 0

    @property
    def room(self) -> int:
        """Bytes of disk that are set aside for it."""
        return self._room

    def more_room(self, chunks: Collection[int] | None) -> int:
        """How many more bytes `share` with these would set aside. Raises MalformedError: there is no such chunk."""
        with self._lock:
            return sum(self._unwanted(chunks).values())

    @property
    def left(self) -> int:
        """How many chunks are still to come."""
        return self._left

    def has(self, index: int) -> bool:
        """Whether a chunk is here, checked."""
        return 0 <= index < len(self._have) and bool(self._have[index])

    def missing(self, chunks: Collection[int] | None = None) -> list[int]:
        """The indices of the chunks (of these) that are still to come."""
        return [i for i in (range(len(self._have)) if chunks is None else chunks) if not self._have[i]]

    def lacks(self, chunks: Collection[int] | None = None) -> bool:
        """Whether any chunk (of these) is still to come."""
        return self._left > 0 if chunks is None else not all(self._have[i] for i in chunks)

    def bitmap(self) -> bytes:
        """One bit a chunk, the lowest bit of the first byte for chunk 0."""
        return bits(self._have)

    def write(self, index: int, data: bytes) -> None:
        """Take a chunk. Raises MalformedError when it is not the one that the digest names: nothing is written then;
        BlobMissing when the store has given the blob up meanwhile."""
        if len(data) != chunk_size(self.size, index) or leaf_hash(data) != self.leaves[index]:
            raise MalformedError(f"chunk {index} is not that of blob {self.digest.short}")
        with self._lock, disk(f"writing blob {self.digest.short}"):
            if self._have[index]:
                return
            self._check_open()
            write_at(self._fd, data, index * CHUNK)
            self._have[index] = 1
            self._left -= 1

    def _check_open(self) -> None:
        if self._gone or self._fd < 0:
            raise BlobMissing(f"blob {self.digest.short} is not wanted any more")

    def read_chunk(self, index: int) -> bytes:
        """A chunk that is here already, for others who want it. Raises BlobMissing."""
        with self._lock:
            if self._gone or not self.has(index):
                raise BlobMissing(f"chunk {index} of blob {self.digest.short} has not arrived yet")
            with disk(f"reading blob {self.digest.short}"):
                if self._fd >= 0:
                    return os.pread(self._fd, chunk_size(self.size, index), index * CHUNK)
                with open(self.path, "rb") as file:
                    return os.pread(file.fileno(), chunk_size(self.size, index), index * CHUNK)

    def finish(self) -> None:
        """Flush and hand the complete file to the store. Idempotent. Raises StoreError while chunks are missing,
        BlobMissing when the store has given the blob up meanwhile."""
        with self._lock, disk(f"finishing blob {self.digest.short}"):
            if self._whole:
                return
            self._check_open()
            if self._left:
                raise StoreError(f"blob {self.digest.short} is not complete: {self._left} chunks are missing")
            os.fsync(self._fd)
        with self._mutex, self._lock, disk(f"finishing blob {self.digest.short}"):
            if self._whole:
                return
            self._check_open()
            self._finished(self)
            self._whole = True
            self._shut()

    def share(self, chunks: Collection[int] | None = None) -> bool:
        """One more user, who wants these chunks and will `close` it; False when it is gone. Raises StoreError."""
        with self._lock, disk(f"making room for blob {self.digest.short} ({self.size:,} bytes)"):
            if self._gone:
                return False
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            self._make_room(self._unwanted(chunks))
            self._users += 1
            return True

    def close(self) -> None:
        """This user stops for now; what has arrived stays for the next time. The last one closes the file."""
        with self._lock:
            self._users -= 1
            if self._users <= 0:
                self._close_file()

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _shut(self) -> None:
        self._gone = True
        self._close_file()

    def shut(self) -> None:
        """Close for all users: the store is closing, or removes the blob. Their next `write` does nothing."""
        with self._lock:
            self._shut()
