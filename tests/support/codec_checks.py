"""Shared by several tests: codec checks."""

from __future__ import annotations

from protocol.codec.scales import MAX_VALUE
from protocol.errors import CodecError


def assert_refused_or_sane(codec, blob) -> None:
    """The promise of the strict decoder, whatever the bytes."""
    try:
        codec.check(blob)
    except CodecError:
        return
    for index, tensor in enumerate(codec.layout.tensors):
        decoded = codec.decode_tensor(blob, index)
        assert decoded.values.isfinite().all() and decoded.values.abs().max() <= MAX_VALUE
        if decoded.positions is not None:
            p = decoded.positions
            assert (p[1:] > p[:-1]).all() and 0 <= p[0] and p[-1] < tensor.numel
        assert all(e >= 0 for e in codec.sum_squares(blob))
