"""The comparison of methods: its simulations agree with what they stand for, and its arithmetic is right."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.convergence import blocks, job, links, measure, tables, tuning
from benchmarks.convergence.corpus import Corpus
from benchmarks.convergence.fleet import Fleet
from benchmarks.convergence.goals import gap, judged
from benchmarks.convergence.job import Job, Result
from benchmarks.convergence.local_steps import Alone, DeMo, DiLoCo, dct_matrix
from benchmarks.convergence.method import Method
from benchmarks.convergence.replica import Replica, split
from benchmarks.convergence.setting import PROFILES, Setting
from benchmarks.convergence.studies import BASE, MAIN, OWN_ROWS, SIGNS, STATELESS, STUDIES, Row
from benchmarks.convergence.swarm import Cairn
from benchmarks.convergence.synchronous import PowerSGD, Synchronous
from benchmarks.convergence.variants import Choice, Variant, aggregate
from protocol.blob_sizes import HEADER
from protocol.codec import make_codec
from protocol.spec import CodecSpec
from tests.support.long_cases import long_cases

LR = 4e-3


@pytest.fixture(scope="module")
def setting() -> Setting:
    """Four peers on random tokens of which every second one repeats the one before: something to learn."""
    draw = np.random.default_rng(0).integers(0, 512, 40_000).astype(np.uint16)
    tokens = np.repeat(draw, 2)
    corpus = Corpus(tokens, tokens[:2_000], tuple(tokens[i * 9_000 : (i + 1) * 9_000] for i in range(4)), None)
    return Setting(replace(PROFILES["tiny"], steps=12, batch=2), 0, corpus)


def trained(method: Method, steps: int = 12) -> Method:
    for number in range(steps):
        method.step(number)
    method.finish()
    return method


def apart(setting: Setting, one: Method, other: Method) -> float:
    """Return the distance of two trained states, relative to the first one's distance from the start."""
    start = Replica(setting, LR).flat
    return float((one.state() - other.state()).norm() / (one.state() - start).norm())


def test_the_sparse_variant_is_what_the_codec_and_the_outer_step_do(setting: Setting):
    ours = trained(Cairn(setting, LR, h=4, k=64))
    variant = trained(Variant(setting, LR, h=4, k=64))
    # Rounding decides which of two nearly equal coordinates is sent, so a few are sent by one of them only.
    assert apart(setting, ours, variant) < 0.05
    assert ours.exchanges == variant.exchanges == 3
    headers = 3 * HEADER
    assert ours.payload == variant.payload + headers


@pytest.mark.long
def test_the_studies_base_is_what_the_trainer_does(setting: Setting):
    ours = trained(Cairn(setting, LR, **{**STATELESS, "h": 4}))
    variant = trained(Variant(setting, LR, **{**BASE, "h": 4}))
    # The sign of what is nearly nothing is rounding's.
    assert apart(setting, ours, variant) < 0.05
    assert ours.payload == variant.payload + 3 * HEADER


def test_an_update_is_counted_as_many_bytes_as_it_has(setting: Setting):
    codec = make_codec(CodecSpec(kind="sparse", k=256), setting.layout)
    ours = trained(Cairn(setting, LR, h=6, k=256))
    assert ours.payload == 2 * codec.size
    assert ours.up == 3 * 2 * codec.size


@pytest.mark.parametrize("changes", long_cases({**SIGNS, "h": 4}, {"h": 4, "k": 256}), ids=["signs", "largest"])
def test_reduced_rounds_lead_nearly_where_gathered_ones_do_for_their_own_bytes(setting: Setting, changes):
    gathered = trained(Cairn(setting, LR, **changes))
    ours = Cairn(setting, LR, **changes, reduce=True)
    trained(ours)
    assert 0 < apart(setting, gathered, ours) < 0.25  # norms are of parts, too
    assert ours.reduction is not None
    assert ours.payload == gathered.payload
    assert ours.up == 3 * (3 * ours.codec.size + sum(ours.reduction.size(4, shard) for shard in range(4)))


