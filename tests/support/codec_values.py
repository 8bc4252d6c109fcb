"""Shared by several tests: codec values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

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
