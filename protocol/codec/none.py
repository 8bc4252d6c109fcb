"""The `none` codec: fp32 as it is, for tests and references. 32 bits a parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.blob_sizes import raw_record
from protocol.codec.interface import Codec, Decoded, reject_rows
from protocol.codec.scales import MAX_INPUT, MAX_VALUE
from protocol.layout import CODEC_CHUNK


class RawCodec(Codec):
    """A record is the chunk's fp32 values, little endian."""

    identifier = 3
    kept = 0
    sends_all = True

    def record_size(self, width: int) -> int:
        return raw_record(width)

    def _encode(self, x: Tensor) -> Tensor:
        reject_rows(~(x.abs().amax(1) <= MAX_INPUT), f"a value is not finite, or larger than {MAX_INPUT:g}")
        records = x.clone().view(torch.uint8)
        x.zero_()
        return records

    def _decode(self, records: Tensor, width: int) -> Decoded:
        return Decoded(_values(records).view(-1), None)

    def _sum_squares(self, records: Tensor, width: int) -> Tensor:
        values = _values(records)
        square = torch.zeros((records.shape[0], CODEC_CHUNK), dtype=torch.float64, device=records.device)
        square[:, :width] = values.to(torch.float64)
        square = square * square  # exact
        # A fixed tree of additions, each correctly rounded: sum() adds in an order of the device's own.
        while square.shape[1] > 1:
            half = square.shape[1] // 2
            square = square[:, :half] + square[:, half:]
        return square.view(-1)


def _values(records: Tensor) -> Tensor:
    values = records.contiguous().view(torch.float32)
    reject_rows(~(values.abs().amax(1) <= MAX_VALUE), f"a value is not finite, or larger than {MAX_VALUE:g}")
    return values
