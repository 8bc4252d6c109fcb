"""The `int8` codec: a bfloat16 scale a chunk and an int8 a coordinate, -127 to 127. 8.004 bits a parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.codec.interface import Codec, Decoded, refuse
from protocol.codec.scales import MAX_INPUT, from_wire, not_below, to_wire

SCALE = 2
LEVELS = 127
MAX_SCALE = 2.0**23
"""127 times it is below MAX_VALUE, and MAX_INPUT / 127, rounded up, is below it."""


class Int8Codec(Codec):
    """Value = int8 * scale, exact in fp32: 7 bits times 8. The scale is the smallest that covers the chunk."""

    identifier = 2
    kept = 0
    everyone_sends = True

    def record_size(self, width: int) -> int:
        return SCALE + width

    def _encode(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(1, keepdim=True)
        refuse(~(largest.view(-1) <= MAX_INPUT), f"a value is not finite, or larger than {MAX_INPUT:g}")
        scale = not_below(largest / torch.full_like(largest, LEVELS))
        # Chunks with a scale of 0 hold nothing near 1: divided by that, everything rounds to 0. No ratio reaches 127.5.
        codes = (x / torch.where(scale > 0, scale, 1)).round_().to(torch.int8)
        # From the int8, as the decoder: it knows no -0.
        x.sub_(codes.to(torch.float32) * scale)
        return torch.cat([to_wire(scale), codes.view(torch.uint8)], 1)

    def _decode(self, records: Tensor, width: int) -> Decoded:
        scale, codes = _parts(records)
        return Decoded((codes.to(torch.float32) * scale).view(-1), None)

    def _energies(self, records: Tensor, width: int) -> Tensor:
        scale, codes = _parts(records)
        wide = codes.to(torch.int32)
        squares = (wide * wide).sum(1, dtype=torch.int64)
        scale = scale.view(-1).to(torch.float64)
        return torch.mul(scale * scale, squares)  # 16 bits times 27: exact


def _parts(records: Tensor) -> tuple[Tensor, Tensor]:
    """The scales, fp32 [n, 1], and codes, int8 [n, width]. Raises RecordError."""
    scale = from_wire(records[:, :SCALE], MAX_SCALE)
    codes = records[:, SCALE:].view(torch.int8)
    refuse(codes.amin(1) < -LEVELS, "a value is -128")
    return scale, codes
