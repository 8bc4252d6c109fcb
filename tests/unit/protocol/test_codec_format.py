"""The codecs' bytes, against a reader written from docs/codec.md alone, number by number, without tensors."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.blob_sizes import packed_size
from protocol.codec import make_codec
from protocol.codec.bits import pack, unpack
from protocol.codec.positions import Positions
from protocol.layout import Layout
from protocol.spec import CodecSpec
from tests.support.codec_cases import layouts, read_bf16, read_bits, specs


def read_sparse(encoded: bytes, m: int, k: int) -> dict[int, float]:
    """Return the values of an encoded block of m coordinates of which k are kept, by docs/codec.md."""
    lo, hi = read_bf16(encoded[0:2]), read_bf16(encoded[2:4])
    at = 4
    if k == m:
        positions = list(range(m))
    else:
        low = int(math.log2(m / k))
        unary = k + ((m - 1) >> low)
        a, b = -(-k * low // 8), -(-unary // 8)
        if -(-m // 8) <= a + b:
            size = -(-m // 8)
            positions = [i for i, bit in enumerate(read_bits(encoded[at : at + size], 1, m)) if bit]
            at += size
        else:
            lows = read_bits(encoded[at : at + a], low, k)
            ones = [i for i, bit in enumerate(read_bits(encoded[at + a : at + a + b], 1, unary)) if bit]
            positions = [((one - i) << low) | lows[i] for i, one in enumerate(ones)]
            at += a + b
    codes = read_bits(encoded[at:], 2, k)
    assert len(positions) == k and positions == sorted(set(positions)) and positions[-1] < m
    return {p: (-1 if c & 2 else 1) * (hi if c & 1 else lo) for p, c in zip(positions, codes, strict=True)}


def read_blob(blob: bytes, kind: str, k: int, layout: Layout) -> dict[str, dict[int, float]]:
    assert blob[:4] == b"CRN1"
    assert blob[4:8] == bytes([{"sparse": 1, "int8": 2, "none": 3, "sign": 4}[kind], 1]) + struct.pack(
        "<H", k if kind == "sparse" else 0
    )
    assert blob[8:40] == layout.digest
    at, out = 40, {}
    for tensor in layout.tensors:
        said = out[tensor.name] = {}
        for start in range(0, tensor.numel, 4096):
            m = min(4096, tensor.numel - start)
            if kind == "none":
                values = dict(enumerate(struct.unpack(f"<{m}f", blob[at : at + 4 * m])))
                at += 4 * m
            elif kind == "int8":
                scale = read_bf16(blob[at : at + 2])
                values = {i: q * scale for i, q in enumerate(struct.unpack(f"{m}b", blob[at + 2 : at + 2 + m]))}
                at += 2 + m
            elif kind == "sign":
                scale, bits = read_bf16(blob[at : at + 2]), -(-m // 8)
                minus = read_bits(blob[at + 2 : at + 2 + bits], 1, m)
                values = {i: -scale if bit else scale for i, bit in enumerate(minus)}
                at += 2 + bits
            else:
                kept = max(1, math.ceil(m * k / 4096))
                size = encoded_size(m, kept)
                values = read_sparse(blob[at : at + size], m, kept)
                at += size
            said.update({start + i: v for i, v in values.items()})
    assert at == len(blob)
    return out


def encoded_size(m: int, k: int) -> int:
    if k == m:
        return 4 + -(-2 * k // 8)
    low = int(math.log2(m / k))
    return 4 + min(-(-m // 8), -(-k * low // 8) + -(-(k + ((m - 1) >> low)) // 8)) + -(-2 * k // 8)


@settings(deadline=None, max_examples=60)
@given(layouts, specs, st.integers(0, 2**31), st.floats(-12, 6))
def test_a_blob_says_to_a_plain_reader_what_it_says_to_the_decoder(layout, spec, seed, power):
    generator = torch.Generator().manual_seed(seed)
    feedback = {t.name: torch.randn(t.shape, generator=generator) ** 3 * 10**power for t in layout.tensors}
    codec = make_codec(spec, layout)
    blob = codec.encode(feedback)
    codec.check(blob)
    assert len(blob) == codec.size
    said = read_blob(bytes(blob), spec.kind, spec.k, layout)
    for index, tensor in enumerate(layout.tensors):
        decoded = codec.decode_tensor(blob, index)
        positions = range(tensor.numel) if decoded.positions is None else decoded.positions.tolist()
        assert dict(zip(positions, decoded.values.tolist(), strict=True)) == said[tensor.name]


def test_k_64_costs_at_most_0_165_bits_a_parameter():
    layout = Layout.of({"w": (1024, 1024)})
    codec = make_codec(CodecSpec(kind="sparse", k=64), layout)
    assert 8 * codec.size / layout.numel <= 0.165
    assert codec.encoded_size(4096) == 84


def test_a_dense_block_spends_no_bits_on_positions():
    codec = make_codec(CodecSpec(kind="sparse", k=4096), Layout.of({"w": (4096,)}))
    assert codec.encoded_size(4096) == 4 + 4096 * 2 // 8


@pytest.mark.parametrize("k", [*range(64, 4096, 97), 1023, 1024, 1025, 2048, 4095, 4096])
def test_positions_never_cost_more_than_a_bitmap(k):
    coding = Positions(4096, k)
    bound = (math.lgamma(4097) - math.lgamma(k + 1) - math.lgamma(4097 - k)) / math.log(2) / 8
    assert bound <= coding.size + 1e-6
    assert coding.size <= min(512, 1.1 * bound + k / 8 * 0.6 + 2) or coding.size == 512


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**31))
def test_packing_fields_is_little_endian_bit_order_and_inverts(width, count, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    fields = torch.randint(0, 2**width, (rows, count), dtype=torch.uint8, generator=generator)
    packed = pack(fields, width)
    assert packed.shape == (rows, packed_size(count, width))
    for row, data in zip(fields.tolist(), packed, strict=True):
        assert read_bits(bytes(data.tolist()), width, count) == row
    back = unpack(packed, count, width)
    assert torch.equal(back[:, :count], fields) and not back[:, count:].any()


def test_the_bytes_of_a_known_record_stay_as_they_are():
    codec = make_codec(CodecSpec(kind="sparse", k=64), Layout.of({"w": (4096,)}))
    e = torch.zeros(4096)
    e[torch.arange(0, 4096, 64)] = torch.tensor([1.0, -1.0, 2.0, -2.0]).repeat(16)
    encoded = codec.encode({"w": e})[40:]
    assert encoded.hex() == (
        "803f0040"  # lo 1.0, hi 2.0
        + "00" * 48  # low six bits of 64 multiples of 64
        + "55" * 16  # a one, a zero, ...: each high part is one more
        + "d8" * 16  # codes 0, 2, 1, 3
    )
    assert not e.any()


@pytest.mark.parametrize("kind", ["sign", "int8", "none"])
def test_the_bytes_of_known_dense_records_stay_as_they_are(kind):
    codec = make_codec(CodecSpec(kind=kind), Layout.of({"w": (3,)}))
    encoded = codec.encode({"w": torch.tensor([127.0, -1.5, 0.0])})[40:]
    known = {"sign": "2b42" + "02", "int8": "803f" + "7ffe00", "none": "0000fe42" + "0000c0bf" + "00000000"}
    assert encoded.hex() == known[kind]
