"""A committee's members make the same bytes of the same updates, and these are the mean that `apply` steps by."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocol.codec import Codec, make_codec
from protocol.codec.interface import HEADER
from protocol.errors import CodecError
from protocol.layout import MOMENTUM, Layout, TensorSlice
from protocol.merkle import CHUNK, blob_digest
from protocol.messages import MAX_SHARDS
from protocol.outer import Contribution, apply
from protocol.reduce import Reduction, apply_reduced
from protocol.reduce_plan import shard_count
from protocol.spec import CodecSpec, OuterSpec
from protocol.state import state_layout
from tests.support.codec_cases import LAYOUT, SPECS, every_codec, layouts, noise, specs
from tests.support.outer_step import OUTERS, contributions, key, reduced, same_states, state_of, sum_means

NO_CLIP = OuterSpec(clip="none")
SPARSE = CodecSpec(kind="sparse", k=64)
CPU = torch.device("cpu")
every_outer = pytest.mark.parametrize("outer", OUTERS, ids=["default", "all", "nesterov"])


def stepped(reduction: Reduction, sums: list[bytes], outer: OuterSpec, **options) -> dict[str, Tensor]:
    state = state_of(reduction.codec, outer)
    apply_reduced(state, sums, reduction, outer, **options)
    return state


def means(codec: Codec, updates: list[Contribution], outer: OuterSpec) -> dict[str, Tensor]:
    """Return the step of `apply` from a state of zeros."""
    plain = outer.model_copy(update={"optimizer": "plain", "lr": 1.0})
    state = {t.name: torch.zeros(t.shape) for t in state_layout(codec.layout, plain).tensors}
    apply(state, updates, codec, plain)
    return {t.name: -state[t.name].view(-1) for t in codec.layout.tensors}


# -- parts ---------------------------------------------------------------------------------------------------


@given(layouts, specs, st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_parts_are_all_of_the_model_in_order_and_of_like_size(layout, spec, count):
    reduction = Reduction(make_codec(spec, layout))
    count = min(count, layout.blocks)
    parts = reduction.slices(count)
    joined: list[TensorSlice] = []
    for part in parts:
        assert part and len({p.index for p in part}) == len(part)
        for p in part:
            if joined and joined[-1].index == p.index:
                assert joined[-1].stop == p.start and p.start % 4096 == 0
                joined[-1] = TensorSlice(p.index, joined[-1].start, p.stop)
            else:
                joined.append(p)
    assert tuple(joined) == layout.full_slices
    sizes = [sum(p.blocks for p in part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    slices = [reduction.update_slice(count, p) for p in range(count)]
    assert [a for a, _ in slices] == [0, *(b for _, b in slices[:-1])] and slices[-1][1] == reduction.codec.size
    assert sum(reduction.size(count, p) for p in range(count)) == reduction.size(1, 0) + (count - 1) * HEADER


def test_there_is_a_part_for_each_contributor_but_none_much_smaller_than_a_chunk_of_a_blob():
    assert [shard_count(n, 10 * CHUNK) for n in (0, 1, 7, 10, 50)] == [1, 1, 7, 10, 10]
    assert shard_count(50, 100) == 1
    assert shard_count(4096, 1 << 40) == MAX_SHARDS


@pytest.mark.parametrize("kind", ["sparse", "sign", "int8", "none"])
def test_as_many_parts_as_a_round_has_are_never_empty(kind):
    for shapes in ({"w": (70_000,)}, {f"{i:04d}": (1,) for i in range(2000)} | {"w": (600, 700)}):
        reduction = Reduction(make_codec(CodecSpec(kind=kind, k=4096), Layout.of(shapes)))
        count = shard_count(10**6, reduction.codec.size)
        assert all(reduction.slices(count))


def test_a_part_that_is_not_there_is_an_error():
    reduction = Reduction(make_codec(SPARSE, LAYOUT))
    for count, part in ((2, 2), (2, -1), (0, 0), (LAYOUT.blocks + 1, 0)):
        with pytest.raises(ValueError):
            reduction.size(count, part)


# -- means ---------------------------------------------------------------------------------------------------


@every_codec
@every_outer
def test_a_reduced_mean_is_that_of_apply_to_the_precision_of_its_codec(spec, outer):
    reduction = Reduction(make_codec(spec, LAYOUT))
    updates = contributions(reduction.codec, 4)
    want = means(reduction.codec, updates, outer)
    # One part: the norms are those of whole tensors.
    sums = reduced(reduction, updates, outer, 1)
    reduction.check_shard(sums[0], 1, 0)
    got = sum_means(reduction, sums)
    for name, mean in want.items():
        for start in range(0, mean.numel(), 4096):
            here, there = mean[start : start + 4096], got[name][start : start + 4096]
            if spec.kind == "sparse":
                kept, k = there != 0, -(-len(here) * min(4096, 4 * spec.k) // 4096)
                assert kept.sum() <= k
                if not kept.all():  # nothing that is left out is larger than what is kept, or is more than a rounding
                    limit = max(here.abs().sort(descending=True).values[k - 1], here.abs().max() / 250)
                    assert here[~kept].abs().max() <= limit
                here, there = here[kept], there[kept]
            step = here.abs().max() / 127 if len(here) else 0
            assert ((here - there).abs() <= (0 if spec.kind == "none" else 0.51 * step)).all()


@every_codec
@every_outer
def test_a_step_by_reduced_parts_is_the_step_by_what_they_decode_to(spec, outer):
    reduction = Reduction(make_codec(spec, LAYOUT))
    updates = contributions(reduction.codec, 3)
    sums = reduced(reduction, updates, outer, 3)
    # The same numbers as an update of everything, which `apply` passes on as they are.
    raw = Reduction(make_codec(CodecSpec(kind="none"), LAYOUT)).codec
    said = {
        n: v.view(dict((t.name, t.shape) for t in LAYOUT.tensors)[n]) for n, v in sum_means(reduction, sums).items()
    }
    want = state_of(reduction.codec, outer)
    apply(want, [Contribution(key(0), 1, raw.encode(said))], raw, outer.model_copy(update={"clip": "none"}))
    assert same_states(stepped(reduction, sums, outer), want)  # with the references of before


@given(st.sampled_from(SPECS), st.integers(1, 6), st.integers(2, 6), st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_any_number_of_parts_gives_the_same_state(spec, peers, count, seed):
    reduction = Reduction(make_codec(spec, LAYOUT))
    generator = torch.Generator().manual_seed(seed)
    updates = [
        Contribution(
            key(i),
            1 + i,
            reduction.codec.encode({t.name: torch.randn(t.shape, generator=generator) for t in LAYOUT.tensors}),
        )
        for i in range(peers)
    ]
    whole = stepped(reduction, reduced(reduction, updates, NO_CLIP, 1), NO_CLIP)
    assert same_states(stepped(reduction, reduced(reduction, updates, NO_CLIP, min(count, 6)), NO_CLIP), whole)


@every_codec
@every_outer
def test_processes_that_hold_a_state_together_step_as_one_does(spec, outer):
    reduction = Reduction(make_codec(spec, LAYOUT))
    sums = reduced(reduction, contributions(reduction.codec, 3), outer, 3)
    whole, state = stepped(reduction, sums, outer), state_of(reduction.codec, outer)
    a, b, c = LAYOUT.full_slices
    for parts in ([TensorSlice(0, 0, 8192)], [TensorSlice(0, 8192, 15_000), b], [c], []):
        mine = {}
        for prefix in ("", MOMENTUM):
            for p in parts:
                if (name := prefix + LAYOUT.tensors[p.index].name) in state:
                    mine[name] = state[name].view(-1)[p.start : p.stop].clone()
        apply_reduced(mine, sums, reduction, outer, batch_blocks=1, slices=parts)
        for prefix in ("", MOMENTUM):
            for p in parts:
                if (name := prefix + LAYOUT.tensors[p.index].name) in state:
                    state[name].view(-1)[p.start : p.stop] = mine[name]
    assert same_states(state, whole)
    assert a.numel == 15_000


@every_codec
@every_outer
def test_neither_order_nor_threads_change_a_byte(spec, outer):
    reduction = Reduction(make_codec(spec, Layout.of({"big": (1500, 1024), "odd": (4097,)})))
    updates = contributions(reduction.codec, 4, [1.0, 1e3, 1e-12, 1e-18])
    want = reduced(reduction, updates, outer, 2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        assert reduced(reduction, updates[::-1], outer, 2) == want
    finally:
        torch.set_num_threads(threads)


def test_the_bytes_stay_what_they_were_released_as():
    """Fixed updates: a change here has the committees of older versions and of this one disagree."""
    layout = Layout.of({"w": (8192 + 128,), "v": (3,)})
    got = {}
    for spec in (SPARSE, CodecSpec(kind="sign"), CodecSpec(kind="int8"), CodecSpec(kind="none")):
        reduction = Reduction(make_codec(spec, layout))
        updates = []
        for i in range(3):
            e = (torch.arange(8192 + 128, dtype=torch.float32) * (37 + 2 * i) % 128 - 64) / 128
            if spec.kind == "sparse":  # of one magnitude, and as many as are kept, so that encoding chooses nothing
                e = torch.zeros_like(e)
                e[16 * i : 16 * i + 64] = 0.5 + i
                e[4096 + 48 * i : 4096 + 48 * i + 64] = -0.25 - i
                e[8192 + i : 8194 + i] = 1.0 + i
            updates.append(Contribution(key(i), 1 + i, reduction.codec.encode({"w": e, "v": torch.full((3,), 2.0)})))
        got[spec.kind] = b"".join(reduced(reduction, updates, OuterSpec(), 2))
    assert {kind: blob_digest(sums).short for kind, sums in got.items()} == {
        "sparse": "22360526",
        "sign": "c08f06c0",
        "int8": "a08e1ce3",
        "none": "9099a7fc",
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CPU and CUDA cannot be compared")
@every_codec
@every_outer
def test_a_gpu_makes_the_bytes_of_a_cpu(spec, outer):
    reduction = Reduction(make_codec(spec, Layout.of({"big": (1500, 1024), "odd": (4097,), "tiny": ()})))
    updates = contributions(reduction.codec, 4, [1.0, 1e3, 1e-12, 1e-18])
    for part in range(2):
        want = reduction.reduce(updates, outer, 2, part)
        assert reduction.reduce(updates, outer, 2, part, device="cuda") == want


# -- slices --------------------------------------------------------------------------------------------------


@every_codec
def test_only_a_parts_chunks_are_needed_to_reduce_it(spec, tmp_path):
    reduction = Reduction(make_codec(spec, Layout.of({"a": (1500, 1024), "b": (1024, 3000), "c": (77,)})))
    size = reduction.codec.size
    updates = contributions(reduction.codec, 3)
    count = shard_count(3, size)
    for part in range(count):
        sparse = []
        for i, update in enumerate(updates):
            path = tmp_path / f"{part}-{i}"
            with open(path, "wb+") as file:
                file.truncate(size)
                for chunk in reduction.chunks(count, part):
                    file.seek(chunk * CHUNK)
                    file.write(update.blob[chunk * CHUNK : (chunk + 1) * CHUNK])
                file.flush()
                blob = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            reduction.check_slice(blob, count, part)
            sparse.append(Contribution(update.author, update.windows, blob))
        assert reduction.reduce(sparse, OuterSpec(), count, part) == reduction.reduce(updates, OuterSpec(), count, part)
    if count > 2:
        assert all(len(reduction.chunks(count, p)) < -(-size // CHUNK) for p in range(count))


@every_codec
def test_a_defect_of_an_update_is_its_parts_affair(spec):
    reduction = Reduction(make_codec(spec, LAYOUT))
    good = bytes(reduction.codec.encode(noise(LAYOUT)))
    count = 3
    for part in range(count):
        start, stop = reduction.update_slice(count, part)
        bad = bytearray(good)
        bad[max(start, 40) : stop] = b"\xff" * (stop - max(start, 40))
        for other in range(count):
            if other == part:
                with pytest.raises(CodecError):
                    reduction.check_slice(bad, count, other)
                with pytest.raises(CodecError):
                    reduction.reduce([Contribution(key(1), 1, bad)], OuterSpec(), count, other)
            else:
                reduction.check_slice(bad, count, other)
    header = b"X" + good[1:]
    with pytest.raises(CodecError, match="header"):
        reduction.check_slice(header, count, 0)
    with pytest.raises(CodecError, match="bytes"):
        reduction.check_slice(good[:-1], count, 1)


def test_updates_that_no_round_lists_are_refused():
    reduction = Reduction(make_codec(SPARSE, LAYOUT))
    one = contributions(reduction.codec, 1)
    with pytest.raises(CodecError, match="one author"):
        reduction.reduce(one * 2, OuterSpec(), 2, 0)
    with pytest.raises(CodecError, match="nothing to reduce"):
        reduction.reduce([], OuterSpec(), 2, 0)


# -- reduced parts from strangers ----------------------------------------------------------------------------


@every_codec
def test_a_reduced_part_that_is_not_the_rounds_is_refused_before_the_state_changes(spec):
    reduction = Reduction(make_codec(spec, Layout.of({"w": (4 * 4096,)})))
    outer = OuterSpec()
    sums = reduced(reduction, contributions(reduction.codec, 3), outer, 2)
    for wrong in (sums[::-1], [sums[0], sums[0]], [sums[0], sums[1][:-1]], sums[:1], [], [*sums, sums[1]]):
        state = state_of(reduction.codec, outer)
        with pytest.raises(CodecError):
            apply_reduced(state, wrong, reduction, outer)
        assert same_states(state, state_of(reduction.codec, outer))
    with pytest.raises(CodecError):
        reduction.check_shard(sums[1], 2, 0)


@settings(deadline=None, max_examples=75)
@given(
    st.sampled_from(SPECS),
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_mutated_reduced_parts_are_refused_or_finite(spec, edits):
    reduction = Reduction(make_codec(spec, LAYOUT))
    blob = bytearray(reduction.reduce(contributions(reduction.codec, 2), OuterSpec(), 2, 1))
    for at, value in edits:
        blob[at % len(blob)] = value
    try:
        reduction.check_shard(blob, 2, 1)
    except CodecError:
        return
    for _, values in reduction.batches(
        [reduction.reduce(contributions(reduction.codec, 2), OuterSpec(), 2, 0), blob], CPU
    ):
        assert values.isfinite().all() and values.abs().max() <= 2.0**30


@pytest.mark.parametrize("spec", [SPARSE, CodecSpec(kind="none"), CodecSpec(kind="int8")], ids=lambda s: s.kind)
def test_the_largest_values_that_the_decoder_lets_through_can_be_reduced(spec):
    layout = Layout.of({"w": (4096,)})
    reduction = Reduction(make_codec(spec, layout))
    blob = bytearray(reduction.codec.encode({"w": torch.full((4096,), 2.0**29)}))
    if spec.kind == "none":
        blob[HEADER:] = torch.full((4096,), -(2.0**30)).numpy().tobytes()
    elif spec.kind == "sparse":
        blob[HEADER : HEADER + 4] = torch.full((2,), 2.0**30).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    reduction.codec.check(blob)
    sums = reduced(reduction, [Contribution(key(1), 1, blob)], OuterSpec(), 1)
    reduction.check_shard(sums[0], 1, 0)
    assert sum_means(reduction, sums)["w"].abs().max() >= 2.0**28
