"""The `none` codec: fp32 as it is, for tests and references. 32 bits per parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.blob_sizes import raw_block_size
from protocol.codec.interface import Codec, Decoded, reject_rows
from protocol.codec.scales import MAX_INPUT, MAX_VALUE
from protocol.layout import BLOCK


class RawCodec(Codec):
    """An encoded block is its fp32 values, little endian."""

    identifier = 3
    kept = 0
    sends_all = True

    def encoded_size(self, width: int) -> int:
        return raw_block_size(width)

    def _encode(self, x: Tensor) -> Tensor:
        reject_rows(~(x.abs().amax(1) <= MAX_INPUT), f"a value is not finite, or larger than {MAX_INPUT:g}")
        encoded = x.clone().view(torch.uint8)
        x.zero_()
        return encoded

    def _decode(self, encoded: Tensor, width: int) -> Decoded:
        return Decoded(_values(encoded).view(-1), None)

    def _sum_squares(self, encoded: Tensor, width: int) -> Tensor:
        values = _values(encoded)
        square = torch.zeros((encoded.shape[0], BLOCK), dtype=torch.float64, device=encoded.device)
        square[:, :width] = values.to(torch.float64)
        square = square * square  # exact
        # A fixed tree of additions, each correctly rounded: sum() adds in an order of the device's own.
        while square.shape[1] > 1:
            half = square.shape[1] // 2
            square = square[:, :half] + square[:, half:]
        return square.view(-1)


def _values(encoded: Tensor) -> Tensor:
    values = encoded.contiguous().view(torch.float32)
    reject_rows(~(values.abs().amax(1) <= MAX_VALUE), f"a value is not finite, or larger than {MAX_VALUE:g}")
    return values
