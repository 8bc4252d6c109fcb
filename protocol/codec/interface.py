"""The interface of codecs: fixed-size records of chunks, encoding with error feedback, strict decoding in slices.

A blob is a header of 40 bytes and one record a chunk, tensors in layout order, chunks in the order of their
coordinates. A record's size depends only on the codec and the chunk's width, so the position of any chunk's record is
computed. Records can be made on different devices and joined. `docs/codec.md` has the bytes.

Work goes in runs (see `runs`), which bound the memory and change no bit.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum
from typing import TypeVar

import torch
from torch import Tensor

from protocol.blob_sizes import HEADER
from protocol.codec.batches import BATCH_CHUNKS, BATCH_CHUNKS_DEVICE, Batch, ChunkRange, split_into_batches
from protocol.errors import CodecError
from protocol.layout import CODEC_CHUNK, Layout, TensorSlice
from protocol.state import flat_view, local_views

MAGIC = b"CRN1"
FORMAT = 1
CHECK_BATCH_BYTES = 256 * 1024
"""Of records that are checked at once: in a thread beside a busy one, each operation may wait for the interpreter."""

Blob = bytes | bytearray | memoryview
T = TypeVar("T")


class RecordError(Exception):
    """Row `row` of a run of records is not valid. Never leaves this package: it becomes a CodecError with the place."""

    def __init__(self, row: int, reason: str):
        super().__init__(reason)
        self.row = row
        self.reason = reason


def reject_rows(bad: Tensor, reason: str) -> None:
    """Raise RecordError with the first row in which `bad` (bool [n] or [n, c]) holds."""
    if bad.any():
        raise RecordError(int(bad.nonzero()[0, 0]), reason)


@dataclass(frozen=True)
class Decoded:
    """The values of an update in a batch or a tensor, flattened.

    `positions is None`: `values` has one fp32 for each coordinate. Otherwise `values[i]` belongs to the coordinate
    `positions[i]` (int64, strictly increasing, relative to the start of the run or tensor).
    """

    values: Tensor
    positions: Tensor | None


class Codec(ABC):
    """A codec for one layout. Blobs are bytes-like; tensors fp32, contiguous, all of the layout's names."""

    identifier: int
    """The codec's byte in the header."""
    kept: int
    """Coordinates kept of a full chunk, for the header; 0 when that is no parameter of the codec."""
    sends_all: bool
    """Every update says something of every coordinate, also when it says 0."""

    def __init__(self, layout: Layout):
        if sys.byteorder != "little":
            raise CodecError("Cairn's codecs read tensors' memory as little endian: this machine is big endian")
        self.layout = layout
        sizes = [self._records_size(t.numel) for t in layout.tensors]
        self._offsets = list(accumulate(sizes, initial=HEADER))
        self.size: int = self._offsets[-1]
        """Exactly how many bytes every blob has."""

    @property
    def header(self) -> bytes:
        """The first bytes of every blob."""
        return MAGIC + bytes([self.identifier, FORMAT]) + self.kept.to_bytes(2, "little") + self.layout.digest

    # -- what a codec defines -------------------------------------------------------------------------------

    @abstractmethod
    def record_size(self, width: int) -> int:
        """Bytes of the record of a chunk of `width` coordinates, 1 to 4096."""

    @abstractmethod
    def _encode(self, x: Tensor) -> Tensor:
        """fp32 [n, width] to uint8 [n, record_size(width)], leaving in x what decoding it does not give.

        Raises RecordError for values that are not finite or above MAX_INPUT.
        """

    @abstractmethod
    def _decode(self, records: Tensor, width: int) -> Decoded:
        """uint8 [n, record_size(width)] from a stranger. Raises RecordError."""

    def _check(self, records: Tensor, width: int) -> None:
        """Raise RecordError exactly when `_decode` does; it may cost less."""
        self._decode(records, width)

    @abstractmethod
    def _sum_squares(self, records: Tensor, width: int) -> Tensor:
        """Return the sum of squares of each record's values: fp64 [n], the same bits everywhere. Raises RecordError."""

    # -- encoding -------------------------------------------------------------------------------------------

    def encode(self, feedback: Mapping[str, Tensor]) -> bytearray:
        """Compress the error feedback e into a blob, in place e <- e - decode(blob), bit for bit.

        The tensors of `feedback` are all on one device. A sparse codec may keep any of several equally large
        coordinates; it subtracts the ones that it keeps. Raises CodecError when e has a value that is not finite or
        absurdly large (e is then spoilt).
        """
        tensors = [flat_view(feedback, t) for t in self.layout.tensors]
        blob = bytearray(self.size)
        blob[:HEADER] = self.header
        for batch in self.batches(device=tensors[0].device):
            self.encode_batch(batch, [tensors[p.index][batch.source_slice(p)] for p in batch.segments], blob)
        return blob

    def encode_chunks(self, index: int, first: int, values: Tensor) -> bytearray:
        """Encode the records of a tensor's chunks from `first` on.

        `values` is their slice of its flattened error feedback.

        `values` (fp32, contiguous, 1-d) covers whole chunks, or goes to the tensor's end; it is reduced in place by
        what was encoded. A blob is the header and these records in order, whoever made which. Raises CodecError.
        """
        numel, start = self.layout.tensors[index].numel, first * CODEC_CHUNK
        stop = start + values.numel()
        if values.dim() != 1 or first < 0 or stop > numel or (stop != numel and stop % CODEC_CHUNK):
            raise CodecError(f"{self._where(index)}: coordinates {start} to {stop} of {numel} are not whole chunks")
        records = bytearray(self._records_size(values.numel()))
        span = ChunkRange(index, start, stop, 0)
        for batch in split_into_batches([span], _batch_limit(values.device), self.record_size(CODEC_CHUNK)):
            here = [batch.source_slice(p) for p in batch.segments]
            self.encode_batch(batch, [values[h.start - start : h.stop - start] for h in here], records)
        return records

    def encode_batch(self, batch: Batch, tensors: Sequence[Tensor], into: bytearray) -> None:
        """Encode a batch's coordinates, in place, and put the records where they belong in `into`, a blob.

        `tensors`: fp32, each of the batch's segments; or one tensor of all of them. Raises CodecError.
        """
        x = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
        try:
            records = self._encode(x.view(batch.count, batch.width))
        except RecordError as e:
            raise CodecError(f"{self._row(batch, e.row)}: {e.reason}") from None
        if len(tensors) > 1:
            for segment, tensor in zip(batch.segments, tensors, strict=True):
                tensor.copy_(x[batch.batch_slice(segment)])
        size = records.shape[1]
        data = records.contiguous().view(-1).cpu().numpy().data
        for p in batch.segments:
            into[p.offset : p.offset + p.count * size] = data[p.row * size : (p.row + p.count) * size]

    # -- decoding -------------------------------------------------------------------------------------------

    def check(self, blob: Blob) -> None:
        """Raise CodecError, with the place, unless every byte is as the format wants it. Memory is bounded."""
        self.check_header(blob)
        self.check_records(blob)

    def check_records(self, blob: Blob, slices: Sequence[TensorSlice] | None = None) -> None:
        """Raise CodecError unless the records of some slices (None: all) are valid. Of a blob of the right size."""
        for batch in self.batches(max(BATCH_CHUNKS, CHECK_BATCH_BYTES // self.record_size(CODEC_CHUNK)), slices=slices):
            self._read(blob, batch, "cpu", self._check)

    def check_header(self, blob: Blob) -> None:
        """Raise CodecError unless the blob has the right size and header: what `decode_batch` takes for granted."""
        self.check_size(blob)
        if bytes(blob[:HEADER]) != self.header:
            raise CodecError("an update for another codec, format or model: its header is not the run's")

    def check_size(self, blob: Blob) -> None:
        """Raise CodecError unless the blob has as many bytes as every other."""
        if len(blob) != self.size:
            raise CodecError(f"an update of {len(blob)} bytes: under this run's codec and model it has {self.size}")

    def add_to(
        self,
        blob: Blob,
        into: Mapping[str, Tensor],
        slices: Sequence[TensorSlice] | None = None,
        mask: Callable[[Batch], Tensor] | None = None,
    ) -> None:
        """into <- into + decode(blob): puts an update that missed its round back into the error feedback.

        The tensors of `into` are all on one device; with `slices`, they are these (see `local_views`). `mask`: for each
        batch, zeros and ones for the values that the blob lists [batch.count, values that a chunk lists], on that
        device. Raises CodecError before anything is changed.
        """
        mine = local_views(into, self.layout, slices)
        self.check(blob)
        device = next((t.device for _, t in mine.values()), torch.device("cpu"))
        for batch in self.batches(slices=slices, device=device):
            decoded = self.decode_batch(blob, batch, device)
            values = decoded.values.view(batch.count, -1)
            if mask is not None:
                values = values * mask(batch)
            for p in batch.segments:
                start, tensor = mine[p.index]
                target, rows = tensor[batch.source_slice(p, start)], slice(p.row, p.row + p.count)
                if decoded.positions is None:
                    target.add_(values[rows].view(-1))
                else:
                    at = decoded.positions.view(batch.count, -1)[rows].view(-1) - p.row * batch.width
                    target[at] = target[at] + values[rows].view(-1)

    def decode_tensor(self, blob: Blob, index: int, device: torch.device | str = "cpu") -> Decoded:
        """Return the blob's values of one tensor. Raises CodecError."""
        self.check_header(blob)
        batches = sorted(self.batches(tensor=index, device=device), key=lambda batch: batch.segments[0].start)
        decoded = [self.decode_batch(blob, batch, device) for batch in batches]
        values = torch.cat([d.values for d in decoded])
        if all(d.positions is None for d in decoded):
            return Decoded(values, None)
        every = [
            (torch.arange(batch.numel, device=device) if d.positions is None else d.positions) + batch.segments[0].start
            for batch, d in zip(batches, decoded, strict=True)
        ]
        return Decoded(values, torch.cat(every))

    def decode_batch(self, blob: Blob, batch: Batch, device: torch.device | str = "cpu") -> Decoded:
        """Return the values of one batch in a blob whose header was checked. Raises CodecError."""
        return self._read(blob, batch, device, self._decode)

    def sum_squares(
        self, blob: Blob, device: torch.device | str = "cpu", slices: Sequence[TensorSlice] | None = None
    ) -> list[float]:
        """Return the sum of squares of each tensor's decoded values, for exact norms; of the `slices` only, if given.

        Of a blob whose header was checked. `slices`: at most one of a tensor; tensors without have 0. The sum over
        chunks is correctly rounded (fsum): neither order nor grouping can change it. Raises CodecError.
        """
        sums = [0.0] * len(self.layout.tensors)
        left = {p.index: p.chunks for p in (self.layout.full_slices if slices is None else slices)}
        chunks: dict[int, list[float]] = {}  # of tensors of which some chunks are still to come
        for batch in self.batches(slices=slices, device=device):
            found = self._read(blob, batch, device, self._sum_squares).tolist()
            for p in batch.segments:
                seen = chunks.setdefault(p.index, [])
                seen += found[p.row : p.row + p.count]
                if len(seen) == left[p.index]:
                    sums[p.index] = fsum(chunks.pop(p.index))
        return sums

    # -- where things are -----------------------------------------------------------------------------------

    def batches(
        self,
        limit: int | None = None,
        *,
        tensor: int | None = None,
        slices: Sequence[TensorSlice] | None = None,
        device: torch.device | str = "cpu",
    ) -> Iterator[Batch]:
        """Yield the batches, of at most `limit` chunks, that cover the model, one tensor, or some slices."""
        if slices is None:
            slices = self.layout.full_slices if tensor is None else self.layout.full_slices[tensor : tensor + 1]
        spans = [ChunkRange(p.index, p.start, p.stop, self.record_range(p)[0]) for p in slices]
        return split_into_batches(spans, limit or _batch_limit(device), self.record_size(CODEC_CHUNK))

    def record_range(self, tensor_slice: TensorSlice) -> tuple[int, int]:
        """Return the offset and the size of a slice's records in every blob."""
        before = tensor_slice.start // CODEC_CHUNK * self.record_size(CODEC_CHUNK)
        return self._offsets[tensor_slice.index] + before, self._records_size(tensor_slice.numel)

    def _records_size(self, numel: int) -> int:
        whole, rest = divmod(numel, CODEC_CHUNK)
        return whole * self.record_size(CODEC_CHUNK) + (self.record_size(rest) if rest else 0)

    def _read(self, blob: Blob, batch: Batch, device: torch.device | str, how: Callable[[Tensor, int], T]) -> T:
        size, view = self.record_size(batch.width), memoryview(blob)
        # A copy: the view may be of a read-only file, and must not change between the check and the use.
        data = bytearray().join([view[p.offset : p.offset + p.count * size] for p in batch.segments])
        records = torch.frombuffer(data, dtype=torch.uint8).view(batch.count, size)
        try:
            return how(records.to(device), batch.width)
        except RecordError as e:
            raise CodecError(f"{self._row(batch, e.row)}: {e.reason}") from None

    def _row(self, batch: Batch, row: int) -> str:
        segment = batch.segment_at(row)
        return f"{self._where(segment.index)}, chunk {segment.start // CODEC_CHUNK + row - segment.row}"

    def _where(self, index: int) -> str:
        return f"tensor {self.layout.tensors[index].name[:120]!r}"


def _batch_limit(device: torch.device | str) -> int:
    return BATCH_CHUNKS if torch.device(device).type == "cpu" else BATCH_CHUNKS_DEVICE