@pytest.mark.parametrize("width", [1, 64, 2816, 4096])
@pytest.mark.parametrize("k", [64, 256, 4096])
def test_records_are_as_large_as_the_codecs(setting: Setting, width: int, k: int):
    codec = make_codec(CodecSpec(kind="sparse", k=k), setting.layout)
    assert blocks.block_bytes(width, k, "2 levels") == codec.encoded_size(width)


def test_diloco_of_one_peer_with_a_plain_outer_step_is_that_peer_alone(setting: Setting):
    single = replace(setting, profile=replace(setting.profile, peers=1))
    diloco = trained(DiLoCo(single, LR, h=4, outer_lr=1.0, momentum=0.0))
    assert apart(single, diloco, trained(Alone(single, LR))) < 0.01


@pytest.mark.long
def test_diloco_with_a_plain_outer_step_is_cairn_without_compression(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Setting, "factor", lambda self, done: 0.5)  # else one warms up by step, the other by round
    diloco = trained(DiLoCo(setting, LR, h=4, outer_lr=1.0, momentum=0.0))
    ours = trained(Cairn(setting, LR, h=4, kind="none", beta=0.0, outer={"clip": "none"}))
    assert apart(setting, diloco, ours) < 1e-4


def test_powersgd_of_full_rank_is_the_mean(setting: Setting):
    full = PowerSGD(setting, rank=172, least_saved=-math.inf)
    gradients = torch.randn(4, setting.layout.numel)
    assert torch.allclose(full.mean(gradients), gradients.mean(0), atol=1e-3)


def test_what_powersgd_leaves_out_comes_later(setting: Setting):
    low = PowerSGD(setting, rank=2)
    pull = torch.randn(1, setting.layout.numel).repeat(4, 1)
    summed = sum(low.mean(pull) for _ in range(60)) / 60
    once = PowerSGD(setting, rank=2).mean(pull)
    assert (summed - pull[0]).norm() < 0.5 * (once - pull[0]).norm()


def test_demo_that_keeps_every_coefficient_steps_by_the_sign_of_all_momentum(setting: Setting):
    demo = DeMo(setting, 1e-3, k=4096, weight_decay=0.0)
    before = demo.state().clone()
    demo.step(0)
    rate = 1e-3 * setting.factor(0.5 / setting.profile.steps)
    moved = (before - demo.state()).abs()
    assert torch.allclose(moved[moved > rate / 2], torch.tensor(rate), rtol=1e-2)
    assert float(demo.momentum.abs().max()) < 1e-5


@pytest.mark.long
def test_fp16_gradients_train_as_exact_ones_do(setting: Setting):
    exact, half = trained(Synchronous(setting, LR)), trained(Synchronous(setting, LR, wire="fp16"))
    assert apart(setting, exact, half) < 0.05
    assert exact.payload == half.payload == 2 * 12 * setting.layout.numel


@pytest.mark.parametrize("kind", ["dct", "hadamard"])
def test_a_transform_keeps_norms_and_comes_back(kind: str):
    rows = torch.randn(3, 4096)
    there = blocks.transformed(rows, kind)
    assert torch.allclose(there.norm(dim=1), rows.norm(dim=1), rtol=1e-4)
    assert torch.allclose(blocks.transformed(there, kind, back=True), rows, atol=1e-4)
    assert torch.allclose(dct_matrix(64) @ dct_matrix(64).T, torch.eye(64), atol=1e-5)


def test_more_bits_leave_less_error():
    values, generator = torch.randn(8, 64), torch.Generator().manual_seed(0)
    error = {kind: float((blocks.quantised(values, kind, generator) - values).norm()) for kind in blocks.QUANTISERS}
    assert error["1 mean"] > error["2 levels"] > error["3 levels"] > error["4 levels"] > error["fp32"] == 0
    assert error["2 dithered"] > error["2 levels"] < error["2 max"]


def after_one_round(setting: Setting, **choice) -> tuple[Tensor, Tensor, Tensor]:
    """Return the start, each peer's own parameters when it announced, and the state that the round made of them."""
    method = Variant(setting, LR, h=4, k=4096, quantiser="fp32", beta=0.0, clip=False, overlap=1, **choice)
    start = method.state().clone()
    for number in range(4):
        method.step(number)
    own = method.fleet.flat.clone()
    for number in (4, 5):
        method.step(number)
    return start, own, method.state()


