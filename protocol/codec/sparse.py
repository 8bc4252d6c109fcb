"""The `sparse` codec: the k largest of each 4096 coordinates, 2 bits each, their positions by Elias-Fano.

Chunked top-k with error feedback and 2-bit values is SparseLoCo (arXiv 2508.15706). A record is two bfloat16 scales
lo <= hi, the positions (see `positions`), then 2 bits a value: bit 0 picks hi, bit 1 the sign. At k = 64 that is 84
bytes a chunk: 0.164 bits a parameter.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from protocol.codec.bits import pack, packed_size, unpack
from protocol.codec.interface import Codec, Decoded, refuse
from protocol.codec.positions import Positions
from protocol.codec.scales import MAX_INPUT, from_wire, nearest, to_wire
from protocol.layout import CODEC_CHUNK, Layout

SCALES = 4
LLOYD_STEPS = 3


@lru_cache(maxsize=8192)
def _positions(m: int, k: int) -> Positions:
    return Positions(m, k)


class SparseCodec(Codec):
    """Keeps `k` of each full chunk, 1 <= k <= 4096, and the same share, rounded up, of a shorter one."""

    identifier = 1
    everyone_sends = False

    def __init__(self, layout: Layout, k: int):
        self.kept = k
        super().__init__(layout)

    def positions(self, width: int) -> Positions:
        """The coding of positions in a chunk of `width` coordinates."""
        return _positions(width, -(-width * self.kept // CODEC_CHUNK))

    def record_size(self, width: int) -> int:
        coding = self.positions(width)
        return SCALES + coding.size + packed_size(coding.k, 2)

    def _encode(self, x: Tensor) -> Tensor:
        coding = self.positions(x.shape[1])
        if coding.dense:
            chosen, values = None, x
        else:
            # topk takes NaN for the largest number of all, so none is missed below.
            _, chosen = torch.topk(x.abs(), coding.k, dim=1, sorted=False)
            chosen, _ = torch.sort(chosen, dim=1)
            values = x.gather(1, chosen)
        magnitudes = values.abs()
        refuse(~(magnitudes.amax(1) <= MAX_INPUT), f"a value is not finite, or larger than {MAX_INPUT:g}")
        lo, hi = two_levels(magnitudes)
        high = (magnitudes - lo) > (hi - magnitudes)
        codes = high.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 1)
        rest = values - torch.copysign(torch.where(high, hi, lo), values)
        parts = [to_wire(torch.cat([lo, hi], 1)), pack(codes, 2)]
        if chosen is None:
            x.copy_(rest)
        else:
            x.scatter_(1, chosen, rest)
            parts.insert(1, coding.encode(chosen))
        return torch.cat(parts, 1)

    def _decode(self, records: Tensor, width: int) -> Decoded:
        coding = self.positions(width)
        lo, hi = _scales(records)
        codes = unpack(records[:, SCALES + coding.size :], coding.k, 2)
        refuse(codes[:, coding.k :].any(1), "filling bits of the values are set")
        codes = codes[:, : coding.k]
        values = torch.where((codes & 1).bool(), hi, lo)
        values = torch.where((codes & 2).bool(), -values, values).view(-1)
        if coding.dense:
            return Decoded(values, None)
        positions = coding.decode(records[:, SCALES : SCALES + coding.size])
        starts = torch.arange(0, records.shape[0] * width, width, device=records.device)
        return Decoded(values, (positions + starts.unsqueeze(1)).view(-1))

    def _energies(self, records: Tensor, width: int) -> Tensor:
        coding = self.positions(width)
        lo, hi = (s.view(-1).to(torch.float64) for s in _scales(records))
        packed = records[:, SCALES + coding.size :]
        levels = packed & 0x55
        pairs = (levels & 0x11) + ((levels >> 2) & 0x11)
        highs = ((pairs & 0xF) + (pairs >> 4)).sum(1, dtype=torch.int64)
        # Squares of bfloat16 have 16 bits, counts 13: both products are exact, and the sum is one rounding.
        return torch.mul(hi * hi, highs) + torch.mul(lo * lo, coding.k - highs)


def _scales(records: Tensor) -> tuple[Tensor, Tensor]:
    """lo and hi, fp32 [n, 1] each. Raises RecordError."""
    scales = from_wire(records[:, :SCALES])
    lo, hi = scales[:, :1], scales[:, 1:]
    refuse((lo > hi).view(-1), "the low scale is above the high one")
    return lo, hi


def two_levels(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Two scales lo <= hi, fp32 [n, 1], for fp32 [n, k] >= 0, that make the squared error of rounding to them small.

    Lloyd's iteration (IEEE Trans. Inf. Theory 28(2), 1982), from the split at the mean.
    """
    k = magnitudes.shape[1]
    total = magnitudes.sum(1, keepdim=True)
    split = total / k
    lo = hi = split
    for _ in range(LLOYD_STEPS):
        above = magnitudes > split
        count = above.sum(1, keepdim=True, dtype=torch.int32)
        upper = torch.where(above, magnitudes, 0).sum(1, keepdim=True)
        hi = torch.where(count > 0, upper / count.clamp(min=1), split)
        lo = torch.where(count < k, (total - upper).clamp(min=0) / (k - count).clamp(min=1), split)
        split = (lo + hi) / 2
    # All equal, the mean can miss them by a rounding, and cancellation in total - upper can lift lo above hi.
    return nearest(torch.minimum(lo, hi)), nearest(torch.maximum(lo, hi))
