"""Shared by several tests: codec layouts."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

from protocol.layout import Layout
from protocol.spec import CodecSpec


def read_bits(data: bytes, width: int, count: int) -> list[int]:
    number = int.from_bytes(data, "little")
    assert number >> (width * count) == 0, "filling bits"
    return [(number >> (width * i)) & ((1 << width) - 1) for i in range(count)]


def read_bf16(data: bytes) -> float:
    return struct.unpack("<f", b"\0\0" + data)[0]


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
