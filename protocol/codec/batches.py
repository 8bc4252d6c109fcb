"""How work on a blob is cut: in batches of chunks of one width, gathered from as many tensors as it takes.

A model has many small tensors, and one call of torch costs as much as the arithmetic on thousands of coordinates.
Tensor by tensor, a small model's round would consist of calls. Batches also bound the memory. Neither their length nor
their contents change a bit: no operation of a codec or of the outer step looks from one chunk to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protocol.layout import CODEC_CHUNK

BATCH_CHUNKS = 288
"""Chunks in a batch on a CPU: 4.5 MiB of fp32 stay near the caches; a model of a million parameters is one batch."""
BATCH_CHUNKS_DEVICE = 8192
"""Chunks in a batch on an accelerator: 2**25 coordinates, so that the launches do not show."""


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Coordinates `start` (a chunk's first) to `stop` (a chunk's end, or the tensor's) of tensor `index`.

    `offset` is where the record of its first chunk lies.
    """

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` consecutive chunks of tensor `index`, from its coordinate `start` on.

    `row` is the first one's place in the batch, `offset` where the first of their records lies in the blob.
    """

    index: int
    start: int
    count: int
    row: int
    offset: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks of `width` coordinates: those of its segments, one after the other."""

    width: int
    segments: tuple[Segment, ...]

    @property
    def count(self) -> int:
        """How many chunks."""
        last = self.segments[-1]
        return last.row + last.count

    @property
    def numel(self) -> int:
        return self.count * self.width

    def source_slice(self, segment: Segment, origin: int = 0) -> slice:
        """Return the slice's range in its flattened tensor. The tensor may be a local slice that begins at `origin`."""
        start = segment.start - origin
        return slice(start, start + segment.count * self.width)

    def batch_slice(self, segment: Segment) -> slice:
        """Return the range of the slice's coordinates in the batch."""
        return slice(segment.row * self.width, (segment.row + segment.count) * self.width)

    def segment_at(self, row: int) -> Segment:
        """Return the segment that has the batch's chunk `row`."""
        return next(p for p in self.segments if row < p.row + p.count)


def split_into_batches(ranges: Iterable[ChunkRange], limit: int, record: int) -> Iterator[Batch]:
    """Yield the batches, of at most `limit` chunks, that cover the ranges. `record`: bytes of a full chunk's record.

    First all shorter last chunks, by width; then the full ones, in the order of the ranges.
    """
    ranges = list(ranges)
    shorter: dict[int, list[Segment]] = {}
    for chunk_range in ranges:
        if width := chunk_range.stop % CODEC_CHUNK:
            start = chunk_range.stop - width
            offset = chunk_range.offset + (start - chunk_range.start) // CODEC_CHUNK * record
            segments = shorter.setdefault(width, [])
            segments.append(Segment(chunk_range.index, start, 1, len(segments), offset))
            if len(segments) == limit:
                yield Batch(width, tuple(shorter.pop(width)))
    for width, segments in shorter.items():
        yield Batch(width, tuple(segments))
    segments, row = [], 0
    for chunk_range in ranges:
        start, chunks = chunk_range.start, chunk_range.stop // CODEC_CHUNK - chunk_range.start // CODEC_CHUNK
        while chunks:
            count = min(chunks, limit - row)
            offset = chunk_range.offset + (start - chunk_range.start) // CODEC_CHUNK * record
            segments.append(Segment(chunk_range.index, start, count, row, offset))
            start, chunks, row = start + count * CODEC_CHUNK, chunks - count, row + count
            if row == limit:
                yield Batch(CODEC_CHUNK, tuple(segments))
                segments, row = [], 0
    if segments:
        yield Batch(CODEC_CHUNK, tuple(segments))
