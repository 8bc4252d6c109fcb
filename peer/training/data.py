"""The data that a trainer reads: windows of verified tokens, by index, from this disk or from the spec's addresses.

Every chunk is checked against the shard's digest before one of its tokens is used, whatever its source. A source that
fails is tried last for a while. One that returns wrong bytes is not used for that shard again. Both are reported by
name. Memory is bounded by the cache, the leaf hashes in use and the batches that are read ahead.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from peer.errors import PeerError
from peer.training.sources import LocalFiles, ShardSource, SourceError, at_address
from protocol.assignment import WindowTable
from protocol.bounded import BoundedDict
from protocol.errors import MalformedError, SpecError
from protocol.ids import Digest
from protocol.merkle import CHUNK, check_leaves, chunk_size, leaf_hash
from protocol.spec import DataShard, DataSpec

LEAVES_KEPT = 64 * 1024 * 1024
"""Maximum bytes of leaf hashes in memory: those of 512 GiB of shards."""

BACKOFF_SECONDS = 15.0
"""Time for which a source that failed is tried last; doubled each time, up to BACKOFF_MOST_SECONDS."""

BACKOFF_MOST_SECONDS = 600.0

_log = logging.getLogger("cairn.data")


class DataError(PeerError):
    """Tokens that are unavailable, or must not be used."""


class BadBytesError(DataError):
    """A source returned bytes that are not the shard's. The message names the source and the shard."""


class DataUnavailableError(DataError):
    """No source returned a range of a shard. The message lists each source's reason."""


