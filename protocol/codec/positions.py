"""The positions of the k sent coordinates of a block's m, as bytes: nothing if all are sent, a bitmap, or Elias-Fano.

Elias-Fano (P. Elias, J. ACM 21(2), 1974; R. Fano, 1971): the low bits of each position as they are, the high bits in
unary. At k = 64 of 4096 a position costs 8 bits, within 0.7 of the information bound. All encodings of
one (m, k) have one size, so a block's place in a blob is arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.blob_sizes import PositionSizes, packed_size
from protocol.codec.bits import has_padding_bits, pack, unpack
from protocol.codec.interface import BlockError, reject_rows
from protocol.codec.rows import nonzero


class Positions(PositionSizes):
    """The coding of k distinct positions below m, 1 <= k <= m."""

    def encode(self, positions: Tensor) -> Tensor:
        """int64 [n, k], each row strictly increasing and below m, to uint8 [n, size]. Not for dense blocks."""
        n, device = positions.shape[0], positions.device
        if self.bitmap:
            bits = torch.zeros((n, self.m), dtype=torch.uint8, device=device)
            return pack(bits.scatter_(1, positions, 1), 1)
        bits = torch.zeros((n, self.high), dtype=torch.uint8, device=device)
        bits.scatter_(1, (positions >> self.low) + torch.arange(self.k, device=device), 1)
        high = pack(bits, 1)
        if not self.low:
            return high
        return torch.cat([pack((positions & ((1 << self.low) - 1)).to(torch.uint8), self.low), high], 1)

    def decode(self, packed: Tensor) -> Tensor:
        """uint8 [n, size] from untrusted bytes to int64 [n, k], each row strictly increasing and below m.

        Raises BlockError for anything else. Not for dense blocks.
        """
        if self.bitmap:
            return self._ones(packed, self.m)
        lows = packed_size(self.k, self.low)
        positions = self._ones(packed[:, lows:], self.high).sub_(torch.arange(self.k, device=packed.device))
        if self.low:
            reject_rows(
                has_padding_bits(packed[:, :lows], self.k, self.low),
                "padding bits of the low parts of positions are set",
            )
            low = unpack(packed[:, :lows], self.k, self.low)
            positions.bitwise_left_shift_(self.low).bitwise_or_(low[:, : self.k])
            reject_rows(positions[:, 1:] <= positions[:, :-1], "positions do not increase")
            reject_rows(positions[:, -1] >= self.m, "a position lies beyond the block's end")
        return positions

    def _ones(self, packed: Tensor, length: int) -> Tensor:
        """Return the positions of the k ones in each row of `length` bits: int64 [n, k].

        Raises BlockError unless there are k.
        """
        reject_rows(has_padding_bits(packed, length, 1), "padding bits of the positions are set")
        bits = unpack(packed, length, 1)
        n, stride = bits.shape
        found = nonzero(bits.view(-1))
        if len(found) == n * self.k:
            found = found.view(n, self.k)
            found.sub_(torch.arange(0, n * stride, stride, device=bits.device).unsqueeze(1))
            # The total is right. If each group of k lies within its own row, each row has exactly k.
            if not ((found[:, 0] < 0) | (found[:, -1] >= stride)).any():
                return found
        wrong = bits.sum(1, dtype=torch.int64) != self.k
        raise BlockError(int(wrong.nonzero()[0, 0]), f"not exactly {self.k} positions")
