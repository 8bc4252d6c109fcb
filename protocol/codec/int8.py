"""The `int8` codec: a bfloat16 scale per block and an int8 per coordinate, -127 to 127. 8.004 bits per parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.blob_sizes import SCALE, int8_block_size
from protocol.codec.interface import Codec, Decoded, reject_rows
from protocol.codec.scales import MAX_INPUT, decode_scales, encode_scales, round_up_to_scale

LEVELS = 127
MAX_SCALE = 2.0**23
"""127 times it is below MAX_VALUE, and MAX_INPUT / 127, rounded up, is below it."""


class Int8Codec(Codec):
    """Value = int8 * scale, exact in fp32: 7 bits times 8. The scale is the smallest that covers the block."""

    identifier = 2
    kept = 0
    sends_all = True

    def encoded_size(self, width: int) -> int:
        return int8_block_size(width)

    def _encode(self, x: Tensor) -> Tensor:
        scale, codes = quantise(x)
        x.sub_(dequantise(scale, codes))
        return torch.cat([encode_scales(scale), codes.view(torch.uint8)], 1)

    def _decode(self, encoded: Tensor, width: int) -> Decoded:
        return Decoded(dequantise(*read_codes(encoded[:, :SCALE], encoded[:, SCALE:])).view(-1), None)

    def _check(self, encoded: Tensor, width: int) -> None:
        read_codes(encoded[:, :SCALE], encoded[:, SCALE:])

    def _sum_squares(self, encoded: Tensor, width: int) -> Tensor:
        return sum_squares(*read_codes(encoded[:, :SCALE], encoded[:, SCALE:]))


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest scales that cover the rows of fp32 [n, c], fp32 [n, 1], and codes, int8 [n, c], -127 to 127.

    Every operation is exact or correctly rounded: the same bits on every device. Raises BlockError for values that are
    not finite or above MAX_INPUT.
    """
    largest = x.abs().amax(1, keepdim=True)
    reject_rows(~(largest.view(-1) <= MAX_INPUT), f"a value is not finite, or larger than {MAX_INPUT:g}")
    scale = round_up_to_scale(largest / torch.full_like(largest, LEVELS))
    # Rows with a scale of 0 hold nothing near 1: divided by that, everything rounds to 0. No ratio reaches 127.5.
    return scale, (x / torch.where(scale > 0, scale, 1)).round_().to(torch.int8)


def dequantise(scale: Tensor, codes: Tensor) -> Tensor:
    """Return the values of the codes, fp32 [n, c]; -0 for a code below 0 with a scale of 0, which no encoder writes."""
    return codes.to(torch.float32) * scale


def read_codes(scales: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales, fp32 [n, 1], and codes, int8 [n, c], of uint8 from untrusted bytes. Raises BlockError."""
    scale = decode_scales(scales, MAX_SCALE)
    wanted = codes.view(torch.int8)
    reject_rows(wanted.amin(1) < -LEVELS, "a value is -128")
    return scale, wanted


def sum_squares(scale: Tensor, codes: Tensor) -> Tensor:
    """Return the sum of squares of each row's values: fp64 [n], exact."""
    wide = codes.to(torch.int32)
    total = (wide * wide).sum(1, dtype=torch.int64)
    scale = scale.view(-1).to(torch.float64)
    return torch.mul(scale * scale, total)  # 16 bits times 27
