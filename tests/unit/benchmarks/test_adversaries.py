"""The benchmark of adversaries: its chain convicts and voids as the product's does, and its goals can be missed."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.adversaries import __main__ as adversaries
from benchmarks.adversaries.branch import Branch
from benchmarks.adversaries.honest import CPUS, PRECISIONS, Task, comparisons
from benchmarks.adversaries.lineup import ABSENT, ATTACKS, DEFENCES, HOLD_ROUNDS, LARGE, SWARM
from benchmarks.adversaries.swarm import Scenario
from benchmarks.adversaries.world import peer_key
from protocol.audits import due_audits
from protocol.codec import make_codec
from protocol.messages import Score, Signed, UpdateHeader
from protocol.spec import CodecSpec
from tests.support.codec_cases import LAYOUT, noise
from tests.support.specs import tiny_spec

KEYS = sorted(peer_key(n) for n in range(5))
PASSED = Score("gain", 9.0, 3.0), Score("quarter", 9.0, 1.0)
FAILED = Score("scale", 1.0, 0.8), Score("signs", 0.5, 0.97)


def a_branch() -> Branch:
    return Branch(tiny_spec(credit={"hold_rounds": HOLD_ROUNDS}), SWARM, DEFENCES["all"].rule, KEYS)


def updates(branch: Branch) -> list[Signed[UpdateHeader]]:
    return [branch.header(key, SWARM.windows, key + bytes([branch.round])) for key in KEYS]


def test_two_auditors_and_the_jury_convict_and_all_pending_credit_is_void():
    branch, liar = a_branch(), KEYS[0]
    first = branch.add(updates(branch), [])
    branch.add(updates(branch), [])
    update = next(u for u in first.record.body.updates if u.author == liar)
    accusers = [k for k in KEYS if k != liar]
    told = [branch.report(first, update, key, "replay", FAILED) for key in accusers]
    second = branch.add(updates(branch), told)
    assert 2 <= len(second.record.body.reports) < len(told)  # of the drawn auditors only
    (decision,) = second.record.body.decisions
    assert decision.author == liar and decision.convicted and not decision.refuted
    assert liar not in second.record.body.contributors and branch.chain.is_barred(liar, branch.head)
    assert branch.voided == {(0, liar), (1, liar)}


def test_reports_that_pass_convict_nobody_and_credit_settles():
    branch = a_branch()
    for _ in range(HOLD_ROUNDS + 2):
        before, newest, reports = branch.chain.head, branch.add(updates(branch), []), []
        made = newest if before == branch.chain.root else branch.chain.certificate(before)
        seeds, rule = branch.chain.audit_seeds(made.digest), branch.chain.limits.audit
        for audit in due_audits(made.record.body, seeds, branch.stakes(made), rule):
            update = next(u for u in made.record.body.updates if u.digest == audit.update)
            reports += [branch.report(made, update, audit.auditors[0], "loss", PASSED)]
    assert not branch.voided and not any(branch.chain.is_barred(k, branch.head) for k in KEYS)
    assert branch.fold.balances[KEYS[0]].settled.rounds == 2


def test_another_seed_is_another_run():
    pairs = list(adversaries.scenarios([1, 2]))
    assert len({(name, s) for name, s in pairs}) == len(pairs)
    assert {s.attack for _, s in pairs} == {"", ABSENT, *ATTACKS} and {s.hostile for _, s in pairs} == {0, 3, 5, 7}
    assert all(any(name == off for name, _ in pairs) for off in adversaries.FOR)


def row(scenario: Scenario, defences: str = "all", **changes: Any) -> dict[str, Any]:
    usual = {
        "loss": 4.0, "ended": None, "rounds": 20, "rounds_audited": 20, "named_after": [3] * scenario.hostile,
        "honest_convicted": 0, "honest_updates": 100, "refuted": 0, "fakes_accepted": 9, "fakes_credited": 0,
        "updates_voided": 10,
        "audit_share": 0.04, "replay_share": 0.03, "screen_share": 0.01,
    }  # fmt: skip
    if scenario.attack in ("", ABSENT):
        usual["named_after"] = []
    return adversaries.described(defences, scenario) | usual | changes


def results(**changes: Any) -> dict[str, Any]:
    runs = [row(s, name) for name, s in adversaries.scenarios([1])]
    for r in runs:
        if r["defences"] in adversaries.FOR:
            r["loss"] = 9.0
        if (r["attack"], r["defences"], r["hostile"]) == ("noise", "all", 7):
            r.update(changes)
    verdicts = {"passed": 20_000, "passed second": 0, "no report": 0, "failed": changes.get("failed", 2)}
    honest = [{"updates": 200, "comparisons": 20_000, "verdicts": verdicts}]
    large = row(next(s for _, s in adversaries.scenarios([1]) if not s.attack))
    large |= {"rounds": LARGE.rounds} | changes.get("large", {})
    return {"runs": adversaries.with_ratios(runs), "honest": honest, "large": [large]}


@pytest.mark.parametrize("runs", [0, 1, 5, 1000])
def test_tables_are_made_of_whatever_runs_there_are(runs: int):
    some = results()
    text = adversaries.show({"runs": some["runs"][:runs], "honest": []})
    assert ("3 of 16: noise" in text) is (runs == 1000) and ("noise, newcomers" in text) is (runs == 1000)
    assert ("nobody attacks" in text) is (runs > 0)


def test_goals_are_met_by_what_meets_them():
    assert all(goal["met"] for goal in adversaries.goals(results()))


@pytest.mark.parametrize(
    "changes",
    [{"loss": 4.3}, {"loss": None}, {"named_after": [31] * 7}, {"named_after": []}, {"fakes_credited": 1},
     {"updates_voided": 0}, {"honest_convicted": 1}, {"failed": 3},
     {"large": {"audit_share": 0.05}}],
)  # fmt: skip
def test_each_goal_can_be_missed(changes: dict[str, Any]):
    assert not all(goal["met"] for goal in adversaries.goals(results(**changes)))


def test_a_defence_whose_absence_harms_nobody_is_a_goal_missed():
    some = results()
    for r in some["runs"]:
        if r["defences"] == "all but the clip":
            r["loss_ratio"] = 1.0
    (missed,) = (g for g in adversaries.goals(some) if not g["met"])
    assert missed["goal"].startswith("all but the clip")
    assert missed["value"].startswith(
        "loss 1 of the honest run's, 0 fakes credited, convicted after 3 rounds; beside all"
    )


def test_honest_replays_are_compared_across_machines_and_a_stranger_fails(tmp_path: Path):
    codec = make_codec(CodecSpec(kind="sign"), LAYOUT)
    world: Any = SimpleNamespace(codec=codec, profile=SWARM)
    good, bad = (bytes(codec.encode(noise(LAYOUT, seed))) for seed in (1, 2))
    for machine, precision in product(CPUS, PRECISIONS):
        folder = tmp_path / machine.replace(" ", "_")
        folder.mkdir(exist_ok=True)
        (folder / f"0-0-{precision}").write_bytes(bad if machine == "SSE4" else good)
    rows = list(comparisons(world, [Task("0-0", tmp_path, 0, 0, 0, 40)], tmp_path, CPUS))
    assert len(rows) == 90
    strangers = [r for r in rows if ("SSE4" in r["author"]) != ("SSE4" in r["auditor"])]
    assert len(strangers) == 32 and all(r["verdict"] == "failed" for r in strangers)
    assert all(r["verdict"] == "passed" for r in rows if r not in strangers)