class WindowReader:
    """Reader of windows of the training or the validation data, by index. Thread-safe.

    Args:
        data: the spec's data.
        local: shards that lie on this disk, by digest.
        part: "train" (indices as in `protocol.assignment`) or "validation".
        addresses: other sources, by default those of the spec. Tried in order, after this disk.
        cache_bytes: verified chunks in memory, at least one.
        timeout: seconds for one request to an address.
        vocabulary: when given, a token that is not below it is a DataError that names the shard.
        report: called with a sentence about each source that failed; by default the log "cairn.data".
    """

    def __init__(
        self,
        data: DataSpec,
        local: Mapping[Digest, Path] | None = None,
        *,
        part: Literal["train", "validation"] = "train",
        addresses: Sequence[str] | None = None,
        cache_bytes: int = 128 * 1024 * 1024,
        timeout: float = 30.0,
        vocabulary: int | None = None,
        report: Callable[[str], None] | None = None,
    ):
        self.window = data.window
        self._shards = data.train if part == "train" else data.validation
        self._table = WindowTable.of(self._shards, data.window)
        self._dtype = np.dtype("<u2" if data.dtype == "uint16" else "<u4")
        self._vocabulary = vocabulary
        self._report = report or _log.warning
        self._lock = threading.Lock()
        self._chunks: BoundedDict[tuple[int, int], bytes] = BoundedDict(max(1, cache_bytes // CHUNK))
        self._leaves: OrderedDict[int, bytes] = OrderedDict()
        self._distrusted: set[tuple[str, Digest]] = set()
        self._backoff: dict[str, tuple[float, float]] = {}  # source -> (end of the backoff, the next one's length)
        self._sources: list[ShardSource] = [LocalFiles(local)] if local else []
        for address in data.addresses if addresses is None else addresses:
            try:
                self._sources.append(at_address(address, timeout))
            except SpecError as e:
                self._report(f"an address of the data is not used: {e}")

    @property
    def total(self) -> int:
        """Number of windows."""
        return self._table.total

    def read(self, windows: Sequence[int] | np.ndarray) -> Tensor:
        """Return the tokens of windows: int64 [len(windows), window + 1]; inputs are [:, :-1], targets [:, 1:].

        Raise MalformedError for an index that does not exist, DataError when no source returned good bytes.
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
        if self._vocabulary is not None and int(tokens.max()) >= self._vocabulary:
            raise DataError(
                f"shard {self._shards[shard].name.short} has the token {int(tokens.max())}, the model's vocabulary "
                f"ends at {self._vocabulary - 1}: the run's owner must prepare the data with the model's tokenizer"
            )
        return tokens

    def _chunk(self, shard: int, index: int) -> bytes:
        kept = self._chunks.get((shard, index))
        if kept is not None:
            self._chunks.move_to_end((shard, index))
            return kept
        ref = self._shards[shard]
        leaves = self._leaves_of(shard)
        expected = leaves[32 * index : 32 * index + 32]

        def get(source: ShardSource) -> bytes:
            data = source.chunk(ref.name, index * CHUNK, chunk_size(ref.size, index))
            if leaf_hash(data) != expected:
                raise BadBytesError(f"{source.name} gave wrong bytes for shard {ref.name.short}, chunk {index}")
            return data

        data = self._from_any(ref, f"chunk {index}", get)
        self._chunks[shard, index] = data
        return data

    def _leaves_of(self, shard: int) -> bytes:
        kept = self._leaves.get(shard)
        if kept is not None:
            self._leaves.move_to_end(shard)
            return kept
        ref = self._shards[shard]

        def get(source: ShardSource) -> bytes:
            data = source.leaves(ref.name, ref.size)
            try:
                check_leaves(ref.name, ref.size, [data[i : i + 32] for i in range(0, len(data), 32)])
            except MalformedError:
                raise BadBytesError(f"{source.name} gave wrong leaf hashes for shard {ref.name.short}") from None
            return data

        leaves = self._from_any(ref, "the leaf hashes", get)
        self._leaves[shard] = leaves
        while len(self._leaves) > 1 and sum(map(len, self._leaves.values())) > LEAVES_KEPT:
            self._leaves.popitem(last=False)
        return leaves

    def _from_any(self, ref: DataShard, what: str, get: Callable[[ShardSource], bytes]) -> bytes:
        """Return the bytes of the first source that has them; failed ones come last. Raise DataUnavailableError."""
        now = time.monotonic()
        reasons = []
        for source in sorted(self._sources, key=lambda s: self._backoff.get(s.name, (0.0, 0.0))[0] > now):
            if (source.name, ref.name) in self._distrusted:
                reasons.append(f"{source.name} gave wrong bytes before")
                continue
            try:
                data = get(source)
            except BadBytesError as e:
                self._distrusted.add((source.name, ref.name))
                self._report(f"{e}; it is not asked for this shard again")
                reasons.append(str(e))
            except SourceError as e:
                reasons.append(str(e))
                until, wait = self._backoff.get(source.name, (0.0, BACKOFF_SECONDS))
                if source.name != LocalFiles.name and now >= until:
                    self._backoff[source.name] = (now + wait, min(2 * wait, BACKOFF_MOST_SECONDS))
                    self._report(f"no data from {source.name} ({e}); it is asked last for {wait:.0f} s")
            else:
                if source.name in self._backoff:
                    del self._backoff[source.name]
                return data
        tried = "; ".join(reasons) or "the spec names no address, and the shard is not on this disk"
        raise DataUnavailableError(f"{what} of shard {ref.name.short} cannot be had: {tried}")


class Batches:
    """Batches of a peer's windows by its counter; a thread reads ahead.

    Args:
        reader: the source of the windows.
        windows: (first counter, count) -> window indices; `protocol.assignment.windows_of` with the rest bound.
        batch: windows in a batch.
        depth: maximum number of batches that are read ahead.
        prepare: called with each batch by the thread that reads it.
    """

    def __init__(
        self,
        reader: WindowReader,
        windows: Callable[[int, int], np.ndarray],
        *,
        batch: int,
        depth: int = 2,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ):
        self._reader, self._windows, self._batch = reader, windows, batch
        self._prepare = prepare or (lambda tokens: tokens)
        self._ready: queue.Queue[tuple[int, Tensor | Exception]] = queue.Queue(maxsize=max(1, depth))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._next = -1

    def take(self, first: int) -> Tensor:
        """Return the batch of counters [first, first + batch): int64 [batch, window + 1].

        A `first` that does not follow the last one restarts the reading ahead. Raise the error of reading (DataError);
        another call for the same batch tries again.
        """
        if first != self._next or self._thread is None:
            self._restart(first)
        _, got = self._ready.get()  # the thread always answers: its requests have deadlines
        if isinstance(got, Exception):
            self._next = -1
            raise got
        self._next = first + self._batch
        return got

    def close(self) -> None:
        """Stop reading ahead."""
        self._stop.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._thread = None

    def _restart(self, first: int) -> None:
        self.close()
        # A new queue and flag: an old thread may still be in a request, and its batches must not arrive here.
        self._stop = threading.Event()
        self._ready = queue.Queue(maxsize=self._ready.maxsize)
        self._thread = threading.Thread(
            target=self._read_ahead, args=(first, self._ready, self._stop), name="read ahead", daemon=True
        )
        self._thread.start()

    def _read_ahead(self, first: int, ready: queue.Queue, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                got: Tensor | Exception = self._prepare(self._reader.read(self._windows(first, self._batch)))
            except Exception as e:  # noqa: BLE001 - raised again in `take`, in the thread that trains
                got = e
            while not stop.is_set():
                try:
                    ready.put((first, got), timeout=0.2)
                    break
                except queue.Full:
                    continue
            if isinstance(got, Exception):
                return
            first += self._batch
