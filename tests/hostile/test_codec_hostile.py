"""Decoding strangers' bytes: every defect is a CodecError that names the place, and memory stays bounded."""

from __future__ import annotations

import resource
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.blob_sizes import HEADER
from protocol.codec import make_codec
from protocol.errors import CodecError
from protocol.layout import Layout
from protocol.spec import CodecSpec
from tests.support.codec_cases import LAYOUT, SPECS, assert_refused_or_sane, every_codec, noise

BLOCKS = Layout.of({"first": (4096,), "second": (2, 4096)})
K64, BITMAP, DENSE, SIGN, INT8, NONE = (
    CodecSpec(kind="sparse", k=64),
    CodecSpec(kind="sparse", k=1500),
    CodecSpec(kind="sparse", k=4096),
    CodecSpec(kind="sign"),
    CodecSpec(kind="int8"),
    CodecSpec(kind="none"),
)


def blob_of(spec: CodecSpec, layout: Layout = LAYOUT):
    codec = make_codec(spec, layout)
    return codec, codec.encode(noise(layout))


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(SPECS),
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_mutated_bytes_are_refused_or_decode_to_sane_numbers(spec, edits):
    codec, blob = blob_of(spec)
    for at, value in edits:
        blob[at % len(blob)] = value
    assert_refused_or_sane(codec, blob)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(SPECS), st.integers(0, 2**31), st.integers(0, 255))
def test_random_records_are_refused_or_decode_to_sane_numbers(spec, seed, every):
    codec, blob = blob_of(spec)
    noise_bytes = torch.randint(0, 256, (codec.size - HEADER,), generator=torch.Generator().manual_seed(seed))
    blob[HEADER:] = bytes((noise_bytes & every).tolist())
    assert_refused_or_sane(codec, blob)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(SPECS), st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(spec, data):
    with pytest.raises(CodecError):
        make_codec(spec, LAYOUT).check(data)


@every_codec
def test_a_blob_of_the_wrong_size_is_refused(spec):
    codec, blob = blob_of(spec)
    for wrong in (b"", blob[:39], blob[:-1], blob + b"\0"):
        with pytest.raises(CodecError, match="bytes"):
            codec.check(wrong)


@every_codec
@pytest.mark.parametrize("at", [0, 4, 5, 6, 7, 8, 39])
def test_a_blob_for_another_codec_format_or_model_is_refused(spec, at):
    codec, blob = blob_of(spec)
    blob[at] ^= 1
    for use in (
        lambda: codec.check(blob),
        lambda: codec.decode_tensor(blob, 0),
        lambda: codec.add_to(blob, noise(LAYOUT)),
    ):
        with pytest.raises(CodecError, match="header"):
            use()


