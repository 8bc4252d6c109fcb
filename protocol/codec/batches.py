"""Batches, the units of work on a blob: blocks of one width, gathered from as many tensors as it takes.

A model has many small tensors, and one call of torch costs as much as the arithmetic on thousands of coordinates.
Tensor by tensor, a small model's round would consist of calls. Batches also bound the memory. Neither their length nor
their contents change a bit: no operation of a codec or of the outer step looks from one block to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protocol.layout import BLOCK

BATCH_BLOCKS = 288
"""Blocks in a batch on a CPU: 4.5 MiB of fp32 stay near the caches; a model of a million parameters is one batch."""
BATCH_BLOCKS_DEVICE = 8192
"""Blocks in a batch on an accelerator: 2**25 coordinates, so that the launches do not show."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Coordinates `start` (a block's first) to `stop` (a block's end, or the tensor's) of tensor `index`.

    `offset` is where its first encoded block lies.
    """

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` consecutive blocks of tensor `index`, from its coordinate `start` on.

    `row` is the first one's place in the batch, `offset` where it lies, encoded, in the blob.
    """

    index: int
    start: int
    count: int
    row: int
    offset: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of `width` coordinates: those of its segments, one after the other."""

    width: int
    segments: tuple[Segment, ...]

    @property
    def count(self) -> int:
        """How many blocks."""
        last = self.segments[-1]
        return last.row + last.count

    @property
    def numel(self) -> int:
        return self.count * self.width

    def source_slice(self, segment: Segment, origin: int = 0) -> slice:
        """Return the segment's range in its flattened tensor, which may be a local slice that begins at `origin`."""
        start = segment.start - origin
        return slice(start, start + segment.count * self.width)

    def batch_slice(self, segment: Segment) -> slice:
        """Return the range of the segment's coordinates in the batch."""
        return slice(segment.row * self.width, (segment.row + segment.count) * self.width)

    def segment_at(self, row: int) -> Segment:
        """Return the segment that has the batch's block `row`."""
        return next(p for p in self.segments if row < p.row + p.count)


def split_into_batches(ranges: Iterable[BlockRange], limit: int, block_bytes: int) -> Iterator[Batch]:
    """Yield the batches, of at most `limit` blocks, that cover the ranges. `block_bytes`: of a full encoded block.

    First all shorter last blocks, by width; then the full ones, in the order of the ranges.
    """
    ranges = list(ranges)
    shorter: dict[int, list[Segment]] = {}
    for block_range in ranges:
        if width := block_range.stop % BLOCK:
            start = block_range.stop - width
            offset = block_range.offset + (start - block_range.start) // BLOCK * block_bytes
            segments = shorter.setdefault(width, [])
            segments.append(Segment(block_range.index, start, 1, len(segments), offset))
            if len(segments) == limit:
                yield Batch(width, tuple(shorter.pop(width)))
    for width, segments in shorter.items():
        yield Batch(width, tuple(segments))
    segments, row = [], 0
    for block_range in ranges:
        start, blocks = block_range.start, block_range.stop // BLOCK - block_range.start // BLOCK
        while blocks:
            count = min(blocks, limit - row)
            offset = block_range.offset + (start - block_range.start) // BLOCK * block_bytes
            segments.append(Segment(block_range.index, start, count, row, offset))
            start, blocks, row = start + count * BLOCK, blocks - count, row + count
            if row == limit:
                yield Batch(BLOCK, tuple(segments))
                segments, row = [], 0
    if segments:
        yield Batch(BLOCK, tuple(segments))
