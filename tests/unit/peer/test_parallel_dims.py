"""The possible layouts, the choice among them, and the error for an impossible one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import TrainingError
from peer.training.parallel.parallel_dims import (
    USABLE,
    ModelLimits,
    ParallelDims,
    check,
    choose,
    layouts,
    memory,
    rejection,
)
from peer.training.parallel.plans import first_layers, limits, stage_of
from tests.support.specs import TINY_LLAMA, TINY_LLAMA_TENSORS, tiny_spec

GIB = 2**30
counts = st.integers(1, 16)
some_limits = st.builds(
    lambda parameters, **fields: ModelLimits("llama", parameters, 16 * parameters, 12 * parameters, **fields),
    parameters=st.integers(10**6, 10**11),
    batch=st.integers(1, 64),
    tp=st.sampled_from([1, 2, 4, 8, 12]),
    pp=st.integers(1, 40),
)


@given(st.builds(ParallelDims, counts, counts, counts, counts))
def test_degrees_are_read_as_they_are_written(degrees):
    if degrees.world <= 64:
        assert ParallelDims.parse(str(degrees)) == degrees


NONE = ["", "fsdp", "fsdp=0", "fsdp=-1", "fsdp=2,fsdp=2", "ep=2", "dp=2;tp=2", "dp=\u0661", "dp=99", "zero=2", "dp=1e1"]


@pytest.mark.parametrize("text", [*NONE, "fsdp=2,zero=1"])
def test_what_is_no_layout_is_refused_with_an_example(text):
    with pytest.raises(TrainingError, match=r"--parallel .*fsdp=4"):
        ParallelDims.parse(text)


@given(st.integers(1, 32), some_limits)
def test_every_layout_that_is_listed_works_and_every_other_is_refused_with_that_list(world, limits):
    works = layouts(world, limits)
    assert len(set(works)) == len(works)
    for degrees in works:
        assert check(degrees, world, limits) == degrees and degrees.world == world
    for tp in range(1, 5):
        other = ParallelDims(dp=2, tp=tp)
        if other not in works:
            with pytest.raises(TrainingError) as refused:
                check(other, world, limits)
            assert "\n" not in str(refused.value)
            named = re.findall(r"(?:[a-z]+=\d+,?)+", str(refused.value).partition("these work")[2])
            assert all(ParallelDims.parse(n.strip(",")) in works for n in named)
            assert bool(named) == bool(works)


@given(st.integers(1, 16), st.integers(1, 200), st.sampled_from(["nvlink", "pcie"]), some_limits)
def test_what_is_chosen_works_and_fits_or_nothing_does(world, gib, link, limits):
    try:
        best, why = choose(world, gib * GIB, link, limits)
    except TrainingError as e:
        assert "\n" not in str(e)
        fits = [d for d in layouts(world, limits) if memory(d, limits) <= gib * GIB * USABLE]
        assert not fits
        return
    assert not rejection(best, world, limits) and "\n" not in why
    assert memory(best, limits) <= gib * GIB * USABLE


@given(st.builds(ParallelDims, *[st.integers(1, 4)] * 4))
def test_ranks_stand_at_distinct_places_and_shares_are_evenly_many(degrees):
    places = [tuple(degrees.coordinates(r).items()) for r in range(degrees.world)]
    assert len(set(places)) == degrees.world
    shares = [degrees.share(r) for r in range(degrees.world)]
    assert {shares.count(s) for s in range(degrees.shares)} == {degrees.tp * degrees.pp}


def chosen(world: int, gib: int, link, billions: float, **more) -> str:
    fields = {"batch": 64, "tp": 8, "pp": 32} | more
    n = int(billions * 10**9)
    return str(choose(world, gib * GIB, link, ModelLimits("llama", n, 16 * n, 12 * n, **fields))[0])


def test_the_choice_is_as_little_splitting_as_fits():
    assert chosen(1, 24, "pcie", 0.5) == "dp=1"
    assert chosen(8, 80, "nvlink", 1) == "dp=8"
    assert chosen(8, 80, "nvlink", 7) == "dp=4,fsdp=2"
    assert chosen(8, 80, "nvlink", 14) == "fsdp=8"
    assert chosen(4, 24, "pcie", 1.2) == "dp=2,fsdp=2,zero=2"
    # Windows are too few to share: NVLink makes tp cheap, PCIe does not.
    assert chosen(8, 80, "nvlink", 7, batch=1) == "tp=8"
    assert chosen(8, 80, "pcie", 7, batch=1) == "pp=8"


def test_too_little_memory_for_any_layout_is_one_line_with_the_numbers():
    with pytest.raises(TrainingError, match=r"GiB a GPU is the least that 70,000,000,000 parameters need on 8"):
        chosen(8, 80, "nvlink", 70)


def tiny(**config) -> ModelLimits:
    spec = tiny_spec(model={"config": TINY_LLAMA | config, "tensors": TINY_LLAMA_TENSORS})
    return limits(spec, "cuda", offloads=False)


def test_a_model_says_what_it_allows():
    untied = tiny(tie_word_embeddings=False)
    assert (untied.tp, untied.pp, untied.no_tp, untied.no_pp) == (2, 2, "", "")
    with pytest.raises(TrainingError, match="tied embeddings.*these work: dp=2; fsdp=2; tp=2$"):
        check(ParallelDims(pp=2), 2, tiny())
    with pytest.raises(TrainingError, match="no plan for model_type gpt2.*these work: dp=2; fsdp=2$"):
        check(ParallelDims(tp=2), 2, tiny(model_type="gpt2"))
    with pytest.raises(TrainingError, match="tp must divide 2"):
        check(ParallelDims(tp=4), 4, tiny())


@given(st.integers(1, 40), st.integers(1, 8))
def test_stages_have_the_layers_in_order_and_evenly(layers, stages):
    if stages > layers:
        return
    held = [stage_of(f"model.layers.{n}.mlp.up_proj.weight", layers, stages) for n in range(layers)]
    assert held == sorted(held) and set(held) == set(range(stages))
    sizes = [held.count(s) for s in range(stages)]
    assert max(sizes) - min(sizes) <= 1
    assert [held.index(s) for s in range(stages)] == first_layers(layers, stages)[:-1]
    assert stage_of("model.embed_tokens.weight", layers, stages) == 0
    assert {stage_of(n, layers, stages) for n in ("model.norm.weight", "lm_head.weight")} == {stages - 1}