def bf16(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


def elias_fano(positions: list[int], low: int = 6, m: int = 4096) -> bytes:
    """Positions as they come, also wrong ones."""
    k = len(positions)
    lows = sum((p & ((1 << low) - 1)) << (low * i) for i, p in enumerate(positions))
    highs = sum(1 << ((p >> low) + i) for i, p in enumerate(positions))
    return lows.to_bytes(-(-k * low // 8), "little") + highs.to_bytes(-(-(k + ((m - 1) >> low)) // 8), "little")


def sparse_block(lo=1.0, hi=2.0, positions: list[int] | None = None) -> bytes:
    return bf16(lo) + bf16(hi) + elias_fano(positions or list(range(64))) + bytes(16)


GOOD = sparse_block()
SECOND_RECORD = HEADER + len(GOOD)


def test_the_hand_made_block_is_valid():
    codec, blob = blob_of(K64, BLOCKS)
    blob[SECOND_RECORD : SECOND_RECORD + len(GOOD)] = GOOD
    codec.check(blob)
    assert codec.decode_tensor(blob, 1).values[:64].tolist() == [1.0] * 64


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        (sparse_block(lo=float("nan")), "a scale"),
        (sparse_block(hi=float("inf")), "a scale"),
        (sparse_block(lo=-1.0), "a scale"),
        (sparse_block(lo=-0.0), "a scale"),
        (sparse_block(hi=2.0**31), "a scale"),
        (sparse_block(lo=2.0**-61), "a scale"),
        (sparse_block(lo=1e-40), "a scale"),
        (sparse_block(lo=3.0), "above the high"),
        (sparse_block(positions=[0, 2, 1, *range(3, 64)]), "do not increase"),
        (sparse_block(positions=[0, 0, *range(2, 64)]), "do not increase"),
        (GOOD[:52] + bytes(16) + GOOD[68:], "exactly 64"),
        (GOOD[:52] + b"\xff" * 8 + b"\x01" + bytes(7) + GOOD[68:], "exactly 64"),
        (GOOD[:52] + b"\xff" * 15 + b"\x7f" + GOOD[68:], "exactly 64"),
        (GOOD[:67] + b"\x80" + GOOD[68:], "padding bits"),
    ],
)
def test_each_defect_of_a_sparse_block_is_refused_with_its_place(encoded, why):
    codec, blob = blob_of(K64, BLOCKS)
    at = SECOND_RECORD + len(GOOD)
    blob[at : at + len(GOOD)] = encoded
    with pytest.raises(CodecError, match=f"tensor 'second', block 1: .*{why}"):
        codec.check(blob)


def test_a_position_beyond_a_short_block_is_refused():
    layout = Layout.of({"w": (100,)})  # two of 100, five low bits: the high part can say up to 127
    codec, blob = blob_of(K64, layout)
    encoded = bf16(1.0) + bf16(2.0) + elias_fano([3, 100], low=5, m=100) + b"\0"
    blob[HEADER:] = encoded
    with pytest.raises(CodecError, match="beyond the block's end"):
        codec.check(blob)
    blob[HEADER:] = bf16(1.0) + bf16(2.0) + elias_fano([3, 99], low=5, m=100) + b"\0"
    codec.check(blob)


def test_padding_bits_are_refused_wherever_they_are():
    layout = Layout.of({"w": (100,)})
    codec, good = blob_of(K64, layout)
    for at, bit, why in ((4, 2, "low parts"), (5, 5, None), (6, 4, "values")):
        blob = bytearray(good)
        section = HEADER + at + 1  # the last byte of low parts, unary parts, values
        blob[section] |= 0x80 if bit else 0
        with pytest.raises(CodecError, match=why or "positions"):
            codec.check(blob)
    codec, blob = blob_of(CodecSpec(kind="sparse", k=2048), Layout.of({"w": (9,)}))  # a bitmap of 9 bits
    blob[HEADER + 5] |= 0x80
    with pytest.raises(CodecError, match="padding bits of the positions"):
        codec.check(blob)


def test_a_bitmap_with_another_count_is_refused():
    codec, blob = blob_of(BITMAP, BLOCKS)
    blob[44 : 44 + 512] = bytes(512)
    with pytest.raises(CodecError, match="tensor 'first', block 0: not exactly 1500"):
        codec.check(blob)


def test_padding_bits_of_signs_are_refused():
    codec, blob = blob_of(SIGN, Layout.of({"w": (9,)}))
    codec.check(blob)
    blob[HEADER + 3] |= 2
    with pytest.raises(CodecError, match="padding bits of the signs"):
        codec.check(blob)


@pytest.mark.parametrize(
    ("spec", "at", "put", "why"),
    [
        (DENSE, 0, bf16(2.0) + bf16(1.0), "above the high"),
        (SIGN, 0, bf16(-1.0), "a scale"),
        (SIGN, 0, bf16(2.0**31), "a scale"),
        (INT8, 0, bf16(-1.0), "a scale"),
        (INT8, 0, bf16(2.0**24), "a scale"),
        (INT8, 2, b"\x80", "-128"),
        (NONE, 4, struct.pack("<f", float("nan")), "not finite"),
        (NONE, 4, struct.pack("<f", float("-inf")), "not finite"),
        (NONE, 4, struct.pack("<f", 2.0**31), "not finite"),
    ],
)
def test_each_defect_of_a_dense_block_is_refused_with_its_place(spec, at, put, why):
    codec, blob = blob_of(spec, BLOCKS)
    at += HEADER + 2 * codec.encoded_size(4096)
    blob[at : at + len(put)] = put
    with pytest.raises(CodecError, match=f"tensor 'second', block 1: .*{why}"):
        codec.check(blob)
    e = noise(BLOCKS)
    before = {n: t.clone() for n, t in e.items()}
    with pytest.raises(CodecError):
        codec.add_to(blob, e)
    assert all(torch.equal(e[n], before[n]) for n in e), "a bad blob changes nothing"


def test_checking_takes_memory_for_a_slice_not_for_the_model():
    layout = Layout.of({"w": (256, 1024, 1024)})  # 1 GiB as fp32
    codec = make_codec(K64, layout)
    blob = codec.header + GOOD * layout.blocks
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    codec.check(memoryview(blob))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 128, f"{grown:.0f} MiB"
