"""Sizes in bytes of a codec's blobs: the one place that computes them (docs/codec.md has the formats).

Pure, and without torch: the codecs and the round machine both use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from protocol.layout import BLOCK, Layout
from protocol.spec import MEAN_KEEP_FACTOR, CodecSpec

FORMAT_HEADER = 40
"""Bytes of a blob's header that tell the codec, the format and the model."""

HEADER = FORMAT_HEADER + 32
"""Bytes before the encoded blocks of every blob: then comes its author's key."""

SCALE = 2
"""Bytes of one scale of an encoded block."""


def packed_size(count: int, width: int) -> int:
    """Return the bytes of `count` fields of `width` bits; the last byte is padded with zero bits."""
    return -(-count * width // 8)


def kept_of(width: int, k: int) -> int:
    """Return the number of coordinates that are kept of a block of `width`, when k of a full block are kept."""
    return -(-width * k // BLOCK)


@dataclass(frozen=True)
class PositionSizes:
    """The sizes of the coding of k distinct positions below m, 1 <= k <= m."""

    m: int
    k: int

    @property
    def dense(self) -> bool:
        """Every coordinate is sent: positions cost nothing."""
        return self.k == self.m

    @cached_property
    def low(self) -> int:
        """Low bits that Elias-Fano writes as they are: floor(log2(m / k))."""
        return (self.m // self.k).bit_length() - 1

    @cached_property
    def high(self) -> int:
        """Bits of the unary part: a one for each position, a zero for each step of the high bits."""
        return self.k + ((self.m - 1) >> self.low)

    @cached_property
    def bitmap(self) -> bool:
        """A bit for each coordinate is no longer than Elias-Fano: about from k = m / 4 on."""
        return not self.dense and packed_size(self.m, 1) <= self._elias_fano_size

    @cached_property
    def _elias_fano_size(self) -> int:
        return packed_size(self.k, self.low) + packed_size(self.high, 1)

    @cached_property
    def size(self) -> int:
        """Bytes of the positions of one block."""
        if self.dense:
            return 0
        return packed_size(self.m, 1) if self.bitmap else self._elias_fano_size


def raw_block_size(width: int) -> int:
    """Return the bytes of a block of `width` coordinates that the codec `none` encoded."""
    return 4 * width


def int8_block_size(width: int) -> int:
    """Return the bytes of a block that the codec `int8` encoded."""
    return SCALE + width


def sign_block_size(width: int) -> int:
    """Return the bytes of a block that the codec `sign` encoded."""
    return SCALE + packed_size(width, 1)


def sparse_block_size(width: int, k: int) -> int:
    """Return the bytes of a block that the codec `sparse` encoded: two scales, positions, two bits for each value."""
    positions = PositionSizes(width, kept_of(width, k))
    return 2 * SCALE + positions.size + packed_size(positions.k, 2)


def sparse8_block_size(width: int, k: int) -> int:
    """Return the bytes of a block that the codec `sparse8` encoded: a scale, positions, a byte for each value."""
    positions = PositionSizes(width, kept_of(width, k))
    return SCALE + positions.size + positions.k


def blob_size(codec: CodecSpec, layout: Layout) -> int:
    """Return the bytes of every update under a codec."""
    match codec.kind:
        case "none":
            return _size(layout, raw_block_size)
        case "int8":
            return _size(layout, int8_block_size)
        case "sign":
            return _size(layout, sign_block_size)
        case _:
            return _size(layout, lambda width: sparse_block_size(width, codec.k))


def mean_size(codec: CodecSpec, layout: Layout) -> int:
    """Return the bytes of all shards of the mean, but for their headers: as `Reduction.size(1, 0)`."""
    match codec.kind:
        case "sparse":
            k = min(BLOCK, MEAN_KEEP_FACTOR * codec.k)
            return _size(layout, lambda width: sparse8_block_size(width, k))
        case "none":
            return _size(layout, raw_block_size)
        case _:
            return _size(layout, int8_block_size)


def _size(layout: Layout, encoded_size: Callable[[int], int]) -> int:
    size = HEADER
    for tensor in layout.tensors:
        whole, remaining = divmod(tensor.numel, BLOCK)
        size += whole * encoded_size(BLOCK) + (encoded_size(remaining) if remaining else 0)
    return size
