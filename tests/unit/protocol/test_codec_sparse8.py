"""The codec of sums of sparse updates: its bytes by a plain reader of docs/codec.md, what it refuses, what it keeps."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.blob_sizes import HEADER
from protocol.codec import make_codec, make_shard_codec
from protocol.codec.rows import topk, topk_by_torch
from protocol.codec.sparse8 import Sparse8Codec
from protocol.errors import CodecError
from protocol.layout import Layout
from protocol.spec import CodecSpec
from tests.support.codec_cases import (
    LAYOUT,
    assert_refused_or_sane,
    awkward,
    dense,
    layouts,
    noise,
    same_bits,
)
from tests.vectors.plain_codec import read_bf16, read_bits

kept = st.one_of(st.integers(256, 4096), st.sampled_from([256, 1024, 4096]))


def read_block(encoded: bytes, m: int, k: int) -> tuple[dict[int, float], bytes]:
    """Return the values in an encoded block of m coordinates of which k are kept, and the bytes after it."""
    scale, at = read_bf16(encoded[:2]), 2
    positions = list(range(m))
    if k < m:
        low = int(math.log2(m / k))
        unary = k + ((m - 1) >> low)
        a, b = -(-k * low // 8), -(-unary // 8)
        if (size := -(-m // 8)) <= a + b:
            positions = [i for i, bit in enumerate(read_bits(encoded[at : at + size], 1, m)) if bit]
            at += size
        else:
            lows = read_bits(encoded[at : at + a], low, k)
            ones = [i for i, bit in enumerate(read_bits(encoded[at + a : at + a + b], 1, unary)) if bit]
            positions = [((one - i) << low) | lows[i] for i, one in enumerate(ones)]
            at += a + b
    codes = struct.unpack(f"{k}b", encoded[at : at + k])
    assert len(positions) == k and positions == sorted(set(positions)) and positions[-1] < m
    return {p: c * scale for p, c in zip(positions, codes, strict=True)}, encoded[at + k :]


@settings(deadline=None, max_examples=40)
@given(layouts, kept, st.integers(0, 2**31), st.floats(-12, 6))
def test_a_blob_says_to_a_plain_reader_what_it_says_to_the_decoder(layout, k, seed, power):
    codec = Sparse8Codec(layout, k)
    blob = bytes(codec.encode(noise(layout, seed, 10**power)))
    codec.check(blob)
    assert len(blob) == codec.size and blob[:8] == b"CRN1\x05\x02" + struct.pack("<H", k)
    rest = blob[HEADER:]
    for index, tensor in enumerate(layout.tensors):
        said: dict[int, float] = {}
        for start in range(0, tensor.numel, 4096):
            m = min(4096, tensor.numel - start)
            block, rest = read_block(rest, m, max(1, math.ceil(m * k / 4096)))
            said.update({start + i: v for i, v in block.items()})
        decoded = codec.decode_tensor(blob, index)
        positions = range(tensor.numel) if decoded.positions is None else decoded.positions.tolist()
        assert dict(zip(positions, decoded.values.tolist(), strict=True)) == said
    assert not rest


@settings(deadline=None, max_examples=40)
@given(layouts, kept, st.lists(awkward, min_size=1, max_size=50), st.integers(0, 2**31))
def test_encoding_leaves_what_decoding_does_not_give(layout, k, pool, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(pool)
    before = {
        t.name: values[torch.randint(len(pool), (t.numel,), generator=generator)].view(t.shape) for t in layout.tensors
    }
    after = {n: t.clone() for n, t in before.items()}
    codec = Sparse8Codec(layout, k)
    blob = codec.encode(after)
    codec.check(blob)
    for index, tensor in enumerate(layout.tensors):
        want = before[tensor.name].view(-1) - dense(codec, blob, index)
        kept = codec.decode_tensor(blob, index).positions
        got = after[tensor.name].view(-1)
        assert torch.equal(got, want)
        if kept is not None:
            left = torch.ones(tensor.numel, dtype=torch.bool)
            left[kept] = False
            assert same_bits(got[left], before[tensor.name].view(-1)[left])


@settings(deadline=None, max_examples=100)
@given(
    st.lists(awkward | st.just(math.nan) | st.just(-math.inf), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(2, 300),
    st.data(),
)
def test_a_gpus_way_to_choose_is_that_of_a_cpu_also_among_equals(pool, rows, width, data):
    k, seed = data.draw(st.integers(1, width - 1)), data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor(pool)[torch.randint(len(pool), (rows, width), generator=generator)]
    want = topk(x, k)
    assert torch.equal(topk_by_torch(x, k), want)
    assert (want[:, 1:] > want[:, :-1]).all()
    for row, chosen in zip(x.abs().nan_to_num(math.inf, posinf=1e38), want, strict=True):
        rest = torch.ones(width, dtype=torch.bool)
        rest[chosen] = False
        assert row[chosen].min() >= row[rest].max()


def test_of_equal_magnitudes_the_first_are_kept_and_a_zero_is_not_sent():
    codec = Sparse8Codec(Layout.of({"w": (4096 + 9,)}), 256)
    e = torch.full((4096 + 9,), -3.0)
    e[:100] = 3.0
    e[4096:] = 0
    blob = codec.encode({"w": e})
    decoded = codec.decode_tensor(blob, 0)
    assert decoded.positions is not None
    assert decoded.positions.tolist() == [*range(256), 4096]
    assert decoded.values[-1] == 0 and decoded.values[0] == -decoded.values[200] == pytest.approx(3.0, rel=0.004)


def test_the_bytes_of_a_known_record_stay_as_they_are():
    codec = Sparse8Codec(Layout.of({"w": (64,)}), 256)
    e = torch.zeros(64)
    e[[3, 17, 33, 60]] = torch.tensor([127.0, -2.0, 1.4, -64.0])
    encoded = codec.encode({"w": e})[HEADER:]
    # Scale 1; four positions: low four bits 3, 1, 1, 12; high parts 0, 1, 2, 3; 127, -2, 1, -64.
    assert encoded.hex() == "803f" + "13c1" + "55" + "7ffe01c0"


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([256, 1500, 4096]),
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_mutated_bytes_are_refused_or_decode_to_sane_numbers(k, edits):
    codec = Sparse8Codec(LAYOUT, k)
    blob = codec.encode(noise(LAYOUT))
    for at, value in edits:
        blob[at % len(blob)] = value
    assert_refused_or_sane(codec, blob)


@pytest.mark.parametrize(
    ("at", "put", "why"),
    [(0, b"\x80\xbf", "a scale"), (0, b"\x80\x4b", "a scale"), (-1, b"\x80", "-128"), (2, b"\xff" * 8, "position")],
)
def test_each_defect_is_refused_with_its_place(at, put, why):
    codec = Sparse8Codec(Layout.of({"first": (4096,), "second": (8192,)}), 256)
    blob = codec.encode(noise(codec.layout))
    size = codec.encoded_size(4096)
    at = HEADER + 2 * size + at % size
    blob[at : at + len(put)] = put
    with pytest.raises(CodecError, match=f"tensor 'second', block 1: .*{why}"):
        codec.check(blob)


def test_sums_keep_four_times_the_coordinates_and_all_of_what_is_dense():
    for spec, want in (
        (CodecSpec(kind="sparse", k=64), (5, 256)),
        (CodecSpec(kind="sparse", k=2000), (5, 4096)),
        (CodecSpec(kind="sign"), (2, 0)),
        (CodecSpec(kind="int8"), (2, 0)),
        (CodecSpec(kind="none"), (3, 0)),
    ):
        sums = make_shard_codec(make_codec(spec, LAYOUT), LAYOUT)
        assert (sums.identifier, sums.kept) == want
    codec = Sparse8Codec(Layout.of({"w": (4096,)}), 256)
    assert codec.encoded_size(4096) == 2 + 128 + 64 + 256