@pytest.mark.long
def test_a_restored_mean_has_the_mean_of_the_norms_in_each_tensor(setting: Setting):
    start, own, state = after_one_round(setting, restore=True)
    _, _, plain = after_one_round(setting)
    for t, moved, mean in zip(
        setting.layout.tensors,
        *(split(setting.layout, x).values() for x in (state - start, plain - start)),
        strict=True,
    ):
        norms = [split(setting.layout, peer - start)[t.name].norm() for peer in own]
        assert float(moved.norm()) == pytest.approx(float(torch.stack(norms).mean()), rel=1e-3)
        if float(mean.norm()):
            assert torch.cosine_similarity(moved.flatten(), mean.flatten(), dim=0) > 0.999


@pytest.mark.long
def test_a_missed_update_is_in_its_authors_feedback_until_one_is_accepted(setting: Setting):
    choice = {"h": 2, "k": 4096, "quantiser": "fp32", "beta": 0.5, "clip": False}
    method = Variant(setting, LR, misses=0.5, **choice)
    held = set()
    for number in range(12):
        method.step(number)
        has_more = method.e.abs().sum(1) > 0
        assert not (has_more & (method.owed[0] == 0)).any()
        held.add(int(has_more.sum()))
    assert len(held) > 1
    never = Variant(setting, LR, misses=0.5, returns="never", **choice)
    assert not trained(never).e.any()


@pytest.mark.long
def test_each_fragment_of_a_stream_is_clipped_to_its_own_norms(setting: Setting):
    method = Variant(setting, LR, h=4, k=4096, fragments=4, overlap=1)
    trained(method)
    assert method.limits.keys() == {0, 1, 2, 3}
    of_each = torch.stack(list(method.limits.values()))
    assert (of_each > 0).any(0).all() and not (of_each > 0).all()  # small tensors are in one of them


def test_of_the_first_rounds_one_peers_update_alone_may_count(setting: Setting):
    _, own, state = after_one_round(setting, lead=1)
    assert torch.allclose(state, own[0], atol=1e-6)
    _, own, state = after_one_round(setting)
    assert torch.allclose(state, own.mean(0), atol=1e-6)


def test_an_outer_rate_holds_from_its_share_of_the_training_on(setting: Setting):
    start, own, state = after_one_round(setting, outer_late=((0.3, 0.5),))
    assert torch.allclose(state - start, 0.5 * (own.mean(0) - start), atol=1e-6)


def test_another_momentum_of_muon_takes_other_steps(setting: Setting):
    _, one, _ = after_one_round(setting, inner="muon")
    _, other, _ = after_one_round(setting, inner="muon", muon_momentum=0.5)
    assert not torch.allclose(one, other, atol=1e-4)


def test_a_training_that_stops_early_keeps_the_schedule_of_the_whole(setting: Setting):
    whole = replace(setting, profile=replace(setting.profile, steps=100))
    start = replace(setting, profile=replace(setting.profile, steps=25, planned=100))
    assert start.factor(1.0) == whole.factor(0.25) > whole.factor(1.0)


def test_a_swarm_of_volunteers_trains_as_many_tokens_as_a_clean_one(setting: Setting):
    people = {"speeds": (1.0, 0.5, 0.25, 0.125), "own_data": True, "churn": 0.3, "late": 1}
    swarm = Cairn(setting, LR, h=2, conditions=people)
    trained(swarm)
    assert swarm.accepted >= 12 * 2 * 4
    assert len(swarm.peers) == 4
    assert torch.isfinite(swarm.state()).all()


def test_overlap_applies_later_and_loses_nothing(setting: Setting):
    plain = Cairn(setting, LR, h=4, kind="none", beta=1.0)
    late = Cairn(setting, LR, h=4, kind="none", beta=1.0, overlap=2)
    trained(plain)
    trained(late)
    assert late.accepted == plain.accepted
    assert late.exchanges < plain.exchanges


