"""Work is cut into batches that cover every block once, and what lies in a batch together changes no bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import make_codec
from protocol.codec.interface import HEADER
from protocol.ids import PeerKey
from protocol.layout import BLOCK, REFERENCE_NORMS, Layout
from protocol.outer import Contribution, apply
from protocol.spec import OuterSpec
from tests.support.codec_cases import SPECS, noise, same_bits

# Many tensors, several of one width, full blocks and short ones.
layouts = st.lists(
    st.one_of(st.sampled_from([1, 128, 4095, 4096, 4097, 8192 + 128, 5 * 4096]), st.integers(1, 20_000)),
    min_size=1,
    max_size=12,
).map(lambda sizes: Layout.of({f"t{i:02}": (n,) for i, n in enumerate(sizes)}))


@settings(deadline=None)
@given(layouts, st.sampled_from(SPECS), st.integers(1, 9))
def test_batches_cover_each_block_once_where_its_encoding_lies(layout, spec, limit):
    codec = make_codec(spec, layout)
    where, at = {}, HEADER
    for index, tensor in enumerate(layout.tensors):
        for start in range(0, tensor.numel, BLOCK):
            width = min(BLOCK, tensor.numel - start)
            where[index, start] = (width, at)
            at += codec.encoded_size(width)
    seen = {}
    for batch in codec.batches(limit):
        assert 1 <= batch.count <= limit and batch.numel == batch.count * batch.width
        row = 0
        for segment in batch.segments:
            assert segment.row == row
            for i in range(segment.count):
                key = (segment.index, segment.start + i * BLOCK)
                assert key not in seen
                seen[key] = (batch.width, segment.offset + i * codec.encoded_size(batch.width))
                assert batch.segment_at(row + i) is segment
            row += segment.count
        assert row == batch.count
    assert seen == where


@settings(deadline=None, max_examples=40)
@given(layouts, st.sampled_from(SPECS), st.integers(0, 2**31))
def test_a_blob_of_many_tensors_is_that_of_each_by_itself(layout, spec, seed):
    codec, together, apart = make_codec(spec, layout), noise(layout, seed), noise(layout, seed)
    blob = codec.encode(together)
    joined = bytearray(codec.header)
    for index, tensor in enumerate(layout.tensors):
        joined += codec.encode_blocks(index, 0, apart[tensor.name].view(-1))
    assert blob == joined and len(blob) == codec.size
    assert all(same_bits(together[n], apart[n]) for n in together)


@settings(deadline=None, max_examples=30)
@given(layouts, st.sampled_from(SPECS), st.integers(1, 9))
def test_a_step_of_many_tensors_is_that_of_each_by_itself(layout, spec, limit):
    codec, outer = make_codec(spec, layout), OuterSpec()
    blobs = [codec.encode(noise(layout, i, 10.0**i)) for i in range(3)]

    def updates(blobs) -> list[Contribution]:
        return [Contribution(PeerKey(bytes([i]) * 32), 1 + i, blob) for i, blob in enumerate(blobs)]

    together = noise(layout, 9) | {REFERENCE_NORMS: torch.zeros(len(layout.tensors))}
    apply(together, updates(blobs), codec, outer, limit)
    at = HEADER
    for tensor in layout.tensors:
        alone = Layout((tensor,))
        one = make_codec(spec, alone)
        size = one.size - HEADER
        state = {tensor.name: noise(layout, 9)[tensor.name], REFERENCE_NORMS: torch.zeros(1)}
        apply(state, updates([one.header + blob[at : at + size] for blob in blobs]), one, outer)
        assert same_bits(state[tensor.name], together[tensor.name])
        at += size


def test_an_update_goes_back_into_every_tensor():
    layout = Layout.of({f"t{i}": (n,) for i, n in enumerate((128, 4096, 8192, 128, 5000))})
    for spec in SPECS:
        codec, e = make_codec(spec, layout), noise(layout)
        codec.add_to(codec.encode(e), e)
        for name, want in noise(layout).items():
            torch.testing.assert_close(e[name], want, rtol=0, atol=1e-6)
