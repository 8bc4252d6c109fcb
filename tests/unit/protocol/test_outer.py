"""`apply` means what its docstring says, and its bits depend on nothing but state and updates."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import Codec, make_codec
from protocol.errors import CodecError, MalformedError
from protocol.layout import MOMENTUM, REFERENCE_NORMS, Layout
from protocol.outer import (
    MIN_LIMIT,
    Contribution,
    apply,
    clip_factors,
    clip_limit,
    foreseen_factors,
    greatest_limit,
    mean_weights,
    round_to_fp32,
)
from protocol.spec import CodecSpec, OuterSpec
from protocol.state import state_digest, state_layout
from tests.support.codec_cases import SPECS, dense, every_codec, noise, same_bits
from tests.support.outer_step import OUTERS, contributions, key, same_states, state_of

LAYOUT = Layout.of({"a": (3, 5000), "b": (77,), "c": ()})


def after(codec, outer, updates, **options) -> dict[str, torch.Tensor]:
    state = state_of(codec, outer)
    apply(state, updates, codec, outer, **options)
    return state


def plain_apply(state, updates, codec: Codec, outer: OuterSpec) -> None:
    """Apply the same step in numpy, on whole tensors: an independent implementation that must give the same bits."""
    updates = sorted(updates, key=lambda c: bytes(c.author))
    weights = mean_weights([c.windows for c in updates], outer.weight_cap)
    f = np.float32
    for index, tensor in enumerate(codec.layout.tensors):
        values = [dense(codec, c.blob, index).numpy() for c in updates]
        factors = [1.0] * len(updates)
        if outer.clip == "median":
            norms = [math.sqrt(math.fsum(float(x) * float(x) for x in v)) for v in values]
            limit = clip_limit(norms, [round(w * 2**53) for w in weights], float(state[REFERENCE_NORMS][index]))
            factors = [min(1.0, limit / n) if n else 1.0 for n in norms]
            state[REFERENCE_NORMS][index] = limit
        total, weight = np.zeros(tensor.numel, f), np.zeros(tensor.numel, f)
        for v, w, c in zip(values, weights, factors, strict=True):
            total = total + v * f(w * c)
            weight = weight + (v != 0).astype(f) * f(w)
        if outer.mean == "senders" and not codec.sends_all:
            total = np.where(weight > 0, total / np.where(weight > 0, weight, f(1)), f(0))
        x = state[tensor.name].view(-1).numpy()
        if outer.optimizer == "nesterov":
            m = state[MOMENTUM + tensor.name].view(-1).numpy()
            m[:] = m * f(outer.momentum) + total
            total = total + m * f(outer.momentum)
        x[:] = x - total * f(outer.lr)


@every_codec
@pytest.mark.parametrize("outer", OUTERS, ids=["default", "all", "nesterov"])
def test_apply_gives_the_bits_of_a_plain_implementation(spec, outer):
    codec = make_codec(spec, LAYOUT)
    updates = contributions(codec, 5)
    want = state_of(codec, outer)
    plain_apply(want, updates, codec, outer)
    assert same_states(after(codec, outer, updates), want)


@every_codec
@pytest.mark.parametrize("outer", OUTERS, ids=["default", "all", "nesterov"])
def test_no_order_of_arrival_changes_a_bit(spec, outer):
    codec = make_codec(spec, LAYOUT)
    updates = contributions(codec, 4)
    want = after(codec, outer, updates)
    assert not same_states(want, state_of(codec, outer))
    for order in itertools.islice(itertools.permutations(updates), 1, None, 5):
        assert same_states(after(codec, outer, order), want)


@every_codec
def test_neither_threads_nor_slicing_change_a_bit(spec):
    codec = make_codec(spec, Layout.of({"big": (1500, 1024), "odd": (4097,)}))
    outer = OUTERS[2]
    updates = contributions(codec, 3)
    want = after(codec, outer, updates)
    threads = torch.get_num_threads()
    try:
        for n, limit in ((1, 1), (1, 7), (2, 100), (3, 10_000)):
            torch.set_num_threads(n)
            assert same_states(after(codec, outer, updates, batch_blocks=limit), want)
    finally:
        torch.set_num_threads(threads)


def test_the_bits_stay_what_they_were_released_as():
    """Fixed updates on a fixed state: a change here forks every run from older versions."""
    layout = Layout.of({"w": (128,)})
    ramp = torch.arange(128, dtype=torch.float32)
    got = {}
    for spec in (
        CodecSpec(kind="sparse", k=1024),
        CodecSpec(kind="sign"),
        CodecSpec(kind="int8"),
        CodecSpec(kind="none"),
    ):
        codec = make_codec(spec, layout)
        updates = []
        for i in range(3):
            e = (ramp * (37 + 2 * i) % 128 - 64) / 128
            if spec.kind == "sparse":  # 32 of two magnitudes, so that encoding has nothing to round or choose
                e = torch.where(e.abs() <= 0.125, torch.sign(e) * 0.5 + (ramp % 2) * 0.25 * e.sign(), 0)
                assert e.ne(0).sum() == 32
            updates.append(Contribution(key(i), 1 + i, codec.encode({"w": e})))
        outer = OuterSpec(optimizer="nesterov", lr=0.7)
        state = {"w": ramp * 0.3, MOMENTUM + "w": ramp * 0.7, REFERENCE_NORMS: torch.tensor([1.0])}
        apply(state, updates, codec, outer)
        got[spec.kind] = state_digest(state_layout(layout, outer), state).short
    assert got == {"sparse": "380d4b0e", "sign": "b7ae532b", "int8": "ffdb66f2", "none": "24f1aace"}


def test_a_coordinate_is_the_mean_of_those_who_sent_it():
    layout = Layout.of({"w": (4096,)})
    codec = make_codec(CodecSpec(kind="sparse", k=64), layout)

    def sends(first: int, value: float, windows: int, author: int) -> Contribution:
        e = torch.zeros(4096)
        e[first : first + 64] = value
        return Contribution(key(author), windows, codec.encode({"w": e}))

    updates = [sends(0, 1.0, 1, 1), sends(32, -3.0, 3, 2)]
    state = {"w": torch.zeros(4096)}
    apply(state, updates, codec, OuterSpec(clip="none", weight_cap=1))
    assert (state["w"][:32] == -1).all()
    assert (state["w"][32:64] == -(0.25 - 2.25)).all()
    assert (state["w"][64:96] == 3).all()
    assert not state["w"][96:].any()
    state = {"w": torch.zeros(4096)}
    apply(state, updates, codec, OuterSpec(clip="none", mean="all", weight_cap=1))
    assert (state["w"][:32] == -0.25).all() and (state["w"][64:96] == 2.25).all()


def test_a_zero_that_fills_up_a_block_is_not_sent():
    layout = Layout.of({"w": (4096,)})
    codec = make_codec(CodecSpec(kind="sparse", k=64), layout)
    quiet, loud = torch.zeros(4096), torch.zeros(4096)
    loud[:64] = 8.0
    updates = [Contribution(key(i), 1, codec.encode({"w": e})) for i, e in enumerate((quiet, loud))]
    listed = codec.decode_tensor(updates[0].blob, 0).positions
    assert listed is not None and len(listed) == 64
    state = {"w": torch.zeros(4096)}
    apply(state, updates, codec, OuterSpec(clip="none"))
    assert (state["w"][:64] == -8).all()


def test_nesterov_is_that_of_pytorch():
    codec = make_codec(CodecSpec(kind="none"), LAYOUT)
    outer = OuterSpec(optimizer="nesterov", lr=0.7, momentum=0.9)
    start = noise(LAYOUT, 7)
    state = {n: t.clone() for n, t in start.items()} | {MOMENTUM + n: torch.zeros_like(t) for n, t in start.items()}
    state[REFERENCE_NORMS] = torch.zeros(3)
    parameters = {n: torch.nn.Parameter(t.clone()) for n, t in start.items()}
    sgd = torch.optim.SGD(parameters.values(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(5):
        g = noise(LAYOUT, 50 + step)
        for n, p in parameters.items():
            p.grad = g[n].clone()
        sgd.step()
        apply(state, [Contribution(key(1), 1, codec.encode(g))], codec, outer)
    for n, p in parameters.items():
        torch.testing.assert_close(state[n], p.data, rtol=1e-5, atol=1e-5)


def test_a_round_without_updates_changes_nothing():
    codec = make_codec(CodecSpec(), LAYOUT)
    for outer in OUTERS:
        assert same_states(after(codec, outer, []), state_of(codec, outer))


def test_a_huge_update_moves_the_state_no_further_than_the_median_one():
    codec = make_codec(CodecSpec(kind="sparse", k=256), LAYOUT)
    outer = OuterSpec(weight_cap=0.25)
    honest = [1.0, 1.1, 0.9, 1.05]
    clean = after(codec, outer, contributions(codec, 5, [*honest, 1.0]))
    hit = after(codec, outer, contributions(codec, 5, [*honest, 1e6]))
    start = state_of(codec, outer)
    for name in start:
        assert (hit[name] - start[name]).norm() <= 1.5 * (clean[name] - start[name]).norm()


def limit_of(norms: list[float], reference: float = 0.0, weights: list[int] | None = None) -> float:
    return clip_limit(norms, weights or [1] * len(norms), reference)


def test_the_first_rounds_limit_is_the_lower_median():
    assert limit_of([4, 1, 2]) == 2
    assert limit_of([4, 1]) == 1
    assert limit_of([3, 1, 1e9, 1e9]) == 3
    assert limit_of([3, 1, 1e9, 1e9], weights=[1, 1, 9, 9]) == 3
    assert limit_of([0, 0, 5]) == limit_of([0, 0, 5, 5]) == limit_of([0, 0, 5], weights=[1, 1, 9]) == 0
    assert limit_of([5]) == 5
    assert limit_of([1e300]) == float(torch.finfo(torch.float32).max)


def test_a_limit_is_within_a_factor_two_of_the_one_before():
    assert limit_of([5], 4) == 5
    assert limit_of([1e30], 4) == 8
    assert limit_of([1e30, 1e30, 1], 4) == 8
    assert limit_of([0, 0, 5], 4) == 2
    for nothing in (0.0, -1.0, math.nan):
        assert limit_of([5], nothing) == 5


@pytest.mark.parametrize("lie", [0.0, 1e-3, 1e30])
@pytest.mark.parametrize("liars, weights", [(5, [8, 8, 8, 1, 1, 1, 1, 1]), (2, [8, 8, 8, 90, 90])])
def test_neither_many_keys_with_little_weight_nor_few_with_most_move_a_limit_beyond_the_other_norms(
    liars, weights, lie
):
    honest, reference = [3.0, 4.0, 5.0], 4.5
    for _ in range(50):
        reference = limit_of(honest + [lie] * liars, reference, weights)
    assert 3 <= reference <= 5


@given(st.lists(st.tuples(st.floats(0, 1e30), st.integers(1, 9)), min_size=1, max_size=9), st.floats(1e-9, 1e30))
def test_a_limit_is_a_lower_median_by_number_or_by_weight_or_between_them(updates, reference):
    norms, weights = zip(*updates, strict=True)
    repeated = sorted(norm for norm, weight in updates for _ in range(weight))
    low, high = sorted(each[(len(each) - 1) // 2] for each in (sorted(norms), repeated))
    assert clip_limit(norms, weights) == (max(low, MIN_LIMIT) if low else 0)
    got = clip_limit(norms, weights, reference)
    assert got == max(min(max(min(max(reference, low), high), reference / 2), 2 * reference), MIN_LIMIT)


@given(st.lists(st.tuples(st.floats(0, 1e30), st.integers(1, 9)), min_size=1, max_size=9), st.floats(1e-9, 1e30))
def test_no_limit_exceeds_what_its_reference_foresees(updates, reference):
    norms, weights = zip(*updates, strict=True)
    assert clip_limit(norms, weights, reference) <= greatest_limit(reference)
    assert greatest_limit(0.0) == greatest_limit(math.nan) == 0


def test_an_update_is_brought_to_what_its_reference_foresees_and_otherwise_stays():
    codec = make_codec(CodecSpec(kind="sign"), LAYOUT)
    blob = bytes(codec.encode(noise(LAYOUT, 1)))
    norms = [math.sqrt(e) for e in codec.sum_squares(blob)]
    a, b, c = (norms[0] / 2, norms[1] / 8, 0.0)
    assert foreseen_factors(blob, codec, torch.tensor([a * 1.001, b, c])) == pytest.approx([1.0, 0.25, 0.0])
    assert foreseen_factors(blob, codec, torch.tensor([a * 1.001, b, c]))[0] == 1.0


def test_a_reference_never_shrinks_to_nothing():
    reference = 1.0
    for _ in range(1000):
        reference = limit_of([0.0, 0.0, 1.0], reference)
    assert reference == MIN_LIMIT
    for _ in range(24):
        reference = limit_of([1.0], reference)
    assert reference == 1.0


@pytest.mark.parametrize("newcomers, windows", [(4, 4), (12, 2)])
def test_newcomers_that_send_nothing_do_not_freeze_the_model(newcomers, windows):
    """For 20 rounds newcomers that are half of the authors, or most, send zeros. The others learn on."""
    layout = Layout.of({"a": (3, 5000), "b": (77,)})
    codec, outer = make_codec(CodecSpec(kind="none"), layout), OuterSpec(weight_cap=1)
    zeros = bytes(codec.encode({t.name: torch.zeros(t.shape) for t in layout.tensors}))
    honest = [replace(c, windows=8) for c in contributions(codec, 4, [1.0] * 4)]
    idle = [Contribution(key(100 + i), windows, zeros) for i in range(newcomers)]
    state = {t.name: torch.zeros(t.shape) for t in layout.tensors} | {REFERENCE_NORMS: torch.zeros(2)}
    apply(state, honest, codec, outer)
    first = {n: t.clone() for n, t in state.items()}
    for round_ in range(20):
        if round_ == 10:
            before = {n: t.clone() for n, t in state.items()}
        apply(state, [*honest, *idle], codec, outer)
    share = 4 * 8 / (4 * 8 + newcomers * windows)
    for t in layout.tensors:
        moved = (state[t.name] - before[t.name]).norm()
        assert moved >= 0.9 * 10 * share * first[t.name].norm()


def test_clipping_brings_norms_down_to_the_limit():
    assert clip_factors([1, 2, 4], 2) == [1, 1, 0.5]
    assert clip_factors([0, 5], 0) == [1, 0]


def test_half_of_the_updates_cannot_raise_the_norm_of_a_round():
    codec, outer = make_codec(CodecSpec(kind="none"), LAYOUT), OuterSpec()
    start = state_of(codec, outer) | {REFERENCE_NORMS: torch.zeros(3)}
    for honest, liars in (([1.0, 1.0], 2), ([1.0], 1)):
        state = {n: t.clone() for n, t in start.items()}
        updates = contributions(codec, len(honest) + liars, honest + [1e6] * liars)
        apply(state, updates, codec, outer)
        norms = [[math.sqrt(e) for e in codec.sum_squares(u.blob)] for u in updates[: len(honest)]]
        for tensor, largest in zip(LAYOUT.tensors, map(max, zip(*norms, strict=True)), strict=True):
            assert (state[tensor.name] - start[tensor.name]).norm() <= 1.0001 * largest


def test_a_sole_update_at_most_doubles_what_a_round_may_change():
    codec, outer = make_codec(CodecSpec(kind="none"), LAYOUT), OuterSpec()
    state = state_of(codec, outer) | {REFERENCE_NORMS: torch.tensor([2.0, 3.0, 5.0])}
    for limits in ([4.0, 6.0, 10.0], [8.0, 12.0, 20.0]):
        before = {n: t.clone() for n, t in state.items()}
        apply(state, contributions(codec, 1, [1e6]), codec, outer)
        assert state[REFERENCE_NORMS].tolist() == limits
        for tensor, limit in zip(LAYOUT.tensors, limits, strict=True):
            moved = (state[tensor.name] - before[tensor.name]).norm().item()
            assert moved == pytest.approx(limit, rel=1e-4)


def test_the_first_rounds_norms_are_the_first_references():
    codec, outer = make_codec(CodecSpec(kind="none"), LAYOUT), OuterSpec()
    state = state_of(codec, outer) | {REFERENCE_NORMS: torch.zeros(3)}
    updates = contributions(codec, 3)
    apply(state, updates, codec, outer)
    energies = zip(*(codec.sum_squares(u.blob) for u in updates), strict=True)
    median = [math.sqrt(sorted(each)[1]) for each in energies]
    assert state[REFERENCE_NORMS].tolist() == pytest.approx(median, rel=1e-7)


def test_the_references_change_with_the_state_only_and_without_them_there_is_no_round():
    codec, outer = make_codec(CodecSpec(), LAYOUT), OuterSpec()
    state = state_of(codec, outer)
    del state[REFERENCE_NORMS]
    with pytest.raises(MalformedError, match=REFERENCE_NORMS):
        apply(state, contributions(codec, 2), codec, outer)


def test_a_tensor_that_most_updates_leave_alone_stays():
    codec = make_codec(CodecSpec(kind="sparse", k=256), LAYOUT)
    outer = OuterSpec()
    quiet = {t.name: torch.zeros(t.shape) for t in LAYOUT.tensors}
    updates = contributions(codec, 3)
    for i in (0, 1):
        updates[i] = Contribution(key(i), 1, codec.encode(quiet))
    state = state_of(codec, outer) | {REFERENCE_NORMS: torch.zeros(3)}
    apply(state, updates, codec, outer)
    assert same_states(state, state_of(codec, outer) | {REFERENCE_NORMS: torch.zeros(3)})


@every_codec
def test_norms_are_exact(spec):
    codec = make_codec(spec, LAYOUT)
    blob = codec.encode(noise(LAYOUT, 3, 1e-3))
    for index in range(len(LAYOUT.tensors)):
        exact = sum((Fraction(x) ** 2 for x in dense(codec, blob, index).tolist()), Fraction())
        got = codec.sum_squares(blob)[index]
        assert abs(Fraction(got) - exact) <= exact * Fraction(1, 2**48)


@given(st.lists(st.integers(1, 2**53), min_size=1, max_size=20), st.floats(1e-3, 1))
def test_shares_keep_the_cap_the_order_and_the_proportions(windows, cap):
    got = mean_weights(windows, cap)
    assert math.isclose(sum(got), 1, rel_tol=1e-12)
    if len(windows) * Fraction(cap) <= 1:
        assert got == [1 / len(windows)] * len(windows)
        return
    assert max(got) <= cap * (1 + 1e-12)
    free = [(w, s) for w, s in zip(windows, got, strict=True) if s < cap * (1 - 1e-9)]
    for (w1, s1), (w2, s2) in itertools.pairwise(free):
        assert math.isclose(s1 * w2, s2 * w1, rel_tol=1e-9)
    ordered = sorted(zip(windows, got, strict=True))
    assert all(a[1] <= b[1] * (1 + 1e-12) for a, b in itertools.pairwise(ordered))


def test_shares_without_a_cap_are_by_windows():
    assert mean_weights([1, 3], 1.0) == [0.25, 0.75]
    assert mean_weights([1, 1, 8], 0.5) == [0.25, 0.25, 0.5]
    assert mean_weights([10, 1, 8], 0.4) == pytest.approx([0.4, 0.2, 0.4], rel=1e-15)
    with pytest.raises(CodecError, match="no windows"):
        mean_weights([1, 0], 1.0)


def test_two_updates_by_one_author_are_refused():
    codec = make_codec(CodecSpec(), LAYOUT)
    one = contributions(codec, 1)
    with pytest.raises(CodecError, match="one author"):
        after(codec, OuterSpec(), one * 2)


def test_what_does_not_belong_to_the_run_is_refused_before_the_state_changes():
    codec, outer = make_codec(CodecSpec(), LAYOUT), OuterSpec(optimizer="nesterov")
    updates = contributions(codec, 3)
    other = make_codec(CodecSpec(kind="sparse", k=128), LAYOUT)
    for bad in (updates[2].blob[:-1], bytes(other.encode(noise(LAYOUT)))):
        state = state_of(codec, outer)
        with pytest.raises(CodecError):
            apply(state, [*updates[:2], Contribution(key(9), 1, bad)], codec, outer)
        assert same_states(state, state_of(codec, outer))
    state = state_of(codec, outer)
    del state[MOMENTUM + "c"]
    with pytest.raises(MalformedError, match="outer_momentum/c"):
        apply(state, updates, codec, outer)


def test_a_hostile_scale_never_makes_the_state_infinite():
    """Twenty rounds of the largest values that the decoder lets through, from everyone, amplified by momentum."""
    layout = Layout.of({"w": (4096,)})
    codec, outer = make_codec(CodecSpec(kind="none"), layout), OuterSpec(optimizer="nesterov", lr=10, momentum=0.99)
    blob = codec.header + (torch.full((4096,), 2.0**30)).numpy().tobytes()
    codec.check(blob)
    state = {"w": torch.zeros(4096), MOMENTUM + "w": torch.zeros(4096), REFERENCE_NORMS: torch.zeros(1)}
    for _ in range(20):
        apply(state, [Contribution(key(i), 1, blob) for i in range(3)], codec, outer)
    assert all(t.isfinite().all() for t in state.values())


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(SPECS),
    st.sampled_from(OUTERS),
    st.lists(st.tuples(st.integers(1, 1000), st.floats(-20, 6)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_any_round_gives_the_bits_of_a_plain_implementation_in_any_order(spec, outer, peers, random):
    layout = Layout.of({"v": (130,), "w": (64, 65)})
    codec = make_codec(spec, layout)
    updates = [
        Contribution(key(i), windows, codec.encode(noise(layout, i, 10**power)))
        for i, (windows, power) in enumerate(peers)
    ]
    want = state_of(codec, outer)
    plain_apply(want, updates, codec, outer)
    random.shuffle(updates)
    assert same_states(after(codec, outer, updates), want)


def test_fp32_rounds_to_nearest():
    assert round_to_fp32(0.1) == float(np.float32(0.1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CPU and CUDA cannot be compared")
@every_codec
@pytest.mark.parametrize("outer", OUTERS, ids=["default", "all", "nesterov"])
def test_a_gpu_gives_the_bits_of_a_cpu(spec, outer):
    codec = make_codec(spec, Layout.of({"big": (1500, 1024), "odd": (4097,), "tiny": ()}))
    updates = contributions(codec, 4, [1.0, 1e3, 1e-12, 1e-18])
    want = after(codec, outer, updates)
    state = {n: t.cuda() for n, t in state_of(codec, outer).items()}
    apply(state, updates, codec, outer)
    assert same_states(state, want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CPU and CUDA cannot be compared")
@every_codec
def test_a_gpu_encodes_what_a_cpu_decodes(spec):
    codec = make_codec(spec, LAYOUT)
    e = {n: t.cuda() for n, t in noise(LAYOUT).items()}
    blob = codec.encode(e)
    codec.check(blob)
    for index, tensor in enumerate(LAYOUT.tensors):
        want = noise(LAYOUT)[tensor.name].view(-1) - dense(codec, blob, index)
        assert same_bits(want, e[tensor.name].cpu())
