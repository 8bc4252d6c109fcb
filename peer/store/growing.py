"""A blob that its author is still making: chunks that can be had before there is a digest for all of them.

It goes by a name that all who have to do with it can tell; each chunk is checked against the leaf hash that the author
gave for it. Nothing of it survives a restart.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from peer.store.disk import disk, remove, write_at
from peer.store.errors import BlobMissing
from peer.store.partial import bits
from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.merkle import CHUNK, chunk_count, chunk_size, leaf_hash


class Growing(ABC):
    """Its chunks can be read, like those of a `Partial`, until the store lets go of it. Thread-safe."""

    def __init__(self, name: Digest, size: int, fd: int):
        """`size` is that of the whole blob; takes over `fd`, of the file that has it in its place."""
        self.name = name
        self.size = size
        self._fd = fd
        self._lock = threading.Lock()
        self._leaves: list[bytes] = [b""] * chunk_count(size)
        self._have = bytearray(chunk_count(size))

    @property
    @abstractmethod
    def room(self) -> int:
        """Bytes of the store's disk that it takes."""

    @property
    def gone(self) -> bool:
        """The store has let go of it."""
        return self._fd < 0

    @property
    def leaves(self) -> Sequence[bytes]:
        """The leaf hashes; b"" where none is known yet."""
        return self._leaves

    def has(self, index: int) -> bool:
        """Whether a chunk is here, checked."""
        return 0 <= index < len(self._have) and bool(self._have[index])

    def bitmap(self) -> bytes:
        """One bit a chunk, the lowest bit of the first byte for chunk 0."""
        return bits(self._have)

    def read_chunk(self, index: int) -> bytes:
        """A chunk that is here. Raises BlobMissing."""
        with self._lock, disk(f"reading what comes of blob {self.name.short}"):
            data = b"" if self.gone or not self.has(index) else self._read(index)
        if not data:
            raise BlobMissing(f"chunk {index} of a blob that grows is not here")
        return data

    def _read(self, index: int) -> bytes:
        return os.pread(self._fd, chunk_size(self.size, index), index * CHUNK)

    def shut(self) -> None:
        """The store lets go of it: nothing can be read or written any more."""
        with self._lock:
            if not self.gone:
                os.close(self._fd)
                self._fd = -1


class Made(Growing):
    """One that is made on this machine: the file is its maker's."""

    @property
    def room(self) -> int:
        return 0

    def grow(self, final: int) -> None:
        """The file's first `final` bytes will not change: hash what is new of them. Raises StoreError."""
        chunks = len(self._leaves) if final >= self.size else final // CHUNK
        for index in (i for i in range(chunks) if not self._have[i]):
            with self._lock, disk("reading an update that is being made"):
                data = b"" if self.gone else self._read(index)
            if len(data) != chunk_size(self.size, index):
                raise BlobMissing("an update that was being made is gone")
            self._leaves[index] = leaf_hash(data)
            self._have[index] = 1

    @property
    def known(self) -> int:
        """How many chunks, from the first on, are here."""
        return sum(self._have)


class Ahead(Growing):
    """One that somebody else makes: leaf hashes come by his messages, then the chunks, in any order."""

    def __init__(self, name: Digest, size: int, path: Path, check_room: Callable[[int], None]):
        """`check_room(bytes)` raises StoreFull when so much more is not to be had."""
        with disk("making room for what comes of an update"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            os.ftruncate(fd, size)  # a hole: room is taken by what comes
        super().__init__(name, size, fd)
        self.path = path
        self._check_room = check_room
        self._room = 0

    @property
    def room(self) -> int:
        return self._room

    def hint(self, first: int, leaves: Sequence[bytes]) -> bool:
        """The author's word on the chunks from `first` on; False when it cannot be, or was another before."""
        if not 0 <= first <= len(self._leaves) - len(leaves):
            return False
        fits = all(known in (b"", leaf) for known, leaf in zip(self._leaves[first:], leaves, strict=False))
        if fits:
            self._leaves[first : first + len(leaves)] = leaves
        return fits

    def missing(self) -> list[int]:
        """The chunks whose leaf hash is known, and that are not here."""
        return [i for i, leaf in enumerate(self._leaves) if leaf and not self._have[i]]

    def write(self, index: int, data: bytes) -> None:
        """Take a chunk. Raises MalformedError when it is not the one that was hinted, BlobMissing when the store has
        let go of the blob, StoreFull."""
        if len(data) != chunk_size(self.size, index) or leaf_hash(data) != self._leaves[index]:
            raise MalformedError(f"chunk {index} is not the one that its author named")
        self._check_room(len(data))
        with self._lock, disk("writing what comes of an update"):
            if self.gone:
                raise BlobMissing("an update that was being made is not wanted any more")
            if self._have[index]:
                return
            write_at(self._fd, data, index * CHUNK)
            self._have[index] = 1
            self._room += len(data)

    def checked(self) -> dict[int, bytes]:
        """The chunks that are here, by the leaf hashes that they have."""
        return {i: leaf for i, leaf in enumerate(self._leaves) if self._have[i]}

    def drop(self) -> None:
        """Shut it, and give its disk back. Raises StoreError."""
        self.shut()
        with disk("removing what came of an update"):
            remove(self.path)
