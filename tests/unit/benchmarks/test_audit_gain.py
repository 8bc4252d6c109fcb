"""The expected gain of cheats has the signs of a simulation with the product's own draws, stakes, bars and credits."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from benchmarks.audit_gain import (
    CHEATS,
    DECISION_ROUNDS,
    HOLDS,
    Cheat,
    audit_chance,
    conviction_chance,
    expected_gain,
    gains,
    show,
)
from coordinator.authoring.runfile import REPLAYABLE_HOLD_ROUNDS
from protocol.audits import AuditRule, AuditSeeds, due_audits
from protocol.chain import genesis_digest
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.fold import CreditFold
from protocol.messages import AuditDecision, Certificate, RoundRecord, Signed, UpdateHeader
from protocol.record_node import RecordNode
from protocol.spec import CreditSpec
from protocol.stake import STAKE_ROUNDS, StakeRule
from tests.support.audited import RUN, STATE, key
from tests.support.long_cases import long_cases

NOTHING, HALF, THREE_QUARTERS, TOLERATED = CHEATS
DEFAULT, OFTEN = AuditRule(), AuditRule(loss_rate=300_000, replay_rate=100_000)
CHEATER, HONEST = key("cheater"), tuple(key(n) for n in range(5))
WINDOWS = {1 / 3: (10, 34), 1.0: (30, 30), 3.0: (150, 30)}
"""Windows of the cheater and of each honest peer, by the cheater's weight relative to the mean."""
ROUNDS = 120
"""Rounds of cheating in a run at most, or five times those until a conviction, if that is more."""
RUNS = 80


class Run:
    """A run of one cheater and five honest peers. `work` are the windows of each peer in a round."""

    def __init__(self, weight: float, rule: AuditRule, hold: int, name: object):
        mine, theirs = WINDOWS[weight]
        self.work = {CHEATER: mine} | dict.fromkeys(HONEST, theirs)
        self.rule = rule
        self.stake = StakeRule(hold)
        self.credit = CreditRule(6, 10**9, 16, hold)
        self.name = name
        self.node = RecordNode(genesis_digest(RUN))
        self.fold = CreditFold(RUN, self.credit)
        self.next = dict.fromkeys(self.work, 0)

    def fork(self, name: object) -> Run:
        other = Run(min(WINDOWS), self.rule, self.stake.hold_rounds, name)
        other.work, other.node, other.fold, other.next = self.work, self.node, self.fold.copy(), dict(self.next)
        return other

    def round(self, *decisions: AuditDecision) -> Certificate:
        """Add a record by all who are not barred, and return it."""
        number = Round(self.node.height)
        convicted = {d.author for d in decisions}
        authors = [k for k in sorted(self.work) if k not in convicted and not self.node.penalties.is_barred(k, number)]
        updates = tuple(self._update(author, number) for author in authors)
        body = RoundRecord(RUN, number, self.node.digest, STATE, 0, updates, decisions=decisions)
        digest = Digest(sha256(repr((self.name, number)).encode(), self.node.digest))
        made = Certificate(Signed(body, authors[0], digest, b""), ())
        self.node = RecordNode(made.digest, self.node, made, 10**6, self.stake.hold_rounds, self.rule.bar_rounds)
        self.fold.add(credits_of(made, self.credit))
        return made

    def _update(self, author: PeerKey, number: Round) -> Signed[UpdateHeader]:
        first, self.next[author] = self.next[author], self.next[author] + self.work[author]
        digest = Digest(sha256(b"header", author, repr((self.name, number)).encode()))
        end = self.next[author]
        body = UpdateHeader(RUN, number, self.node.digest, STATE, first, first, end, 1, digest, 1, 1.0, b"")
        return Signed(body, author, digest, b"")

    def cheat(self, cheat: Cheat, rng: random.Random, most: int) -> tuple[int, int]:
        """Cheat until a conviction, for `most` rounds; return the rounds of cheating, and the convictions."""
        due: dict[int, Digest] = {}
        for cheats in range(1, most + 1):
            stakes: Mapping[PeerKey, int] = self.stake.stakes(self.node)
            made = self.round()
            seeds = AuditSeeds(made.digest, made.digest)  # it stands for both
            for audit in due_audits(made.record.body, seeds, stakes, self.rule):
                chance = cheat.by_replay if audit.check == "replay" else cheat.by_loss * cheat.by_replay
                if audit.author == CHEATER and rng.random() < chance:
                    due.setdefault(cheats + DECISION_ROUNDS, made.digest)
            if cheats in due:
                self.round(AuditDecision(due[cheats], CHEATER, True))
                return cheats, 1
        return most, 0


@cache
def settled(weight: float, rule: AuditRule, hold: int) -> Run:
    """Return a run in which everybody has the full stake by honest work."""
    run = Run(weight, rule, hold, "honest")
    for _ in range(STAKE_ROUNDS + hold + 1):
        run.round()
    return run


