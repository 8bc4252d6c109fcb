"""The values of an update that the reduced shards of a round leave out: those whose coordinates are 0 in the mean.

The author puts these back into its error feedback, so nothing is lost and no committee holds state. A `ResidualMask`
selects them: a bit for each value that the update lists, in the order of its blocks. It takes a thirtieth of the
model at most, and says later what was put back, should the round be undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from protocol.blob_sizes import packed_size
from protocol.codec import Batch, Codec
from protocol.codec.bits import pack, unpack
from protocol.codec.interface import Blob
from protocol.codec.sparse import SparseCodec
from protocol.errors import CodecError
from protocol.layout import BLOCK
from protocol.reduce import Reduction


class ResidualMask:
    """Some of the values that an update of `codec` lists. Only sparse codecs list some, and drop any."""

    def __init__(self, codec: Codec, device: torch.device | str = "cpu"):
        """Start with a mask that selects no value. Raises CodecError for a codec that is not sparse."""
        if not isinstance(codec, SparseCodec):
            raise CodecError("under this run's codec every update says all: nothing of one is ever dropped")
        self._codec = codec
        self._starts = list(accumulate((self._listed(t.numel) for t in codec.layout.tensors), initial=0))
        self._bits = torch.zeros(self._starts[-1], dtype=torch.uint8, device=device)

    @classmethod
    def from_bytes(cls, codec: Codec, data: bytes, device: torch.device | str = "cpu") -> ResidualMask:
        """Return the mask from which `to_bytes` made these bytes. Raises CodecError when they are of another size."""
        made = cls(codec, device)
        count = len(made._bits)
        if len(data) != packed_size(count, 1):
            raise CodecError(f"a selection of {len(data)} bytes: of an update of this run it has {-(-count // 8)}")
        packed = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        made._bits = unpack(packed.unsqueeze(0), count, 1).view(-1)[:count]
        return made

    def to_bytes(self) -> bytes:
        """Return one bit for each value, least significant first."""
        return pack(self._bits.unsqueeze(0), 1).cpu().numpy().tobytes()

    @property
    def is_empty(self) -> bool:
        return not bool(self._bits.any())

    def _listed(self, numel: int) -> int:
        """Return the number of values that an update lists of a tensor's first `numel` coordinates."""
        whole, remaining = divmod(numel, BLOCK)
        return whole * self._codec.kept + (self._codec.positions(remaining).k if remaining else 0)

    def _places(self, batch: Batch) -> list[tuple[slice, slice]]:
        """Return for each segment of a batch its rows, and the positions of their bits."""
        each = self._codec.positions(batch.width).k
        starts = [self._starts[p.index] + self._listed(p.start) for p in batch.segments]
        return [
            (slice(p.row, p.row + p.count), slice(at, at + p.count * each))
            for p, at in zip(batch.segments, starts, strict=True)
        ]

    def set_batch(self, batch: Batch, chosen: Tensor) -> None:
        """Set the bits of a batch: bool [batch.count, values that a block lists]."""
        for rows, at in self._places(batch):
            self._bits[at] = chosen[rows].reshape(-1).to(torch.uint8)

    def batch_mask(self, batch: Batch) -> Tensor:
        """Return the bits of a batch: uint8 of zeros and ones, [count, values that a block lists]."""
        return torch.cat([self._bits[at].view(rows.stop - rows.start, -1) for rows, at in self._places(batch)])


def untransmitted(
    own: Blob, shards: Sequence[Blob], reduction: Reduction, device: torch.device | str = "cpu"
) -> ResidualMask | None:
    """Return the mask of values of `own` that are missing in `shards`.

    It is None if there are none. `own` was accepted, and its round was reduced to `shards`.

    Raises CodecError for blobs of another run, and for blobs that never passed a check.
    """
    codec = reduction.codec
    if not isinstance(codec, SparseCodec):
        return None
    codec.check_header(own)
    reduction.check_shard_headers(shards)
    device = torch.device(device)
    found = ResidualMask(codec, device)
    for batch, mean in reduction.batches(shards, device):
        decoded = codec.decode_batch(own, batch, device)
        has = (mean if decoded.positions is None else mean[decoded.positions]).ne(0)
        found.set_batch(batch, (decoded.values.ne(0) & ~has).view(batch.count, -1))
    return None if found.is_empty else found
