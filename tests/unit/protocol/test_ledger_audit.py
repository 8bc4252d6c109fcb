"""An auditor with the certificates finds whatever a coordinator says otherwise than they do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from protocol.ids import Digest, Round
from protocol.ledger.audit import AuditReport, CreditedRound, LedgerAuditor
from protocol.ledger.credits import CreditRule, RoundCredits, credits_of
from protocol.ledger.fold import CreditFold
from protocol.message_codec import KeySigner
from protocol.messages import Directive, Rollback, Verdict
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.specs import OWNER

SPEC = make_spec(credit={"hold_rounds": 2, "flops_per_parameter_token": 1000})
RULE = CreditRule.of(SPEC)


class World:
    """A chain with a verdict, and perhaps a rollback. `told` is what the coordinator says, and may be falsified."""

    def __init__(self, *, rollback: bool = False):
        maker = ChainMaker(SPEC)
        self.certificates = []
        self._grow(maker, 3)
        self._carry(maker, 1, (Verdict(maker.head, peer(1).key, "too fast"),))
        self._grow(maker, 3)
        if rollback:
            maker = maker.fork(4)
            self._carry(maker, 2, (), Rollback(1, maker.head, Round(4), state(4)))
            self._grow(maker, 3)
        self.maker = maker
        self.credits: dict[Digest, RoundCredits] = {c.digest: credits_of(c, RULE) for c in self.certificates}
        fold = CreditFold(SPEC.run_id, RULE)
        self.told: list[CreditedRound] = []
        for c in self.certificates:
            credits = self.credits[c.digest]
            step = fold.add(credits)
            for n, i in step.voided:
                self.told[n] = replace(self.told[n], voided={i: step.number})
            self.told.append(
                CreditedRound(step.number, credits.round, credits.record, credits.parent, step.number, credits.lines)
            )
        self.totals = {
            p: (b.settled.micro_credits, b.pending.micro_credits, b.voided.micro_credits)
            for p, b in fold.balances.items()
        }
        self.settled = fold.settled_count

    def _grow(self, maker: ChainMaker, rounds: int) -> None:
        self.certificates += [maker.add({1: 40, 2: 30, 3: 20}) for _ in range(rounds)]

    def _carry(self, maker: ChainMaker, sequence: int, verdicts, rollback=None) -> None:
        maker.carry(KeySigner(OWNER).sign(Directive(SPEC.run_id, sequence, rollback=rollback, verdicts=verdicts)))

    def audit(self, *, without: Digest | None = None) -> AuditReport:
        followed = {c.digest for c in self.maker.certificates}
        auditor = LedgerAuditor(
            SPEC, lambda d: None if d == without else self.credits.get(d), len(self.told),
            is_abandoned=lambda d: d not in followed,
        )  # fmt: skip
        for told in self.told:
            auditor.add(told)
        newest = self.maker.certificates[-1]
        report = auditor.finish(newest.record.body.round, newest.digest, epoch=1)
        auditor.check_settled(self.settled)
        auditor.check_totals(self.totals)
        return report


@pytest.mark.parametrize("rollback", [False, True])
def test_honest_credits_are_clean(rollback: bool):
    report = World(rollback=rollback).audit()
    assert report.clean, report.findings
    assert report.voided == RULE.micro_credits(40) and report.rounds == (9 if rollback else 6)
    assert report.issued == report.rounds * sum(map(RULE.micro_credits, (40, 30, 20)))


def test_a_rolled_back_round_without_a_certificate_is_unproved_and_another_one_is_invented():
    w = World(rollback=True)
    report = w.audit(without=w.told[5].record)
    assert not report.findings and "which the owner has rolled back" in report.unproved[0].message
    w = World()
    report = w.audit(without=w.told[4].record)
    assert any("invented, or its certificate is kept" in d.message for d in report.findings)


def test_a_branch_that_was_not_rolled_back_is_named():
    w, other = World(), ChainMaker(SPEC)
    for _ in range(7):
        other.add({4: 10})
    w.maker = other
    assert any("the swarm follows another" in d.message for d in w.audit().findings)


@pytest.mark.parametrize("seed", range(60))
def test_no_single_change_goes_unnoticed(seed: int):
    rng = random.Random(seed)
    w = World(rollback=seed % 2 == 0)
    n = rng.randrange(len(w.told))
    told = w.told[n]
    lines = list(told.lines)
    i = rng.randrange(len(lines))
    act = rng.randrange(12)
    if act == 0:
        lines[i] = replace(lines[i], micro_credits=lines[i].micro_credits + 1)
    elif act == 1:
        lines[i] = RULE.line(lines[i].peer, lines[i].update, lines[i].windows + 1)
    elif act == 2:
        lines[i] = replace(lines[i], peer=peer(9).key)
    elif act == 3:
        del lines[i]
    elif act == 4:
        lines[i] = replace(lines[i], update=Digest(bytes(32)))
    told = replace(told, lines=tuple(lines))
    w.told[n] = told
    if act == 5:
        w.told[n] = replace(told, voided={} if told.voided else {i: len(w.told) - 1})
    elif act == 6:
        del w.told[n]
    elif act == 7:
        w.told.insert(n, told)
    elif act == 8:
        other = (n + 1) % len(w.told)
        w.told[n], w.told[other] = w.told[other], w.told[n]
    elif act == 9:
        who = rng.choice(sorted(w.totals))
        w.totals[who] = (w.totals[who][0] + 1, *w.totals[who][1:])
    elif act == 10:
        w.settled = rng.choice([0, w.settled + 1, len(w.told)])
    elif act == 11:
        m, by = next((m, t.voided) for m, t in enumerate(w.told) if t.voided)
        w.told[m] = replace(w.told[m], voided=dict.fromkeys(by, rng.choice([0, 1, 5])))
    report = w.audit()
    assert report.findings, act


@pytest.mark.parametrize("by", [6, 10**9])
def test_a_void_by_a_round_after_the_audits_is_not_proved(by: int):
    """The coordinator goes on during an audit, or invents a round that nobody can ask for."""
    w = World()
    w.told[4] = replace(w.told[4], voided={0: by})
    report = w.audit()
    assert not report.findings
    (unproved,) = report.unproved
    assert "a round after number 5 voids credits of number 4, and perhaps of others: audit again" in unproved.message


def test_a_void_by_another_round_is_named():
    w = World()
    place = next(n for n, told in enumerate(w.told) if told.voided)
    w.told[place] = replace(w.told[place], voided=dict.fromkeys(w.told[place].voided, 0))
    (finding,) = w.audit().findings
    assert "said to be void by number 0; the verdict is in number 3" in finding.message


@pytest.mark.parametrize("settled", [0, 3, 5, 6])
def test_settled_rounds_are_counted_by_the_fold(settled: int):
    w = World()
    assert w.settled == 4
    w.settled = settled
    (finding,) = w.audit().findings
    assert f"{settled} of 6 rounds are said to be settled, not 4" in finding.message


def test_after_an_invented_record_the_audit_goes_on_from_the_chain():
    w = World()
    w.told[1] = replace(w.told[1], record=Digest(bytes(32)))
    found = [d.message for d in w.audit().findings]
    assert len(found) == 2
    assert "which is not in the chain: it was invented" in found[0] and "round 1" in found[1]


def test_a_missing_round_is_found_once():
    w = World()
    del w.told[1]
    found = [d.message for d in w.audit().findings]
    assert len(found) == 2
    assert "entry 2 is where entry 1 should be" in found[0] and "is not credited before number 2" in found[1]


def test_a_round_left_out_that_the_fold_refuses_ends_no_audit():
    w = World()
    refused = replace(w.credits[w.told[2].record], lines=())
    w.credits[w.told[2].record] = refused
    del w.told[2]
    assert any("has no lines" in d.message for d in w.audit().findings)


def test_an_audit_is_full_when_too_much_is_wrong(monkeypatch):
    monkeypatch.setattr("protocol.ledger.audit.MAX_FINDINGS", 3)
    w = World()
    auditor = LedgerAuditor(SPEC, lambda d: None, 6)
    for n, told in enumerate(w.told):
        assert auditor.is_full == (n >= 3)
        auditor.add(told)
