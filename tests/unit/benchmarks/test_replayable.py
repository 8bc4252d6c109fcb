"""The benchmark of replayable updates: its replays are exact, its scores are those of an audit, its summaries count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import replayable
from benchmarks.audit_scores import Position
from benchmarks.convergence.corpus import Corpus
from benchmarks.convergence.setting import PROFILES, Setting
from benchmarks.replayable import (
    COLUMNS,
    ENVIRONMENTS,
    REPLAYABLE,
    RULES,
    Environment,
    Swarm,
    compared,
    cost,
    least_share,
    loss_check,
    rebased,
    run,
    t_values,
)

PEERS = ((10, 2), (12, 0))


@pytest.fixture(scope="module")
def setting() -> Setting:
    tokens = np.repeat(np.random.default_rng(0).integers(0, 512, 20_000).astype(np.uint16), 2)
    return Setting(replace(PROFILES["tiny"], peers=2, batch=8), 0, Corpus(tokens, tokens[:2_000], (), None))


def row(update: str, *, round_: int = 5, peer: int = 0, **scores: float) -> list:
    cells = {"round": round_, "peer": peer, "update": update, **scores}
    return [cells.get(column) for column in COLUMNS]


def entry(rows: list, **changes) -> dict:
    usual = {"profile": "broad", "swarm": "36", "rule": "replayable", "rounds": 14, "seed": 1, "loss": 3.0}
    return {**usual, "columns": list(COLUMNS), "audits": rows, **changes}


@pytest.fixture(scope="module")
def audits(setting: Setting) -> list[dict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(replayable.SWARMS, "36", PEERS)
        patch.setattr(replayable, "ENVIRONMENTS", {k: ENVIRONMENTS[k] for k in ("bf16", "bf16, pieces of 256")})
        *_, last = run(setting, 3, "36", "replayable", [2])
    return [dict(zip(COLUMNS, cells, strict=True)) for cells in last["audits"]]


@pytest.mark.long
def test_an_audited_round_scores_every_honest_update_by_loss_and_one_by_replays(audits: list[dict]):
    honest = [a for a in audits if a["update"] == "honest"]
    assert sorted(a["peer"] for a in honest) == [0, 1]
    assert all(a["gain"] is not None for a in honest)
    assert {a["peer"] for a in audits if a["update"] == "in bf16"} == {0}


@pytest.mark.long
def test_other_floats_agree_better_than_any_fake(audits: list[dict]):
    signs = {a["update"]: a["signs"] for a in audits if a["signs"] is not None}
    elsewhere = min(signs["in bf16"], signs["both in bf16, other pieces"])
    assert elsewhere > max(signs[f] for f in ("stop 50", "batch 50", "every 50", "wrong_data", "copy", "stale"))
    assert signs["flip"] == 0.0
    assert signs["crafted"] == pytest.approx(0.75, abs=0.001)


@pytest.mark.long
def test_an_early_end_agrees_more_the_later_it_comes(audits: list[dict]):
    ends = sorted((a["share"], a["signs"]) for a in audits if a["update"] == "ends")
    assert [share for share, _ in ends] == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert ends[0][1] < ends[-1][1] < 1.0


def test_a_replay_is_exact_in_the_same_environment_and_not_with_noise(setting: Setting):
    swarm = Swarm(setting, 2, PEERS, REPLAYABLE)
    state = swarm.replica.flat.clone()
    batches, factors = [swarm.windows(0, 0, n) for n in range(4)], swarm.factors(0, 1)[:4]
    once, again, noisy = (
        swarm.update(Position(state), state, batches, factors, 0, e).progress
        for e in (Environment(), Environment(), Environment(noise=0.1))
    )
    assert torch.equal(once, again)
    assert not torch.equal(once, noisy)


def test_the_rate_of_a_replayable_update_is_one_for_each_state(setting: Setting):
    swarm = Swarm(setting, 4, PEERS, REPLAYABLE)
    first, second = swarm.factors(0, 0), swarm.factors(0, 1)
    assert len(set(first)) == 1
    assert set(second[:2]) == set(first)
    assert len(set(second[2:])) == 1
    assert second[2] != second[0]


def test_a_dropped_step_leaves_one_less_of_each_update(setting: Setting):
    dropped = Swarm(setting, 4, PEERS, RULES["replayable, a step dropped"])
    assert dropped.peers == ((9, 2), (11, 0))
    assert len(dropped.factors(0, 1)) == 9


def test_signs_weigh_alike_or_by_the_replays_magnitude_and_the_scale_is_of_the_worst_tensor():
    progress = torch.tensor([3.0, 1.0, 5.0, -5.0])
    replay = torch.tensor([2.0, 2.0, 5.0, -5.0])
    update = torch.tensor([2.0, -2.0, 10.0, -10.0])
    assert compared(update, replay, progress, [2, 2]) == (0.75, 0.875, 0.5)
    assert compared(update, torch.zeros(4), progress, [2, 2])[2] == 0.0


def test_the_t_value_is_the_difference_by_its_standard_error_and_the_quarter_the_worst():
    unclaimed = torch.tensor([0.0, 2.0] * 8)  # mean 1, variance 16/15
    claimed = torch.stack([torch.tensor([2.0, 4.0] * 2)] * 3 + [torch.tensor([0.0, 2.0] * 2)])
    whole, worst = t_values(claimed, unclaimed)
    assert whole == pytest.approx(1.5 / (claimed.var() / 16 + unclaimed.var() / 16).sqrt().item())
    assert worst == pytest.approx(0.0)


def test_the_cost_is_relative_to_the_same_seed_and_swarm():
    runs = [entry([], rule="kept", seed=s, loss=2.0 * s) for s in (1, 2)]
    runs += [entry([], seed=1, loss=2.2), entry([], seed=2, loss=4.0), entry([], seed=3, loss=9.0)]
    runs += [entry([], swarm="72", loss=9.0), entry([], seed=4, loss=None)]
    found = cost(runs)["broad 36, 14 rounds"]["replayable"]
    assert found["excess"] == pytest.approx(0.05)
    assert found["losses"] == {"1": 2.2, "2": 4.0, "3": 9.0}
    assert cost(runs)["broad 72, 14 rounds"]["replayable"]["excess"] is None


def test_the_least_share_is_the_shortest_that_passes_in_each_audit():
    early = [row("ends", share=s, signs=a) for s, a in ((0.8, 0.96), (0.9, 0.975), (0.95, 0.985))]
    other = [row("ends", round_=6, share=0.9, signs=0.9)]
    found = least_share([entry([*early, *other])])["ends"]["0.97"]
    assert (found["n"], found["least"], found["most"]) == (2, 0.9, 1.0)


def test_the_updates_are_counted_that_began_before_their_state_came():
    rows = [row("in bf16", peer=0), row("in bf16", peer=1), row("in bf16", peer=1, round_=0), row("honest", peer=2)]
    assert rebased([entry(rows, swarm="unequal"), entry(rows[:1], swarm="36")]) == 2


def test_a_weak_update_passes_by_the_auditors_own_and_only_then():
    weak = [row("honest", peer=p, gain=2.0, quarter=0.5) for p in (0, 1)]
    fakes = [row("half", gain=1.5, quarter=0.3), row("copy", gain=-0.5, quarter=0.3)]
    found = loss_check([entry(weak + fakes)])
    assert found["honest"]["alone"]["passed"] == 0.0
    assert found["honest"]["with own"] == {"n": 2, "passed": 1.0}
    assert found["half"]["with own"]["passed"] == 1.0
    assert found["copy"]["with own"]["passed"] == 0.0
