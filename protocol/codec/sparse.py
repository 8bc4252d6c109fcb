"""The `sparse` codec: the k largest of each 4096 coordinates, 2 bits each, their positions by Elias-Fano.

Chunked top-k with error feedback and 2-bit values is SparseLoCo (arXiv 2508.15706). An encoded block is two bfloat16
scales lo <= hi, the positions (see `positions`), then 2 bits per value: bit 0 picks hi, bit 1 the sign. At k = 64 that
is 84 bytes per block: 0.164 bits per parameter.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from protocol.blob_sizes import SCALE, kept_of, sparse_block_size
from protocol.codec.bits import has_padding_bits, pack, unpack
from protocol.codec.interface import Codec, Decoded, reject_rows
from protocol.codec.positions import Positions
from protocol.codec.rows import sort_descending, topk
from protocol.codec.scales import MAX_INPUT, decode_scales, encode_scales, round_to_scale
from protocol.layout import Layout

SCALES = 2 * SCALE
SAMPLE = 512
"""Magnitudes that are sorted to place the levels; all of them up to k = 512."""


@lru_cache(maxsize=8192)
def positions_of(width: int, kept: int) -> Positions:
    """Return the coding of positions in a block of `width` coordinates, when `kept` of a full one are kept."""
    return Positions(width, kept_of(width, kept))


class SparseCodec(Codec):
    """Keeps `k` of each full block, 1 <= k <= 4096, and the same share, rounded up, of a shorter one."""

    identifier = 1
    sends_all = False

    def __init__(self, layout: Layout, k: int):
        self.kept = k
        super().__init__(layout)

    def positions(self, width: int) -> Positions:
        """Return the coding of positions in a block of `width` coordinates."""
        return positions_of(width, self.kept)

    def encoded_size(self, width: int) -> int:
        return sparse_block_size(width, self.kept)

    def _encode(self, x: Tensor) -> Tensor:
        coding = self.positions(x.shape[1])
        if coding.dense:
            chosen, values = None, x
        else:
            # NaN is taken for the largest of all, so none is missed below.
            chosen = topk(x, coding.k)
            values = x.gather(1, chosen)
        magnitudes = values.abs()
        reject_rows(~(magnitudes.amax(1) <= MAX_INPUT), f"a value is not finite, or larger than {MAX_INPUT:g}")
        lo, hi = two_levels(magnitudes)
        high = (magnitudes - lo) > (hi - magnitudes)
        codes = high.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 1)
        remaining = values - _values(lo, hi, codes)
        parts = [encode_scales(torch.cat([lo, hi], 1)), pack(codes, 2)]
        if chosen is None:
            x.copy_(remaining)
        else:
            x.scatter_(1, chosen, remaining)
            parts.insert(1, coding.encode(chosen))
        return torch.cat(parts, 1)

    def _decode(self, encoded: Tensor, width: int) -> Decoded:
        coding = self.positions(width)
        lo, hi, packed = _parts(encoded, coding)
        values = _values(lo, hi, unpack(packed, coding.k, 2)[:, : coding.k]).view(-1)
        if coding.dense:
            return Decoded(values, None)
        positions = coding.decode(encoded[:, SCALES : SCALES + coding.size])
        starts = torch.arange(0, encoded.shape[0] * width, width, device=encoded.device)
        return Decoded(values, positions.add_(starts.unsqueeze(1)).view(-1))

    def _check(self, encoded: Tensor, width: int) -> None:
        coding = self.positions(width)
        _parts(encoded, coding)
        if not coding.dense:
            coding.decode(encoded[:, SCALES : SCALES + coding.size])

    def _sum_squares(self, encoded: Tensor, width: int) -> Tensor:
        coding = self.positions(width)
        lo, hi = (s.view(-1).to(torch.float64) for s in _scales(encoded))
        packed = encoded[:, SCALES + coding.size :]
        levels = packed & 0x55
        pairs = (levels & 0x11) + ((levels >> 2) & 0x11)
        highs = ((pairs & 0xF) + (pairs >> 4)).sum(1, dtype=torch.int64)
        # Squares of bfloat16 have 16 bits, counts 13: both products are exact, and the sum is one rounding.
        return torch.mul(hi * hi, highs) + torch.mul(lo * lo, coding.k - highs)


def _scales(encoded: Tensor) -> tuple[Tensor, Tensor]:
    """lo and hi, fp32 [n, 1] each. Raises BlockError."""
    scales = decode_scales(encoded[:, :SCALES])
    lo, hi = scales[:, :1], scales[:, 1:]
    reject_rows(lo > hi, "the low scale is above the high one")
    return lo, hi


def _parts(encoded: Tensor, coding: Positions) -> tuple[Tensor, Tensor, Tensor]:
    """lo and hi, fp32 [n, 1] each, and the values, packed: uint8. Raises BlockError."""
    packed = encoded[:, SCALES + coding.size :]
    reject_rows(has_padding_bits(packed, coding.k, 2), "padding bits of the values are set")
    return *_scales(encoded), packed


def _values(lo: Tensor, hi: Tensor, codes: Tensor) -> Tensor:
    """Return the values of the codes, uint8 [n, k]: fp32 [n, k]."""
    # A look-up: several times as fast on a CPU as torch.where, whose branches nothing can predict.
    return torch.cat([lo, hi, -lo, -hi], 1).gather(1, codes.to(torch.int64))


def two_levels(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Two scales lo <= hi, fp32 [n, 1], for fp32 [n, k] >= 0, that make the squared error of rounding to them small.

    The best split of up to SAMPLE magnitudes, found by trying all; then a step of Lloyd's iteration over all of them
    (IEEE Trans. Inf. Theory 28(2), 1982). Lloyd's alone, from the mean, stays far from the best on heavy tails.
    """
    k = magnitudes.shape[1]
    split = _best_split(magnitudes[:, :: -(-k // SAMPLE)])
    above = magnitudes > split
    count = above.sum(1, keepdim=True, dtype=torch.int32)
    hi = (magnitudes * above).sum(1, keepdim=True) / count.clamp(min=1)
    lo = (magnitudes * ~above).sum(1, keepdim=True) / (k - count).clamp(min=1)
    hi = torch.where(count > 0, hi, lo)  # all are equal
    # The mean of equal numbers can miss them by a rounding.
    return round_to_scale(torch.minimum(lo, hi)), round_to_scale(torch.maximum(lo, hi))


def _best_split(magnitudes: Tensor) -> Tensor:
    """Between the two groups of fp32 [n, k] whose means leave the least squared error: fp32 [n, 1]."""
    k = magnitudes.shape[1]
    ordered = sort_descending(magnitudes)
    if k == 1:
        return ordered
    upper = ordered.cumsum(1)
    total = upper[:, -1:]
    count = torch.arange(1, k, device=magnitudes.device, dtype=torch.float32)
    upper, lower = upper[:, :-1], total - upper[:, :-1]
    # The squared error is the sum of squares less this; the sums are scaled so that their squares stay finite.
    size = total.clamp(min=torch.finfo(torch.float32).tiny)
    explained = (upper / size) ** 2 / count + (lower / size) ** 2 / (k - count)
    at = explained.argmax(1, keepdim=True)
    return (ordered.gather(1, at) + ordered.gather(1, at + 1)) / 2