def test_aggregates_that_stand_hostile_updates_follow_the_honest():
    one = torch.zeros(1, dtype=torch.long)
    honest = torch.tensor([[[1.0, -2.0]], [[1.0, 2.0]], [[1.0, -2.0]]])
    updates = torch.cat([honest, torch.full((1, 1, 2), 1000.0)])
    still = torch.zeros(1, 2)
    assert aggregate("majority", honest, still, one, 1).tolist() == [[1.0, -2.0]]
    assert aggregate("trimmed", updates, still, one, 1).tolist() == [[1.0, 0.0]]
    centred = aggregate("centred", updates, still, one, 1)  # four of the median length, sqrt(5), one of them (1, 1)
    assert centred[0, 0] == pytest.approx((3 + 5**0.5 / 2**0.5) / 4)
    assert aggregate("centred", honest, honest[0], one, 1).tolist() == honest[0].tolist()
    with pytest.raises(ValueError, match="want mean, majority"):
        aggregate("best", honest, still, one, 1)


def test_a_quarter_of_hostile_peers_shortens_the_mean_and_not_the_majority(setting: Setting):
    def moved(**how) -> torch.Tensor:
        tried = Variant(setting, LR, **{**BASE, "h": 1, "outer_lr": 1.0, **how})
        first = tried.state().clone()
        tried.step(0)
        return tried.state() - first

    honest = moved()
    mean, majority = (float(moved(hostile=0.25, aggregation=how) @ honest) for how in ("mean", "majority"))
    assert 0 < mean < float(honest @ honest) and majority > mean


def test_every_row_of_every_study_is_of_a_method_and_its_options(setting: Setting):
    rows = [*MAIN, *(r for study in (*STUDIES.values(), *OWN_ROWS.values()) for r in study)]
    for row in rows:
        if row.method == "variant":
            Choice(**row.options)
        else:
            assert isinstance(job.METHODS[row.method](setting, LR, **row.options), Method)
    labels = [r.label for r in MAIN]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(("optimizer", "most"), [("adamw", 1e-3), ("muon", 1e-2)])  # Muon's iterations magnify rounding
def test_a_fleet_steps_as_its_peers_would_alone(setting: Setting, optimizer: str, most: float):
    fleet = Fleet(setting, LR, 4, optimizer)
    alone = [Replica(setting, LR, optimizer=optimizer) for _ in range(4)]
    start = fleet.row(0).clone()
    for number in range(5):
        windows = setting.global_batch(number)
        fleet.step(windows, 0.5)
        for replica, own in zip(alone, windows, strict=True):
            replica.step(own, 0.5)
    for peer, replica in enumerate(alone):
        # As a whole: where a gradient is all rounding, AdamW's first steps make of it what they like.
        assert (fleet.row(peer) - replica.flat).norm() < most * (replica.flat - start).norm()


def test_muon_moves_hidden_matrices_its_own_way_and_all_else_as_adamw(setting: Setting):
    fleets = [Fleet(setting, LR, 2, kind) for kind in ("adamw", "muon")]
    for fleet in fleets:
        fleet.step(setting.global_batch(0)[:2], 1.0)
    for name, adamw in fleets[0].tensors(1).items():
        same = torch.allclose(adamw, fleets[1].tensors(1)[name], atol=1e-6)
        assert same == (adamw.ndim < 2 or "embed" in name)


# -- the search ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [-5, -3, -1, 0, 2, 3, 5])
def test_the_search_finds_a_rate_with_worse_neighbours(at: int):
    found: dict[int, float] = {}
    while wanted := tuning.missing(found):
        found |= {e: abs(e - at) + 1.0 for e in wanted}
    assert tuning.best(found) == at


def test_a_search_in_which_all_diverge_says_so():
    with pytest.raises(ValueError, match="diverged"):
        tuning.best({-1: math.inf, 0: math.inf})


# -- bytes into seconds, results into tables -------------------------------------------------------------------


def test_seconds_are_compute_bytes_and_round_trips():
    assert links.seconds(10, 0.5, 12_500_000, 3, 100) == pytest.approx(5 + 1 + 0.6)


def test_a_crossing_lies_between_two_points():
    curve = [[0, 6.0, 0, 0, 0], [100, 4.0, 10, 20, 2], [200, 3.0, 20, 40, 4]]
    assert links.crossing(curve, 5.0) == [50, 5, 10, 1]
    assert links.crossing(curve, 7.0) == [0, 0, 0, 0]
    assert links.crossing(curve, 2.0) is None


