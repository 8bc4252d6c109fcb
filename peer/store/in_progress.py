"""A blob that is still arriving: chunks in any order, each checked before it is written. It survives a restart.

It may stay incomplete. Of a slice only some chunks are wanted, and the file has disk space for those alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from peer.durable import write_at
from peer.store.disk import disk, reserve
from peer.store.errors import BlobMissing, StoreError
from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.merkle import CHUNK, chunk_count, chunk_size, leaf_hash


def bits(flags: bytes | bytearray) -> bytes:
    """Return one bit for each byte that is not 0; the lowest bit of the first byte stands for flag 0."""
    out = bytearray(-(-len(flags) // 8))
    for i, flag in enumerate(flags):
        if flag:
            out[i >> 3] |= 1 << (i & 7)
    return bytes(out)


class InProgressBlob:
    """A blob of which some chunks are here. Made by `Store.receive`, which checks `leaves`. Thread-safe.

    There is one object per blob, shared by all fetches of it; each of them calls `close` once. The chunks that are here
    can be read for as long as the store keeps the blob, even while nobody fetches it.

    The store's lock guards everything that changes. It is not held during slow disk work, which counts as
    `_in_flight`: the file stays open until none is.
    """

    def __init__(
        self,
        path: Path,
        digest: Digest,
        size: int,
        leaves: Sequence[bytes],
        *,
        lock: threading.RLock,
        promote: Callable[[InProgressBlob], None],
    ):
        """Begin without a user, room or file. `promote` moves the complete file into the store and calls `retire`."""
        self.digest = digest
        self.size = size
        self.leaves = list(leaves)
        self.path = path
        self._lock = lock
        self._promote = promote
        self._retired = False
        self._whole = False
        self._users = 0
        self._in_flight = 0
        self._have = bytearray(chunk_count(size))
        self._left = len(self._have)
        self.rechecked = 0
        """Chunks that lay on disk since before the start."""

        self._wanted: set[int] = set()
        self._room = 0
        self._fd = -1

    def _without_space(self, chunks: Collection[int] | None) -> dict[int, int]:
        """Return the chunks of these (None: of all) that have no disk space yet, with their sizes in bytes."""
        named = range(len(self._have)) if chunks is None else chunks
        return {i: chunk_size(self.size, i) for i in named if i not in self._wanted}

    def _reserve(self, fd: int, chunks: dict[int, int]) -> None:
        if len(chunks) == len(self._have):
            reserve(fd, self.size)
        else:
            os.ftruncate(fd, self.size)
            for index, size in chunks.items():
                reserve(fd, size, index * CHUNK)

    @property
    def idle(self) -> bool:
        """True while nobody fetches it."""
        return self._users <= 0

    @property
    def room(self) -> int:
        """Bytes of disk that are reserved for it, or about to be."""
        return self._room

    @property
    def left(self) -> int:
        """The number of chunks that are still to come."""
        return self._left

    @property
    def here(self) -> int:
        """The number of chunks that are here."""
        return len(self._have) - self._left

    def has(self, index: int) -> bool:
        """Return whether a chunk is here, checked."""
        return 0 <= index < len(self._have) and bool(self._have[index])

    def missing(self, chunks: Collection[int] | None = None) -> list[int]:
        """Return the indices of the chunks (of these) that are still to come."""
        return [i for i in (range(len(self._have)) if chunks is None else chunks) if not self._have[i]]

    def is_incomplete(self, chunks: Collection[int] | None = None) -> bool:
        """Return whether any chunk (of these) is still to come."""
        return self._left > 0 if chunks is None else not all(self._have[i] for i in chunks)

    def bitmap(self) -> bytes:
        """Return one bit per chunk, 1 if it is here; the lowest bit of the first byte stands for chunk 0."""
        return bits(self._have)

    def write(self, index: int, data: bytes) -> None:
        """Write a chunk. It is no error if the chunk is here already.

        Raises MalformedError when the data do not hash to the chunk's leaf (nothing is written then), and BlobMissing
        when the store has removed the blob.
        """
        if len(data) != chunk_size(self.size, index) or leaf_hash(data) != self.leaves[index]:
            raise MalformedError(f"chunk {index} is not that of blob {self.digest.short}")
        if self._have[index]:
            return
        try:
            with self._file(f"writing blob {self.digest.short}", reopen=False) as fd:
                write_at(fd, data, index * CHUNK)
        except BlobMissing:
            if not self._whole:  # otherwise the whole blob came another way
                raise
        self._count(index)

    def recheck(self, chunks: Collection[int] | None) -> None:
        """Count what lies on disk of these chunks (None: of all) since before the start, where it hashes to its leaf.

        Raises StoreError, and BlobMissing when the store has removed the blob.
        """
        with self._file(f"reading blob {self.digest.short}") as fd:
            for index in range(len(self._have)) if chunks is None else chunks:
                data = os.pread(fd, chunk_size(self.size, index), index * CHUNK)
                if leaf_hash(data) == self.leaves[index]:
                    self._count(index)
                    self.rechecked += 1

    def _count(self, index: int) -> None:
        with self._lock:
            if not self._have[index]:
                self._have[index] = 1
                self._left -= 1

    def read_chunk(self, index: int) -> bytes:
        """Return a chunk that is here already, for other peers. Raises BlobMissing."""
        if not self.has(index):
            raise BlobMissing(f"chunk {index} of blob {self.digest.short} has not arrived yet")
        with self._file(f"reading blob {self.digest.short}") as fd:
            return os.pread(fd, chunk_size(self.size, index), index * CHUNK)

    def finish(self) -> None:
        """Flush the complete file and move it into the store. Idempotent.

        Raises StoreError while chunks are missing, and BlobMissing when the store has removed the blob.
        """
        if self._whole:
            return
        self.check_kept()
        if self._left:
            raise StoreError(f"blob {self.digest.short} is not complete: {self._left} chunks are missing")
        try:
            with self._file(f"finishing blob {self.digest.short}", reopen=False) as fd:
                os.fsync(fd)
                self._promote(self)
        except BlobMissing:
            if not self._whole:
                raise

    # -- for the store, which holds the lock -------------------------------------------------------------------------

    def more_room(self, chunks: Collection[int] | None) -> int:
        """Return the bytes that `claim` would claim for these (None: all). Raises MalformedError (no such chunk)."""
        return sum(self._without_space(chunks).values())

    def claim(self, chunks: Collection[int] | None) -> dict[int, int]:
        """Count one more user, who wants these chunks and will call `close`. Return those without reserved space."""
        claimed = self._without_space(chunks)
        self._wanted.update(claimed)
        self._room += sum(claimed.values())
        self._users += 1
        return claimed

    def retire(self, *, whole: bool) -> None:
        """End it for all users: the whole blob is in the store, or the blob was removed."""
        self._retired = True
        if whole:
            self._whole = True
            self._have = bytearray(b"\1" * len(self._have))
            self._left = 0
        self._close_if_unused()

    # -- for the store, which holds `_files_lock` -------------------------------------------------------------------

    def create(self, claimed: dict[int, int]) -> None:
        """Make the file, or open that of an earlier attempt, and reserve the space of claimed chunks.

        `recheck` counts what lies there. Raises StoreError: then a file made here is gone, and the store retires it.
        """
        with disk(self._making_room):
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            begun = os.fstat(self._fd).st_size == self.size
            try:
                if not begun:
                    os.ftruncate(self._fd, 0)
                self._reserve(self._fd, claimed)
            except OSError:
                if not begun:  # otherwise chunks of an earlier attempt are in it
                    os.unlink(self.path)
                raise

    def make_room(self, claimed: dict[int, int]) -> None:
        """Reserve the space of claimed chunks. Raises StoreError: then the claim and its use are over."""
        try:
            with self._file(self._making_room) as fd:
                self._reserve(fd, claimed)
        except BaseException:
            with self._lock:
                self._wanted.difference_update(claimed)
                self._room -= sum(claimed.values())
            self.close()
            raise

    def check_kept(self) -> None:
        """Raise BlobMissing when the store has removed it, or holds it whole."""
        if self._retired:
            raise BlobMissing(f"blob {self.digest.short} is not wanted any more")

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def _making_room(self) -> str:
        return f"making room for blob {self.digest.short} ({self.size:,} bytes)"

    def close(self) -> None:
        """End one use. The chunks stay for the next one; the last one closes the file."""
        with self._lock:
            self._users -= 1
            self._close_if_unused()

    @contextmanager
    def _file(self, doing: str, *, reopen: bool = True) -> Iterator[int]:
        """Keep the file open meanwhile. Raises StoreError; BlobMissing when the store has removed it or holds it whole.

        Without `reopen` it is BlobMissing, too, when all users have closed it.
        """
        with disk(doing):
            with self._lock:
                self.check_kept()
                if self._fd < 0:
                    if not reopen:
                        raise BlobMissing(f"blob {self.digest.short} is not wanted any more")
                    self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                self._in_flight += 1
            try:
                yield self._fd
            finally:
                with self._lock:
                    self._in_flight -= 1
                    self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._fd >= 0 and not self._in_flight and (self._retired or self.idle):
            os.close(self._fd)
            self._fd = -1
