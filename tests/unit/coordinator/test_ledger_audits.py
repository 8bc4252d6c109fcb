"""Work reports and decisions in the ledger: kept while they matter, read back with the credit that they void."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.audit_index import AuditIndex, RecentRounds
from coordinator.credits.receipts import void_reason
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger import Ledger, StatedDecision, StatedPardon
from protocol.audit_penalties import AuditPenalties
from protocol.audits import AuditRule
from protocol.ids import Digest, Round, sha256
from protocol.ledger.credits import CreditRule, credits_of
from protocol.message_codec import KeySigner
from protocol.messages import AuditDecision, Certificate, Directive, Pardon, Rollback, Score, Verdict
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.specs import OWNER

SPEC = make_spec(credit={"hold_rounds": 3, "flops_per_parameter_token": 1000})
RULE = CreditRule.of(SPEC)
EVERYBODY = {n: 100 for n in range(4)}
LIAR = 0


class Story:
    """A chain, and the ledger to which each of its records is posted."""

    def __init__(self, place: str):
        self.place = place
        self.chain = ChainMaker(SPEC)
        self.ledger = Ledger(place, SPEC)

    def round(self, work: dict[int, int] | None = None, **audits) -> Certificate:
        certificate = self.chain.add(work or EVERYBODY, **audits)
        self.ledger.post(credits_of(certificate, RULE))
        return certificate

    def convict(self) -> Certificate:
        """Accuse the newest update of the liar in one record, and convict it in the next; return the audited one."""
        audited = self.round()
        failed = [self.chain.report(audited, LIAR, by, Score("signs", 0.7, 0.97)) for by in (1, 2, 3)]
        self.round(reports=failed[:2])
        others = {n: 100 for n in (1, 2, 3)}
        decision = AuditDecision(audited.digest, peer(LIAR).key, True, (peer(3).key,))
        self.round(others, reports=failed[2:], decisions=[decision])
        return audited

    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.place, SPEC)

    def reports(self) -> list[tuple[int, int, str, bool]]:
        found = self.ledger.work_reports(SPEC.run_id, Round(0))
        return [(r.carried, r.body.round, r.reporter.short, r.body.passed) for r in found]


@pytest.fixture
def story(ledger_place):
    made = Story(ledger_place)
    yield made
    made.ledger.close()


def test_a_conviction_is_read_back_with_its_reports_and_the_credit_that_it_voids(story):
    story.round()
    audited = story.convict()
    story.reopen()
    (stated,) = story.ledger.decisions()
    update = next(u for u in audited.record.body.updates if u.author == peer(LIAR).key)
    assert (stated.stated, stated.round, stated.update) == (3, 1, update.digest)
    assert stated.decision == AuditDecision(audited.digest, peer(LIAR).key, True, (peer(3).key,))
    assert stated.voided == 3 * RULE.micro_credits(100), "rounds 0 to 2 were pending"
    assert story.reports() == [
        (carried, 1, peer(by).key.short, False)
        for carried, by in sorted([(2, 1), (2, 2)], key=lambda x: peer(x[1]).key) + [(3, 3)]
    ]
    for _ in range(8):
        story.round({n: 100 for n in (1, 2, 3)})
    assert len(story.reports()) == 3, "reports behind a decision are kept"


@pytest.mark.parametrize("rounds", [64, 5])
def test_a_conviction_bars_for_as_long_as_the_rule_of_the_run_says(story, rounds: int):
    story.convict()
    chain = IndexedChain(AuditRule(bar_rounds=rounds), SPEC.credit.hold_rounds)
    chain.restore_audits(story.ledger.decisions(), [], [])
    assert [case.barred_until for case in chain.audits.decided] == [2 + 1 + rounds]


@pytest.mark.parametrize("final", [True, False])
def test_a_pardon_ends_the_bar_and_is_named_in_its_case(story, final: bool):
    story.convict()
    decisions, liar, index = story.ledger.decisions(), peer(LIAR).key, AuditIndex(AuditRule(), 3)
    other, meant = Pardon(liar, Round(1)), Pardon(liar, Round(2))
    pardons = [StatedPardon(Round(3), other), StatedPardon(Round(4), meant), StatedPardon(Round(5), meant)]
    if final:
        for sequence, stated in enumerate(pardons, 1):
            story.chain.carry(KeySigner(OWNER).sign(Directive(SPEC.run_id, sequence, pardons=(stated.pardon,))))
            story.round({n: 100 for n in (1, 2, 3)})
        story.reopen()
        assert story.ledger.pardons() == pardons
        index.restore(decisions, story.ledger.pardons(), [], RecentRounds((), {}, 5))
    else:
        index.restore(decisions, [], [], RecentRounds((), {}, 2))
        assert index.barred_until(liar, 4) == 2 + 1 + 64 and [key for key, _ in index.bars(4)] == [liar]
        credits = [replace(story.ledger.round_credits()[-1], round=p.stated, pardons=(p.pardon,)) for p in pardons]
        index.follow(RecentRounds(tuple(replace(c, decisions=()) for c in credits), {}, 5))
    (case,) = index.decided
    assert case.pardoned_in == 4 and "The owner pardoned it in round 4" in case.describe(lambda key: key.short)
    assert index.barred_until(liar, 5) is None and index.bars(5) == []


@pytest.mark.parametrize("final", [True, False])
def test_late_votes_and_whom_they_refute_are_shown_with_the_first_decision(story, final: bool):
    audited, threshold = story.round(), 0.97
    update = next(u for u in audited.record.body.updates if u.author == peer(LIAR).key)

    def told(by: int, value: float):
        return story.chain.report(audited, LIAR, by, Score("signs", value, threshold))

    story.round(reports=[told(1, 0.5), told(2, 0.5)])
    story.round(reports=[told(3, 0.971)], decisions=[AuditDecision(audited.digest, peer(LIAR).key, False)])
    refuted = AuditDecision(audited.digest, peer(LIAR).key, False, (peer(1).key, peer(2).key))
    first_known, index = len(story.ledger.decisions()), AuditIndex(AuditRule(), 8)
    story.round(reports=[told(0, 0.99)], decisions=[refuted])
    rounds = [credits_of(c, RULE) for c in story.chain.certificates]
    recent = RecentRounds(() if final else tuple(rounds[-1:]), {c.record: c for c in rounds}, rounds[-1].round)
    decisions, reports = story.ledger.decisions(), story.ledger.work_reports(SPEC.run_id, Round(0))
    if not final:
        decisions, reports = decisions[:first_known], [r for r in reports if r.carried < rounds[-1].round]
    for _ in range(2):  # to follow the same rounds again adds nothing
        index.restore(decisions, [], reports, recent)
        index.follow(recent)
    (case,) = index.decided
    assert (case.stated, case.update, case.is_conviction) == (2, update.digest, False)
    assert case.outcome is not None and case.outcome.decision.refuted == refuted.refuted
    assert sorted(r.carried for r in case.reports) == [1, 1, 2, 3] and not index.undecided
    assert all(index.penalties.of(key).stakeless_until == 4 for key in refuted.refuted)


def test_what_accuses_earlier_updates_of_the_convicted_is_not_open_any_more(story):
    index, audited = AuditIndex(AuditRule(), 8), story.round()
    story.round(reports=[story.chain.report(audited, n, 3, Score("signs", 0.7, 0.97)) for n in (LIAR, 1)])

    def open_cases() -> list[str]:
        newest = story.ledger.last()[0]
        reports = story.ledger.work_reports(SPEC.run_id, Round(0))
        index.restore(story.ledger.decisions(), [], reports, RecentRounds((), {}, newest))
        return sorted(c.author.short for c in index.undecided)

    assert open_cases() == sorted(peer(n).key.short for n in (LIAR, 1))
    other = story.chain.certificates[-1]
    story.round({n: 100 for n in (1, 2, 3)}, decisions=[AuditDecision(other.digest, peer(LIAR).key, True)])
    assert open_cases() == [peer(1).key.short]


def test_a_line_names_the_conviction_or_the_verdict_that_voids_it(story):
    story.convict()
    assert {void_reason(line) for line in story.ledger.history_of(peer(LIAR).key)} == {
        "by the conviction in round 2 for the update of round 0"
    }
    assert {void_reason(line) for line in story.ledger.history_of(peer(1).key)} == {""}
    named = story.round({n: 100 for n in (1, 2, 3)})
    verdict = Verdict(named.digest, peer(1).key, "checked")
    story.chain.carry(KeySigner(OWNER).sign(Directive(SPEC.run_id, 1, verdicts=(verdict,))))
    story.round({n: 100 for n in (1, 2, 3)})
    by_round = {line.round: void_reason(line) for line in story.ledger.history_of(peer(1).key)}
    assert by_round[named.record.body.round] == "by the owner's verdict that round 4 carries"


def test_the_tokens_that_a_record_voids_are_read_back_and_do_not_count_for_the_run(story):
    story.round()
    story.round({1: 100, 2: 100}, voided=100)
    assert [r.voided_tokens for r in story.ledger.rounds()] == [0, 100 * SPEC.data.window_tokens]
    assert [c.progress for c in story.ledger.round_credits()] == [
        400 * SPEC.data.window_tokens,
        RULE.window_tokens * 100,
    ]
    story.reopen()
    assert story.ledger.read_fold(SPEC.run_id).tokens == 500 * SPEC.data.window_tokens


def test_reports_without_a_decision_are_deleted_once_their_update_has_settled(story):
    audited = story.round()
    story.round(reports=[story.chain.report(audited, LIAR, 1, Score("signs", 0.7, 0.97))])
    for left in (1, 0, 0):
        story.round()
        assert len(story.reports()) == left
    assert story.ledger.decisions() == []


def test_a_decision_of_rounds_that_were_rolled_back_is_not_of_the_branch(story):
    story.round()
    kept = story.chain.head
    story.convict()
    back = Rollback(1, kept, Round(1), state(1))
    assert story.ledger.rollback(back)
    assert story.ledger.decisions() == [] and story.reports() == []
    assert story.ledger.history_of(peer(LIAR).key)[-1].status == "voided", "issued credit stays as it is"


def test_a_restart_does_not_copy_all_penalties_for_each_decision_and_pardon(monkeypatch):
    made, make = [], AuditPenalties.__init__
    monkeypatch.setattr(AuditPenalties, "__init__", lambda self, *given: made.append(1) or make(self, *given))
    names = [Digest(sha256(b"record", bytes([n]))) for n in range(40)]
    decisions = [
        StatedDecision(Round(n + 1), name, Round(n), name, AuditDecision(name, peer(n).key, True), 0)
        for n, name in enumerate(names)
    ]
    pardons = [StatedPardon(Round(n + 5), Pardon(peer(n).key, Round(n + 1))) for n in range(0, 40, 2)]
    index = AuditIndex(AuditRule(), 3)
    made.clear()
    index.restore(decisions, pardons, (), RecentRounds((), {}, 60))
    assert len(made) <= 2
    assert {key for key, _ in index.bars(50)} == {peer(n).key for n in range(1, 40, 2)}
    assert {c.author for c in index.decided if c.pardoned_in is not None} == {peer(n).key for n in range(0, 40, 2)}
