"""The codecs' bytes, against a reader written from docs/codec.md alone, number by number, without tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.blob_sizes import HEADER, packed_size
from protocol.codec import make_codec
from protocol.codec.bits import pack, unpack
from protocol.codec.positions import Positions
from protocol.layout import Layout
from protocol.spec import CodecSpec
from tests.support.codec_cases import layouts, specs
from tests.vectors import plain_codec
from tests.vectors.plain_codec import read_bits


@settings(deadline=None, max_examples=60)
@given(layouts, specs, st.integers(0, 2**31), st.floats(-12, 6))
def test_a_blob_says_to_a_plain_reader_what_it_says_to_the_decoder(layout, spec, seed, power):
    generator = torch.Generator().manual_seed(seed)
    feedback = {t.name: torch.randn(t.shape, generator=generator) ** 3 * 10**power for t in layout.tensors}
    codec = make_codec(spec, layout)
    blob = codec.encode(feedback)
    codec.check(blob)
    assert len(blob) == codec.size
    read = plain_codec.read_blob(bytes(blob), spec.kind, spec.k, [(t.name, t.shape) for t in layout.tensors])
    for index, (tensor, said) in enumerate(zip(layout.tensors, read, strict=True)):
        decoded = codec.decode_tensor(blob, index)
        positions = list(range(tensor.numel)) if decoded.positions is None else decoded.positions.tolist()
        assert positions == said.positions
        assert decoded.values.tolist() == said.values[positions].tolist()


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
    encoded = codec.encode({"w": e})[HEADER:]
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
    encoded = codec.encode({"w": torch.tensor([127.0, -1.5, 0.0])})[HEADER:]
    known = {"sign": "2b42" + "02", "int8": "803f" + "7ffe00", "none": "0000fe42" + "0000c0bf" + "00000000"}
    assert encoded.hex() == known[kind]
