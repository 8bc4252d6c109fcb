"""The data that a trainer reads: windows of verified tokens, by index, from this disk or from the spec's addresses.

Every chunk is checked against the shard's digest before one of its tokens is used, whatever its source. A source that
fails is tried last for a while. An address that returns wrong bytes is not used for that shard again. This disk is, for
the node repairs it. All are reported by name. Memory is bounded by the cache, the leaf hashes in use and the batches
that are read ahead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from peer.errors import PeerError
from peer.training.sources import CACHE_BYTES, LocalFiles, RemoteFolder, ShardSource, SourceError, at_address
from protocol.assignment import WindowTable
from protocol.errors import MalformedError, SpecError
from protocol.ids import Digest
from protocol.merkle import CHUNK, check_leaves, chunk_count, chunk_size, leaf_hash
from protocol.spec import NUMBER, DataShard, DataSpec

LEAVES_KEPT = 64 * 1024 * 1024
"""Maximum bytes of leaf hashes in memory: those of 512 GiB of shards."""

AHEAD = 2
"""Batches that are read ahead."""

BACKOFF_SECONDS = 15.0
"""Time for which a source that failed is tried last; doubled each time, up to MAX_BACKOFF_SECONDS."""

MAX_BACKOFF_SECONDS = 600.0

_log = logging.getLogger("cairn.data")


class DataError(PeerError):
    """Tokens that are unavailable, or must not be used."""


class BadBytesError(DataError):
    """A source returned bytes that are not the shard's. The message names the source and the shard."""


class DataUnavailableError(DataError):
    """No source returned a range of a shard. The message lists each source's reason."""

    def __init__(self, shard: Digest, why: str):
        super().__init__(why)
        self.shard = shard


