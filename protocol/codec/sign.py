"""The `sign` codec: a bfloat16 scale per block and a bit per coordinate. 1.004 bits per parameter.

Signs with error feedback are 1-bit SGD (Seide et al., Interspeech 2014; Karimireddy et al. 2019, arXiv 1901.09847).
The scale is the mean magnitude, which leaves the least squared error. Every coordinate is sent each round, but roughly,
while `sparse` sends the largest alone, but well. So this codec suits dense pseudo-gradients, such as Muon's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.blob_sizes import SCALE, sign_block_size
from protocol.codec.bits import has_padding_bits, pack, unpack
from protocol.codec.interface import Codec, Decoded, reject_rows
from protocol.codec.scales import MAX_INPUT, decode_scales, encode_scales, round_to_scale


class SignCodec(Codec):
    """Value = scale, or -scale where the coordinate's bit is set."""

    identifier = 4
    kept = 0
    sends_all = True

    def encoded_size(self, width: int) -> int:
        return sign_block_size(width)

    def _encode(self, x: Tensor) -> Tensor:
        magnitudes = x.abs()
        reject_rows(~(magnitudes.amax(1) <= MAX_INPUT), f"a value is not finite, or larger than {MAX_INPUT:g}")
        scale = round_to_scale(magnitudes.mean(1, keepdim=True))
        minus = torch.signbit(x).to(torch.uint8)
        x.sub_(_values(scale, minus))
        return torch.cat([encode_scales(scale), pack(minus, 1)], 1)

    def _decode(self, encoded: Tensor, width: int) -> Decoded:
        scale, packed = _parts(encoded, width)
        return Decoded(_values(scale, unpack(packed, width, 1)[:, :width]).view(-1), None)

    def _check(self, encoded: Tensor, width: int) -> None:
        _parts(encoded, width)

    def _sum_squares(self, encoded: Tensor, width: int) -> Tensor:
        scale = decode_scales(encoded[:, :SCALE]).view(-1).to(torch.float64)
        return torch.mul(scale * scale, torch.full_like(scale, width))  # 16 bits times 13: exact


def _parts(encoded: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the scales, fp32 [n, 1], and the signs, packed: uint8. Raises BlockError."""
    packed = encoded[:, SCALE:]
    reject_rows(has_padding_bits(packed, width, 1), "padding bits of the signs are set")
    return decode_scales(encoded[:, :SCALE]), packed


def _values(scale: Tensor, minus: Tensor) -> Tensor:
    """fp32 [n, width] of fp32 [n, 1] and uint8 [n, width] of zeros and ones. Exact: a product with 1 or -1."""
    return minus.to(torch.float32).mul_(-2).add_(1).mul_(scale)
