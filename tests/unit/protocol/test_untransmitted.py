"""Values that a reduced round does not use return to their author: none is lost, and none counts twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import make_codec
from protocol.errors import CodecError
from protocol.layout import Layout, TensorSlice
from protocol.outer import Contribution
from protocol.reduce import Reduction
from protocol.spec import CodecSpec, OuterSpec
from protocol.untransmitted import ResidualMask, untransmitted
from tests.support.codec_cases import LAYOUT, dense, layouts, noise, same_bits
from tests.support.outer_step import contributions, key, reduced, sum_means

SPARSE = CodecSpec(kind="sparse", k=64)
every_k = pytest.mark.parametrize("k", [64, 300, 1500, 4096])


def empty(layout: Layout) -> dict[str, torch.Tensor]:
    return {t.name: torch.zeros(t.shape) for t in layout.tensors}


def put_back(codec, blob, selection: ResidualMask | None, into=None, parts=None):
    into = empty(codec.layout) if into is None else into
    if selection is not None:
        codec.add_to(blob, into, parts, selection.batch_mask)
    return into


@settings(deadline=None, max_examples=40)
@given(layouts, st.sampled_from([64, 300, 1500, 4096]), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_each_value_of_an_update_is_in_the_sums_or_goes_back(layout, k, peers, count, seed):
    reduction = Reduction(make_codec(CodecSpec(kind="sparse", k=k), layout))
    updates = [
        Contribution(key(i), 1 + i, reduction.codec.encode(noise(layout, seed + i, 10.0**-i))) for i in range(peers)
    ]
    sums = reduced(reduction, updates, OuterSpec(), min(count, layout.blocks))
    means = sum_means(reduction, sums)
    for update in updates:
        back = put_back(reduction.codec, update.blob, untransmitted(update.blob, sums, reduction))
        for index, tensor in enumerate(layout.tensors):
            value, had = dense(reduction.codec, update.blob, index), means[tensor.name] != 0
            assert same_bits(back[tensor.name].view(-1), torch.where(had, 0, value) + 0.0)


def test_of_many_peers_some_is_dropped_and_of_one_nothing():
    reduction = Reduction(make_codec(SPARSE, LAYOUT))
    alone = contributions(reduction.codec, 1)
    assert untransmitted(alone[0].blob, reduced(reduction, alone, OuterSpec(), 2), reduction) is None
    many = contributions(reduction.codec, 12, [1.0] * 12)
    selection = untransmitted(many[0].blob, reduced(reduction, many, OuterSpec(), 2), reduction)
    assert selection is not None
    share = sum(map(int.bit_count, selection.to_bytes())) / (8 * len(selection.to_bytes()))
    assert 0.1 < share < 0.9


@pytest.mark.parametrize("kind", ["sign", "int8", "none"])
def test_codecs_that_say_all_drop_nothing(kind):
    reduction = Reduction(make_codec(CodecSpec(kind=kind), LAYOUT))
    updates = contributions(reduction.codec, 3)
    assert untransmitted(updates[0].blob, reduced(reduction, updates, OuterSpec(), 2), reduction) is None
    with pytest.raises(CodecError, match="says all"):
        ResidualMask(reduction.codec)


@every_k
def test_a_selection_is_the_same_once_packed_and_whatever_lies_in_a_run_together(k):
    layout = Layout.of({"a": (3, 5000), "b": (77,), "c": (), "d": (77,)})
    codec = make_codec(CodecSpec(kind="sparse", k=k), layout)
    blob = codec.encode(noise(layout))
    made = ResidualMask(codec)
    generator = torch.Generator().manual_seed(1)
    want = empty(layout)
    for index, tensor in enumerate(layout.tensors):
        for batch in codec.batches(1, tensor=index):
            decoded = codec.decode_batch(blob, batch)
            chosen = torch.rand((batch.count, decoded.values.numel() // batch.count), generator=generator) < 0.5
            made.set_batch(batch, chosen)
            at = torch.arange(batch.numel) if decoded.positions is None else decoded.positions
            want[tensor.name].view(-1)[batch.segments[0].start + at] = decoded.values * chosen.view(-1)
    assert not made.is_empty
    again = ResidualMask.from_bytes(codec, made.to_bytes())
    assert again.to_bytes() == made.to_bytes()
    assert all(same_bits(t, want[n] + 0.0) for n, t in put_back(codec, blob, again).items())
    parts = [TensorSlice(0, 4096, 15_000), TensorSlice(3, 0, 77)]
    mine = {layout.tensors[p.index].name: torch.zeros(p.numel) for p in parts}
    put_back(codec, blob, again, mine, parts)
    for p in parts:
        name = layout.tensors[p.index].name
        assert same_bits(mine[name], want[name].view(-1)[p.start : p.stop] + 0.0)
    for wrong in (b"", made.to_bytes()[:-1], made.to_bytes() + b"\0"):
        with pytest.raises(CodecError, match="selection"):
            ResidualMask.from_bytes(codec, wrong)


def test_what_is_of_another_run_is_refused():
    reduction = Reduction(make_codec(SPARSE, LAYOUT))
    updates = contributions(reduction.codec, 3)
    sums = reduced(reduction, updates, OuterSpec(), 2)
    for own, parts in ((updates[0].blob[:-1], sums), (updates[0].blob, sums[:1]), (updates[0].blob, sums[::-1])):
        with pytest.raises(CodecError):
            untransmitted(own, parts, reduction)