class WindowReader:
    """Reader of windows of the training or the validation data, by index. Thread-safe.

    Args:
        data: the spec's data.
        local: shards that lie on this disk, by digest.
        part: "train" (indices as in `protocol.assignment`) or "validation".
        cache_bytes: verified chunks in memory, at least one.
        timeout: seconds for one request to an address.
        vocabulary: when given, a token that is not below it is a DataError that names the shard.
        report: called with a sentence about each source that failed; by default the log "cairn.data".
        private_data: the spec's addresses may be private (`sources.at_address`).
    """

    def __init__(
        self,
        data: DataSpec,
        local: Mapping[Digest, Path] | None = None,
        *,
        part: Literal["train", "validation"] = "train",
        cache_bytes: int = CACHE_BYTES,
        timeout: float = 30.0,
        vocabulary: int | None = None,
        report: Callable[[str], None] | None = None,
        private_data: bool = False,
    ):
        self.window = data.window
        self._shards = data.train if part == "train" else data.validation
        self._table = WindowTable.of(self._shards, data.window)
        self._dtype = np.dtype("<u2" if data.dtype == "uint16" else "<u4")
        self._number = self._dtype.type(np.iinfo(self._dtype).max if data.conversations is None else NUMBER)
        self._vocabulary = vocabulary
        self._report = report or _log.warning
        self._lock = threading.Lock()
        self._chunk = lru_cache(max(1, cache_bytes // CHUNK))(self._fetch_chunk)
        largest = max((32 * chunk_count(shard.size) for shard in self._shards), default=32)
        self._leaves_of = lru_cache(max(1, LEAVES_KEPT // largest))(self._fetch_leaves)
        self._distrusted: set[tuple[str, Digest]] = set()
        self._backoff: dict[str, tuple[float, float]] = {}  # source -> (end of the backoff, the next one's length)
        self._sources: list[ShardSource] = [LocalFiles(local)] if local else []
        for address in data.addresses:  # tried in order, after this disk
            try:
                self._sources.append(at_address(address, timeout, private=private_data))
            except SpecError as e:
                self._report(f"an address of the data is not used: {e}")

    @property
    def total(self) -> int:
        """Number of windows."""
        return self._table.total

    @property
    def bytes_received(self) -> int:
        """Bytes that came from addresses, this disk's own not counted."""
        return sum(s.received for s in self._sources if isinstance(s, RemoteFolder) and s.is_remote)

    def read(self, windows: Sequence[int] | np.ndarray) -> Tensor:
        """Return the tokens of windows: int64 [len(windows), window + 1], marked if the run's are.

        `protocol.marked_tokens` has what a model reads of them.

        Raises MalformedError for an index that does not exist, DataError when no source returned good bytes.
        """
        out = np.empty((len(windows), self.window + 1), dtype=np.int64)
        with self._lock:
            for row, index in enumerate(windows):
                shard, first = self._table.locate(int(index))
                out[row] = self._tokens(shard, first)
        return torch.from_numpy(out)

    def _tokens(self, shard: int, first: int) -> np.ndarray:
        width = self._dtype.itemsize
        start, end = first * width, (first + self.window + 1) * width
        parts = []
        for index in range(start // CHUNK, (end - 1) // CHUNK + 1):
            offset = index * CHUNK
            parts.append(self._chunk(shard, index)[max(0, start - offset) : end - offset])
        tokens = np.frombuffer(b"".join(parts), dtype=self._dtype)
        largest = int((tokens & self._number).max())
        if self._vocabulary is not None and largest >= self._vocabulary:
            raise DataError(
                f"shard {self._shards[shard].name.short} has the token {largest}, the model's vocabulary "
                f"ends at {self._vocabulary - 1}: the run's owner must prepare the data with the model's tokenizer"
            )
        return tokens

    def _fetch_chunk(self, shard: int, index: int) -> bytes:
        ref = self._shards[shard]
        expected = self._leaves_of(shard)[32 * index : 32 * index + 32]

        def get(source: ShardSource) -> bytes:
            data = source.chunk(ref.name, index * CHUNK, chunk_size(ref.size, index))
            if leaf_hash(data) != expected:
                raise BadBytesError(f"{source.name} gave wrong bytes for shard {ref.name.short}, chunk {index}")
            return data

        return self._from_any(ref, f"chunk {index}", get)

    def _fetch_leaves(self, shard: int) -> bytes:
        ref = self._shards[shard]

        def get(source: ShardSource) -> bytes:
            data = source.leaves(ref.name, ref.size)
            try:
                check_leaves(ref.name, ref.size, [data[i : i + 32] for i in range(0, len(data), 32)])
            except MalformedError:
                raise BadBytesError(f"{source.name} gave wrong leaf hashes for shard {ref.name.short}") from None
            return data

        return self._from_any(ref, "the leaf hashes", get)

    def _from_any(self, ref: DataShard, what: str, get: Callable[[ShardSource], bytes]) -> bytes:
        """Return the bytes of the first source that has them; failed ones come last. Raises DataUnavailableError."""
        now = time.monotonic()
        reasons = []
        for source in sorted(self._sources, key=lambda s: self._backoff.get(s.name, (0.0, 0.0))[0] > now):
            if (source.name, ref.name) in self._distrusted:
                reasons.append(f"{source.name} gave wrong bytes before")
                continue
            try:
                data = get(source)
            except BadBytesError as e:
                reasons.append(str(e))
                if isinstance(source, LocalFiles):
                    self._report(str(e))
                else:
                    self._distrusted.add((source.name, ref.name))
                    self._report(f"{e}; it is not asked for this shard again")
            except SourceError as e:
                reasons.append(str(e))
                until, wait = self._backoff.get(source.name, (0.0, BACKOFF_SECONDS))
                if source.name != LocalFiles.name and now >= until:
                    self._backoff[source.name] = (now + wait, min(2 * wait, MAX_BACKOFF_SECONDS))
                    self._report(f"no data from {source.name} ({e}); it is asked last for {wait:.0f} s")
            else:
                if source.name in self._backoff:
                    del self._backoff[source.name]
                return data
        tried = "; ".join(reasons) or "the spec names no address, and the shard is not on this disk"
        raise DataUnavailableError(ref.name, f"{what} of shard {ref.name.short} cannot be had: {tried}")


class Batches:
    """Batches of a peer's windows by its counter; a thread reads ahead. Used by one thread.

    Args:
        reader: the source of the windows.
        windows: (first counter, count) -> window indices; `protocol.assignment.windows_of` with the rest bound.
        batch: windows in a batch.
        prepare: called with each batch by the thread that reads it.
    """

    def __init__(
        self,
        reader: WindowReader,
        windows: Callable[[int, int], np.ndarray],
        *,
        batch: int,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ):
        self._reader, self._windows, self._batch = reader, windows, batch
        self._prepare = prepare or (lambda tokens: tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read ahead")
        self._ahead: dict[int, Future[Tensor]] = {}
        """The batches that are read, or are about to be, by their first counter."""

    @property
    def bytes_received(self) -> int:
        """Bytes that came from addresses so far."""
        return self._reader.bytes_received

    def request(self, first: int) -> Future[Tensor]:
        """Have the batch of counters [first, first + batch) read, and AHEAD ones after it. Return its future."""
        wanted = range(first, first + (1 + AHEAD) * self._batch, self._batch)
        if first not in self._ahead:
            self.close()
        for counter in wanted:
            if counter not in self._ahead:
                before = self._ahead.get(counter - self._batch)
                self._ahead[counter] = self._thread.submit(self._read, counter, before)
        return self._ahead[first]

    def take(self, first: int) -> Tensor:
        """Return the batch of counters [first, first + batch): int64 [batch, window + 1]. Wait for it if need be.

        A `first` that was not read ahead restarts the reading. Raises the error of reading (DataError); another call
        for the same batch tries again. A batch that was read is kept until a later one is taken.
        """
        try:
            tokens = self.request(first).result()
        except Exception:
            self.close()
            raise
        self._ahead = {counter: batch for counter, batch in self._ahead.items() if counter >= first}
        return tokens

    def close(self) -> None:
        """Stop reading ahead."""
        for batch in self._ahead.values():
            batch.cancel()
        self._ahead = {}

    def _read(self, first: int, before: Future[Tensor] | None) -> Tensor:
        if before is not None and (error := before.exception()) is not None:
            raise error  # another try begins with the batch that failed, and must not wait for this one
        return self._prepare(self._reader.read(self._windows(first, self._batch)))
