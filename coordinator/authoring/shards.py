"""Token shards on disk: written chunk by chunk under a temporary name, then named by the digest of their contents."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from coordinator import durable
from protocol.merkle import CHUNK, leaf_hash, tree_hash
from protocol.spec import BEGINS, DataShard

PARTIAL = ".partial-"


class WindowWriter:
    """A writer of windows of marked tokens as shards of at most `tokens_each` tokens.

    A window's last target is the token after it. So a shard ends with one more token, `end`: none of its own.
    """

    def __init__(self, folder: Path, split: str, window: int, tokens_each: int, end: int):
        self._after = np.array([end | BEGINS], dtype=np.uint32)
        self._each = (tokens_each - 1) // window
        self._windows = 0
        self._shards = ShardWriter(folder, split, "uint32", self._each * window + 1)

    def add(self, window: np.ndarray) -> None:
        """Append a window (uint32 [window])."""
        self._shards.add(window)
        self._windows += 1
        if self._windows == self._each:
            self._end()

    def finish(self) -> list[DataShard]:
        """End the last shard and return all shards, which are then on disk under their names."""
        if self._windows:
            self._end()
        return self._shards.finish()

    def close(self) -> None:
        """Close the open file after a failure."""
        self._shards.close()

    def _end(self) -> None:
        self._shards.add(self._after)
        self._windows = 0


class ShardWriter:
    """A writer of tokens as shards of at most `tokens_each` tokens: DIGEST.tokens and DIGEST.leaves.

    A shard's bytes are its tokens, little endian, of `dtype` ("uint16" or "uint32"). It needs one chunk of memory.
    `split` distinguishes writers in one folder.
    """

    def __init__(self, folder: Path, split: str, dtype: str, tokens_each: int):
        self.shards: list[DataShard] = []
        self._folder, self._split = folder, split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens_each = tokens_each
        self._begin()

    def _begin(self) -> None:
        self._tokens = 0
        self._leaves: list[bytes] = []
        self._buffer = bytearray()
        self._path = self._folder / f"{PARTIAL}{self._split}"
        self._file = None

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens (integers [n] that fit the dtype)."""
        while len(tokens):
            fitting = tokens[: self._tokens_each - self._tokens]
            tokens = tokens[len(fitting) :]
            self._tokens += len(fitting)
            self._buffer += fitting.astype(self._dtype).tobytes()
            self._write_chunks()
            if self._tokens == self._tokens_each:
                self._end()

    def finish(self) -> list[DataShard]:
        """End the last shard and return all shards, which are then on disk under their names."""
        if self._tokens:
            self._end()
        return self.shards

    def close(self) -> None:
        """Close the open file after a failure."""
        if self._file:
            self._file.close()

    def _write_chunks(self, last: bool = False) -> None:
        while len(self._buffer) >= CHUNK or (last and self._buffer):
            chunk = bytes(self._buffer[:CHUNK])
            del self._buffer[:CHUNK]
            if self._file is None:
                self._file = self._path.open("wb")
            self._file.write(chunk)
            self._leaves.append(leaf_hash(chunk))

    def _end(self) -> None:
        self._write_chunks(last=True)
        assert self._file is not None  # a shard with tokens has at least one chunk
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        digest = tree_hash(self._leaves)
        durable.replace(self._folder / f"{digest}.leaves", b"".join(self._leaves))
        self._path.rename(self._folder / f"{digest}.tokens")
        durable.sync(self._folder)
        shard = DataShard(digest=str(digest), size=self._tokens * self._dtype.itemsize, tokens=self._tokens)
        self.shards.append(shard)
        self._begin()
