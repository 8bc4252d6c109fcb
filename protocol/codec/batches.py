"""How work on a blob is cut: in runs of chunks of one width, gathered from as many tensors as it takes.

A model has many small tensors, and one call of torch costs as much as the arithmetic on thousands of coordinates.
Tensor by tensor, a small model's round would consist of calls. Runs also bound the memory. Neither their length nor
what
lies in one together changes a bit: no operation of a codec or of the outer step looks from one chunk to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protocol.layout import CODEC_CHUNK

BATCH_CHUNKS = 288
"""Chunks in a run on a CPU: 4.5 MiB of fp32 stay near the caches, and a model of a million parameters is one run."""
BATCH_CHUNKS_DEVICE = 8192
"""Chunks in a run on an accelerator: 2**25 coordinates, so that the launches do not show."""


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

    `row` is the first one's place in the run, `offset` where the first of their records lies in the blob.
    """

    index: int
    start: int
    count: int
    row: int
    offset: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks of `width` coordinates: those of its pieces, one after the other."""

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
        """Return the slice that has the batch's chunk `row`."""
        return next(p for p in self.segments if row < p.row + p.count)


def split_into_batches(ranges: Iterable[ChunkRange], limit: int, record: int) -> Iterator[Batch]:
    """Yield the batches, of at most `limit` chunks, that cover the ranges. `record`: bytes of a full chunk's record.

    First all shorter last chunks, by width; then the full ones, in the order of the spans.
    """
    ranges = list(ranges)
    shorter: dict[int, list[Segment]] = {}
    for span in ranges:
        if width := span.stop % CODEC_CHUNK:
            start = span.stop - width
            offset = span.offset + (start - span.start) // CODEC_CHUNK * record
            pieces = shorter.setdefault(width, [])
            pieces.append(Segment(span.index, start, 1, len(pieces), offset))
            if len(pieces) == limit:
                yield Batch(width, tuple(shorter.pop(width)))
    for width, pieces in shorter.items():
        yield Batch(width, tuple(pieces))
    pieces, row = [], 0
    for span in ranges:
        start, chunks = span.start, span.stop // CODEC_CHUNK - span.start // CODEC_CHUNK
        while chunks:
            count = min(chunks, limit - row)
            offset = span.offset + (start - span.start) // CODEC_CHUNK * record
            pieces.append(Segment(span.index, start, count, row, offset))
            start, chunks, row = start + count * CODEC_CHUNK, chunks - count, row + count
            if row == limit:
                yield Batch(CODEC_CHUNK, tuple(pieces))
                pieces, row = [], 0
    if pieces:
        yield Batch(CODEC_CHUNK, tuple(pieces))
