"""The `sparse8` codec, of sums of sparse updates: the k largest of each 4096 coordinates, each an int8.

An encoded block is a bfloat16 scale, the positions (see `positions`), then an int8 per value, -127 to 127. Unlike
`sparse` it can encode 0, which means that there is no value: a sum may have fewer coordinates than are kept. And what
is rounded off a sum is in nobody's error feedback, so values are close. Encoding gives the same bytes on every machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.blob_sizes import SCALE, sparse8_block_size
from protocol.codec.int8 import dequantise, quantise, read_codes, sum_squares
from protocol.codec.interface import Codec, Decoded
from protocol.codec.positions import Positions
from protocol.codec.rows import topk
from protocol.codec.scales import encode_scales
from protocol.codec.sparse import positions_of
from protocol.layout import Layout


class Sparse8Codec(Codec):
    """Keeps `k` of each full block, 1 <= k <= 4096, and the same share, rounded up, of a shorter one."""

    identifier = 5
    sends_all = False

    def __init__(self, layout: Layout, k: int):
        self.kept = k
        super().__init__(layout)

    def positions(self, width: int) -> Positions:
        """Return the coding of positions in a block of `width` coordinates."""
        return positions_of(width, self.kept)

    def encoded_size(self, width: int) -> int:
        return sparse8_block_size(width, self.kept)

    def _encode(self, x: Tensor) -> Tensor:
        coding = self.positions(x.shape[1])
        chosen = None if coding.dense else topk(x, coding.k)  # NaN is taken for the largest of all
        values = x if chosen is None else x.gather(1, chosen)
        scale, codes = quantise(values)
        remaining = values - dequantise(scale, codes)
        if chosen is None:
            x.copy_(remaining)
        else:
            x.scatter_(1, chosen, remaining)
        positions = [] if chosen is None else [coding.encode(chosen)]
        return torch.cat([encode_scales(scale), *positions, codes.view(torch.uint8)], 1)

    def _decode(self, encoded: Tensor, width: int) -> Decoded:
        coding = self.positions(width)
        at = SCALE + coding.size
        values = dequantise(*read_codes(encoded[:, :SCALE], encoded[:, at:])).view(-1)
        if coding.dense:
            return Decoded(values, None)
        positions = coding.decode(encoded[:, SCALE:at])
        starts = torch.arange(0, encoded.shape[0] * width, width, device=encoded.device)
        return Decoded(values, positions.add_(starts.unsqueeze(1)).view(-1))

    def _sum_squares(self, encoded: Tensor, width: int) -> Tensor:
        return sum_squares(*read_codes(encoded[:, :SCALE], encoded[:, SCALE + self.positions(width).size :]))