def _measured(label: str, method: str, loss: float, payload: float, seeds: int = 3, **options) -> measure.Measured:
    curve = [[0, 6.0, 0, 0, 0], [1000, loss, payload, payload, 100]]
    row = Row(label, method, options)
    result = Result(Job("tiny", method), loss, 1000, payload, payload, 100, 10.0, curve)
    return measure.Measured(row, 1e-3, {}, dict.fromkeys(range(seeds), result))


def test_the_goals_are_judged_by_the_rows():
    profile, parameters = PROFILES["tiny"], 131_904
    full = 2.0 * parameters * profile.steps
    found = [
        _measured("data-parallel AdamW, bf16", "synchronous", 3.0, full),
        _measured("cheap", "cairn", 3.02, full / 1000),
        _measured("dear", "cairn", 3.0, full / 100),
        _measured("data-parallel Muon", "synchronous", 2.8, full, optimizer="muon"),
        _measured("cheap Muon", "cairn", 2.95, full / 1000, inner="muon"),
    ]
    by_muon, by_adamw = judged(found, profile, parameters)
    assert not by_muon["met"] and "+5.36%" in by_muon["value"] and "cheap Muon" in by_muon["value"]
    assert by_adamw["met"] and "cheap Muon" in by_adamw["value"]
    worse = [found[0], _measured("cheap", "cairn", 3.04, full / 1000, inner="muon")]
    assert [g["met"] for g in judged(worse, profile, parameters)] == [None, False]
    assert [row[0] for row in tables.main_rows(found, profile, parameters)] == [m.row.label for m in found]


@pytest.mark.parametrize(("name", "met"), [("tiny", False), ("many", True)])
def test_sixteen_peers_may_be_two_per_cent_behind_and_four_one(name: str, met: bool):
    profile, parameters = PROFILES[name], 131_904
    full = 2.0 * parameters * profile.steps
    found = [
        _measured("data-parallel Muon", "synchronous", 2.0, full, optimizer="muon"),
        _measured("the default", "cairn", 2.03, full / 1000, inner="muon"),
        _measured("tried", "variant", 1.9, full / 1000, inner="muon"),
    ]
    assert gap(found, profile, parameters)["met"] is met


def test_two_seeds_can_miss_a_goal_and_not_meet_it():
    profile, parameters = PROFILES["tiny"], 131_904
    full = 2.0 * parameters * profile.steps
    adamw = _measured("data-parallel AdamW, bf16", "synchronous", 3.0, full)
    for loss, seeds, met in ((3.0, 3, True), (3.0, 2, None), (3.04, 2, False)):
        found = judged([adamw, _measured("cheap", "cairn", loss, full / 1000, seeds)], profile, parameters)[1]
        assert found["met"] is met and f"{seeds} seeds" in found["value"]


def test_the_table_marks_rows_that_were_not_tuned_and_has_no_seconds_of_an_exchange_in_each_step():
    profile, full = PROFILES["tiny"], 1e6
    adamw, diloco = (
        _measured(MAIN[0].label, "synchronous", 3.0, full),
        _measured("DiLoCo, H 30, fp32", "diloco", 3, 9.0),
    )
    each_step = replace(adamw, results={0: replace(adamw.results[0], exchanges=profile.steps)})
    first, second = tables.main_rows([each_step, diloco], profile, 131_904)
    assert first[0] == MAIN[0].label and first[-3:] == [None] * 3
    assert second[0] == "DiLoCo, H 30, fp32, not tuned" and None not in second[-3:]


def test_a_result_is_kept_and_found_by_an_equal_job(tmp_path: Path):
    one = Job("tiny", "cairn", {"k": 64, "h": 10}, 1e-3, 2)
    result = Result(one, 3.0, 10, 1.0, 2.0, 3, 4.0, [[0, 1.0, 0, 0, 0]])
    job.keep(tmp_path, result)
    assert job.kept(tmp_path, Job("tiny", "cairn", {"h": 10, "k": 64}, 1e-3, 2)) == result
    assert job.kept(tmp_path, Job("tiny", "cairn", {"h": 11, "k": 64}, 1e-3, 2)) is None
