"""The interface of codecs: fixed-size encoded blocks, encoding with error feedback, strict decoding in slices.

A blob is a header of 72 bytes and the encoded blocks, tensors in layout order, blocks in the order of their
coordinates. An encoded block's size depends only on the codec and the block's width, so its position is computed.
Blocks can be encoded on different devices and joined. `docs/codec.md` has the bytes.

Work is done in batches (see `batches`), which bound the memory and change no bit.
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

from protocol.blob_sizes import FORMAT_HEADER, HEADER
from protocol.codec.batches import BATCH_BLOCKS, BATCH_BLOCKS_DEVICE, Batch, BlockRange, split_into_batches
from protocol.errors import CodecError
from protocol.ids import PeerKey
from protocol.layout import BLOCK, Layout, TensorSlice
from protocol.state import flat_view, local_views

MAGIC = b"CRN1"
FORMAT = 2
CHECK_BATCH_BYTES = 256 * 1024
"""Bytes that are checked at once: in a thread beside a busy one, each operation may wait for the interpreter."""

Blob = bytes | bytearray | memoryview
T = TypeVar("T")


class BlockError(Exception):
    """Encoded block `row` of a batch is invalid. Never leaves this package: it becomes a CodecError with the place."""

    def __init__(self, row: int, reason: str):
        super().__init__(reason)
        self.row = row
        self.reason = reason


def reject_rows(bad: Tensor, reason: str) -> None:
    """Raise BlockError with the first row in which `bad` (bool [n] or [n, c]) holds."""
    if bad.any():
        raise BlockError(int(bad.nonzero()[0, 0]), reason)


@dataclass(frozen=True)
class Decoded:
    """The values of an update in a batch or a tensor, flattened.

    `positions is None`: `values` has one fp32 for each coordinate. Otherwise `values[i]` belongs to the coordinate
    `positions[i]` (int64, strictly increasing, relative to the start of the batch or tensor).
    """

    values: Tensor
    positions: Tensor | None


class Codec(ABC):
    """A codec for one layout. Blobs are bytes-like; tensors fp32, contiguous, all of the layout's names."""

    identifier: int
    """The codec's byte in the header."""
    kept: int
    """Coordinates kept of a full block, for the header; 0 for a codec without such a parameter."""
    sends_all: bool
    """Every update has a value for every coordinate, which may be 0."""

    def __init__(self, layout: Layout):
        if sys.byteorder != "little":
            raise CodecError("Cairn's codecs read tensors' memory as little endian: this machine is big endian")
        self.layout = layout
        sizes = [self._blocks_size(t.numel) for t in layout.tensors]
        self._offsets = list(accumulate(sizes, initial=HEADER))
        self.size: int = self._offsets[-1]
        """Exactly how many bytes every blob has."""

    @property
    def header(self) -> bytes:
        """The header of a blob without an author: the place of the key is zero."""
        start = MAGIC + bytes([self.identifier, FORMAT]) + self.kept.to_bytes(2, "little") + self.layout.digest
        return start.ljust(HEADER, b"\0")

    # -- what a codec defines -------------------------------------------------------------------------------

    @abstractmethod
    def encoded_size(self, width: int) -> int:
        """Bytes of an encoded block of `width` coordinates, 1 to 4096."""

    @abstractmethod
    def _encode(self, x: Tensor) -> Tensor:
        """fp32 [n, width] to uint8 [n, encoded_size(width)], leaving in x what decoding it does not give.

        Raises BlockError for values that are not finite or above MAX_INPUT.
        """

    @abstractmethod
    def _decode(self, encoded: Tensor, width: int) -> Decoded:
        """uint8 [n, encoded_size(width)] from untrusted bytes. Raises BlockError."""

    def _check(self, encoded: Tensor, width: int) -> None:
        """Raise BlockError exactly when `_decode` does; it may cost less."""
        self._decode(encoded, width)

    @abstractmethod
    def _sum_squares(self, encoded: Tensor, width: int) -> Tensor:
        """Return the sum of squares of each block's values: fp64 [n], the same bits everywhere. Raises BlockError."""

    # -- encoding -------------------------------------------------------------------------------------------

    def encode(self, feedback: Mapping[str, Tensor], device: torch.device | None = None) -> bytearray:
        """Compress the error feedback e into a blob without an author, in place e <- e - decode(blob), bit for bit.

        The tensors of `feedback` are all on one device; `device` does the work (None: theirs). Of equally
        large coordinates a sparse codec keeps the first. Raises CodecError when e has a
        value that is not finite or absurdly large (e is then spoilt).
        """
        tensors = [flat_view(feedback, t) for t in self.layout.tensors]
        blob = bytearray(self.size)
        blob[:HEADER] = self.header
        for batch in self.batches(device=device or tensors[0].device):
            self.encode_batch(batch, [tensors[p.index][batch.source_slice(p)] for p in batch.segments], blob, device)
        return blob

    def encode_blocks(self, index: int, first: int, values: Tensor, device: torch.device | None = None) -> bytearray:
        """Encode a tensor's blocks from `first` on. `values` is their slice of its flattened error feedback.

        `values` (fp32, contiguous, 1-d) covers whole blocks, or extends to the tensor's end; it is reduced in place by
        what was encoded. A blob is the header and all encoded blocks in order, whoever made which. Raises CodecError.
        """
        numel, start = self.layout.tensors[index].numel, first * BLOCK
        stop = start + values.numel()
        if values.dim() != 1 or first < 0 or stop > numel or (stop != numel and stop % BLOCK):
            raise CodecError(f"{self._where(index)}: coordinates {start} to {stop} of {numel} are not whole blocks")
        encoded = bytearray(self._blocks_size(values.numel()))
        span = BlockRange(index, start, stop, 0)
        for batch in split_into_batches([span], _batch_limit(device or values.device), self.encoded_size(BLOCK)):
            here = [batch.source_slice(p) for p in batch.segments]
            self.encode_batch(batch, [values[h.start - start : h.stop - start] for h in here], encoded, device)
        return encoded

    def encode_batch(
        self, batch: Batch, tensors: Sequence[Tensor], into: bytearray, device: torch.device | None = None
    ) -> None:
        """Encode a batch's coordinates, in place, and put the encoded blocks where they belong in `into`, a blob.

        `tensors`: fp32, each of the batch's segments; or one tensor of all of them. `device` does the work (None:
        theirs). Raises CodecError.
        """
        here = [t.to(device or t.device) for t in tensors]
        x = here[0] if len(here) == 1 else torch.cat(here)
        try:
            encoded = self._encode(x.view(batch.count, batch.width))
        except BlockError as e:
            raise CodecError(f"{self._row(batch, e.row)}: {e.reason}") from None
        if len(tensors) > 1:
            for segment, tensor in zip(batch.segments, tensors, strict=True):
                tensor.copy_(x[batch.batch_slice(segment)])
        elif x is not tensors[0]:
            tensors[0].copy_(x)
        size = encoded.shape[1]
        data = encoded.contiguous().view(-1).cpu().numpy().data
        for p in batch.segments:
            into[p.offset : p.offset + p.count * size] = data[p.row * size : (p.row + p.count) * size]

    # -- decoding -------------------------------------------------------------------------------------------

    def check(self, blob: Blob) -> None:
        """Raise CodecError, with the place, unless every byte is as the format wants it. Memory is bounded."""
        self.check_header(blob)
        self.check_blocks(blob)

    def check_blocks(self, blob: Blob, slices: Sequence[TensorSlice] | None = None) -> None:
        """Raise CodecError unless the blocks of some slices (None: all) of a blob of the right size are valid."""
        for batch in self.batches(max(BATCH_BLOCKS, CHECK_BATCH_BYTES // self.encoded_size(BLOCK)), slices=slices):
            self._read((blob,), batch, "cpu", self._check)

    def check_header(self, blob: Blob) -> None:
        """Raise CodecError unless the blob has the right size and header: what `decode_batch` takes for granted.

        The author may be anybody.
        """
        self.check_size(blob)
        if bytes(blob[:FORMAT_HEADER]) != self.header[:FORMAT_HEADER]:
            raise CodecError("an update for another codec, format or model: its header is not the run's")

    def author_of(self, blob: Blob) -> PeerKey:
        """Return the key that a blob names as its author: all zeros if it names none."""
        return PeerKey(bytes(blob[FORMAT_HEADER:HEADER]))

    def with_author(self, blob: Blob, author: PeerKey) -> bytes:
        """Return the blob with another author: so nobody else can announce it under its digest."""
        view = memoryview(blob)
        return b"".join((view[:FORMAT_HEADER], author, view[HEADER:]))

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
        factor: float = 1.0,
    ) -> None:
        """into <- into + factor * decode(blob): puts a missed update into the error feedback, or takes it out.

        The tensors of `into` are all on one device; with `slices`, they are these (see `local_views`). `mask`: for each
        batch, zeros and ones for the values that the blob lists [batch.count, values that a block lists], on that
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
            if factor != 1.0:
                values = values * factor
            for p in batch.segments:
                start, tensor = mine[p.index]
                target, rows = tensor[batch.source_slice(p, start)], slice(p.row, p.row + p.count)
                if decoded.positions is None:
                    target.add_(values[rows].view(-1))
                else:
                    at = decoded.positions.view(batch.count, -1)[rows].view(-1) - p.row * batch.width
                    target[at] = target[at] + values[rows].view(-1)

    def decode_tensor(self, blob: Blob, index: int) -> Decoded:
        """Return the blob's values of one tensor. Raises CodecError."""
        self.check_header(blob)
        batches = sorted(self.batches(tensor=index), key=lambda batch: batch.segments[0].start)
        decoded = [self.decode_batch(blob, batch) for batch in batches]
        values = torch.cat([d.values for d in decoded])
        if all(d.positions is None for d in decoded):
            return Decoded(values, None)
        every = [
            (torch.arange(batch.numel) if d.positions is None else d.positions) + batch.segments[0].start
            for batch, d in zip(batches, decoded, strict=True)
        ]
        return Decoded(values, torch.cat(every))

    def decode_batch(self, blob: Blob, batch: Batch, device: torch.device | str = "cpu") -> Decoded:
        """Return the values of one batch in a blob whose header was checked. Raises CodecError."""
        return self.decode_batches((blob,), batch, device)

    def decode_batches(self, blobs: Sequence[Blob], batch: Batch, device: torch.device | str = "cpu") -> Decoded:
        """Return the values of one batch in several blobs, one blob after the other, as `decode_batch` does."""
        return self._read(blobs, batch, device, self._decode)

    def sum_squares(
        self, blob: Blob, device: torch.device | str = "cpu", slices: Sequence[TensorSlice] | None = None
    ) -> list[float]:
        """Return the sum of squares of each tensor's decoded values, for exact norms; of the `slices` only, if given.

        Of a blob whose header was checked. `slices`: at most one of a tensor; tensors without have 0. The sum over
        blocks is correctly rounded (fsum): neither order nor grouping can change it. Raises CodecError.
        """
        sums = [0.0] * len(self.layout.tensors)
        left = {p.index: p.blocks for p in (self.layout.full_slices if slices is None else slices)}
        blocks: dict[int, list[float]] = {}  # of tensors of which some blocks are still to come
        for index, found in self.block_sum_squares(blob, device, slices):
            seen = blocks.setdefault(index, [])
            seen += found
            if len(seen) == left[index]:
                sums[index] = fsum(blocks.pop(index))
        return sums

    def block_sum_squares(
        self, blob: Blob, device: torch.device | str = "cpu", slices: Sequence[TensorSlice] | None = None
    ) -> Iterator[tuple[int, list[float]]]:
        """Yield the sums of squares of some blocks and the index of their tensor, until all blocks of `slices` came.

        Their order is the same for all blobs of a codec. See `sum_squares`. Raises CodecError.
        """
        for batch in self.batches(slices=slices, device=device):
            found = self._read((blob,), batch, device, self._sum_squares).tolist()
            for p in batch.segments:
                yield p.index, found[p.row : p.row + p.count]

    # -- where things are -----------------------------------------------------------------------------------

    def batches(
        self,
        limit: int | None = None,
        *,
        tensor: int | None = None,
        slices: Sequence[TensorSlice] | None = None,
        device: torch.device | str = "cpu",
    ) -> Iterator[Batch]:
        """Yield the batches, of at most `limit` blocks, that cover the model, one tensor, or some slices."""
        if slices is None:
            slices = self.layout.full_slices if tensor is None else self.layout.full_slices[tensor : tensor + 1]
        spans = [BlockRange(p.index, p.start, p.stop, self.encoded_range(p)[0]) for p in slices]
        return split_into_batches(spans, limit or _batch_limit(device), self.encoded_size(BLOCK))

    def encoded_range(self, tensor_slice: TensorSlice) -> tuple[int, int]:
        """Return the offset and the size of a slice's encoded blocks in every blob."""
        before = tensor_slice.start // BLOCK * self.encoded_size(BLOCK)
        return self._offsets[tensor_slice.index] + before, self._blocks_size(tensor_slice.numel)

    def _blocks_size(self, numel: int) -> int:
        whole, remaining = divmod(numel, BLOCK)
        return whole * self.encoded_size(BLOCK) + (self.encoded_size(remaining) if remaining else 0)

    def _read(
        self, blobs: Sequence[Blob], batch: Batch, device: torch.device | str, how: Callable[[Tensor, int], T]
    ) -> T:
        size, views = self.encoded_size(batch.width), map(memoryview, blobs)
        # A copy: a view may be of a read-only file, and must not change between the check and the use.
        data = bytearray().join([v[p.offset : p.offset + p.count * size] for v in views for p in batch.segments])
        encoded = torch.frombuffer(data, dtype=torch.uint8).view(-1, size)
        try:
            return how(encoded.to(device), batch.width)
        except BlockError as e:
            raise CodecError(f"{self._row(batch, e.row % batch.count)}: {e.reason}") from None

    def _row(self, batch: Batch, row: int) -> str:
        segment = batch.segment_at(row)
        return f"{self._where(segment.index)}, block {segment.start // BLOCK + row - segment.row}"

    def _where(self, index: int) -> str:
        return f"tensor {self.layout.tensors[index].name[:120]!r}"


def _batch_limit(device: torch.device | str) -> int:
    return BATCH_BLOCKS if torch.device(device).type == "cpu" else BATCH_BLOCKS_DEVICE
