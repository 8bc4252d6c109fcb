"""Codecs, layouts and values that the tests of codecs share, and what every decoder must promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from protocol.codec.scales import MAX_VALUE
from protocol.errors import CodecError
from protocol.layout import Layout
from protocol.spec import CodecSpec

SPECS = [
    CodecSpec(kind="sparse", k=64),
    CodecSpec(kind="sparse", k=256),
    CodecSpec(kind="sparse", k=1500),
    CodecSpec(kind="sparse", k=4096),
    CodecSpec(kind="sign"),
    CodecSpec(kind="int8"),
    CodecSpec(kind="none"),
]


LAYOUT = Layout.of({"a": (3, 5000), "b": (77,), "c": ()})


every_codec = pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}-{s.k}")


def noise(layout: Layout, seed: int = 0, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {t.name: torch.randn(t.shape, generator=generator) * scale for t in layout.tensors}


def dense(codec, blob, index: int) -> torch.Tensor:
    decoded = codec.decode_tensor(blob, index)
    if decoded.positions is None:
        return decoded.values
    out = torch.zeros(codec.layout.tensors[index].numel)
    out[decoded.positions] = decoded.values
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.int32), b.reshape(-1).view(torch.int32))


# Awkward numbers of every size: ties, zeros of both signs, subnormals, far apart magnitudes.
awkward = st.one_of(
    st.floats(-(2.0**29), 2.0**29, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**29, -(2.0**29), 1e-45, -1e-40, 2.0**-60, 2.0**-61]),
)


layouts = st.dictionaries(
    st.text("abc./", min_size=1, max_size=4),
    st.one_of(
        st.tuples(st.integers(1, 9000)),
        st.tuples(st.integers(1, 70), st.integers(1, 70)),
        st.sampled_from([(), (4096,), (4097,), (4095,), (2, 4096), (1,), (63,), (64,), (65,)]),
    ),
    min_size=1,
    max_size=3,
).map(Layout.of)


specs = st.one_of(
    st.builds(CodecSpec, kind=st.just("sparse"), k=st.one_of(st.integers(64, 4096), st.sampled_from([64, 256, 4096]))),
    st.sampled_from([CodecSpec(kind="sign"), CodecSpec(kind="int8"), CodecSpec(kind="none")]),
)


def assert_refused_or_sane(codec, blob) -> None:
    """Assert the promise of the strict decoder, whatever the bytes."""
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