@cache
def simulated(
    cheat: Cheat, weight: float, rule: AuditRule, hold: int, is_newcomer: bool = False
) -> tuple[int, int, int]:
    """Return the rounds of cheating in many runs, those of them and before that were voided, and the convictions."""
    rounds, voided, convictions = 0, 0, 0
    most = max(ROUNDS, round(5 / conviction_chance(cheat, rule, weight))) if cheat.by_replay else ROUNDS
    for seed in range(RUNS if cheat.by_replay else 2):
        run = Run(weight, rule, hold, seed) if is_newcomer else settled(weight, rule, hold).fork(seed)
        cheats, convicted = run.cheat(cheat, random.Random(seed), most)
        rounds, convictions = rounds + cheats, convictions + convicted
        voided += run.fold.balances[CHEATER].voided.rounds
    return rounds, voided, convictions


def simulated_gain(
    cheat: Cheat, weight: float, rule: AuditRule, hold: int, *, counts_bar: bool, is_newcomer: bool = False
) -> float:
    """Return the gain of a round of cheating, in credits of a round of the cheater."""
    rounds, voided, convictions = simulated(cheat, weight, rule, hold, is_newcomer)
    return cheat.saved - (voided + convictions * rule.bar_rounds * counts_bar) / rounds


@pytest.mark.parametrize("weight", WINDOWS)
@pytest.mark.parametrize("rule", [DEFAULT, OFTEN], ids=["default", "often"])
def test_the_chance_of_an_audit_is_that_of_the_draw(weight, rule):
    run, found = settled(weight, rule, HOLDS[0]).fork("draws"), {"loss": 0, "replay": 0}
    count = 1000
    made, stakes = run.round(), run.stake.stakes(run.node)
    for n in range(count):
        seed = sha256(b"draw", n.to_bytes(4, "little"))
        for audit in due_audits(made.record.body, AuditSeeds(seed, seed), stakes, rule):
            if audit.author == CHEATER:
                found["loss"] += 1  # one draw decides about both: where a replay is due, a loss check would be
                found["replay"] += audit.check == "replay"
    for check, times in found.items():
        chance = audit_chance(rule, check, weight)
        assert abs(times / count - chance) < 4 * (chance * (1 - chance) / count) ** 0.5 + 1e-9, check


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda c: c.name[:12])
@pytest.mark.parametrize("weight", [1.0, *long_cases(*sorted(WINDOWS.keys() - {1.0}))])
@pytest.mark.parametrize("rule", [DEFAULT, *long_cases(OFTEN)], ids=["default", "often"])
@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("counts_bar", [True, *long_cases(False)], ids=["barred", "free"])
def test_a_simulation_has_the_sign_of_the_expected_gain(cheat, weight, rule, hold, counts_bar):
    expected = expected_gain(cheat, rule, weight, hold, counts_bar=counts_bar)
    found = simulated_gain(cheat, weight, rule, hold, counts_bar=counts_bar)
    if abs(expected) >= 0.1 or not cheat.by_replay:  # else too near to zero for this many runs
        assert (found > 0) == (expected > 0), (found, expected)
    assert found == pytest.approx(expected, rel=0.4, abs=0.2)


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("cheat", CHEATS, ids=lambda c: c.name[:12])
def test_a_newcomer_gains_nothing_by_what_a_replay_finds(cheat, hold):
    found = simulated_gain(cheat, 1.0, DEFAULT, hold, counts_bar=False, is_newcomer=True)
    expected = expected_gain(cheat, DEFAULT, 1.0, hold, is_newcomer=True)
    assert found == pytest.approx(expected, abs=0.05)
    assert (expected <= 0) == bool(cheat.by_replay)


def test_what_is_said_to_pay_pays_and_what_is_said_not_to_does_not():
    """The statements of docs/trust.md and docs/results/audit_gain.md in words."""
    short, long = HOLDS
    assert expected_gain(NOTHING, DEFAULT, 1 / 3, short) > 0.4 and expected_gain(NOTHING, DEFAULT, 3.0, short) < 0
    assert 0.15 < expected_gain(HALF, DEFAULT, 1 / 3, long) < 0.25
    pays = [(r["cheat"], r["weight"]) for r in gains() if r["hold_rounds"] == long and r["found"] and r["gain"] > 0]
    assert pays == [(HALF.name, 1 / 3)]
    for hold, weight in product(HOLDS, WINDOWS):
        for cheat in (NOTHING, HALF, THREE_QUARTERS):
            assert expected_gain(cheat, DEFAULT, weight, hold, counts_bar=True) < 0
            assert expected_gain(cheat, replace(DEFAULT, loss_rate=10**6, replay_rate=10**6), weight, hold) < 0
        assert expected_gain(TOLERATED, OFTEN, weight, hold, counts_bar=True) == TOLERATED.saved


def test_the_holds_are_the_defaults_of_runs_without_replays_and_with_them():
    assert HOLDS == (CreditSpec().hold_rounds, REPLAYABLE_HOLD_ROUNDS)


def test_the_table_of_the_docs_is_what_the_function_computes():
    page = (Path(__file__).resolve().parents[3] / "docs/results/audit_gain.md").read_text()
    assert show({"gains": gains()}) in page
