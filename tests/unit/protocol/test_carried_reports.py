"""Records carry the reports that were drawn for, and state the decisions that follow: a chain takes nothing else."""

from __future__ import annotations

import pytest

from protocol.audits import AuditRule, draw_auditors, draw_jury
from protocol.chain import Chain, ChainLimits
from protocol.errors import ChainError
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.fold import CreditFold
from protocol.messages import (
    AuditCheck,
    AuditDecision,
    Certificate,
    RoundRecord,
    Score,
    Signed,
    UpdateHeader,
    WorkReport,
)
from protocol.stake import StakeRule
from tests.simulation.signer import FakeSigner, certificate
from tests.support.empty_chain import KEYS, OWNER, RUN, STATE

HOLD, WINDOWS = 4, 10
LIAR = KEYS[0]
OTHERS = KEYS[1:]


class Branch:
    """A chain on which six keys have stake, and its records."""

    def __init__(self, rounds: int = HOLD + 3):
        limits = ChainLimits(100, 8, stake=StakeRule(HOLD), audit=AuditRule(auditors=3, owner=OWNER.key))
        self.chain = Chain(RUN, STATE, limits)
        for _ in range(rounds):
            self.add()

    def record(self, *reports: Signed[WorkReport], without: PeerKey | None = None, decisions=None) -> Certificate:
        """Return the next record: of all that may be listed, with these reports and what follows from them."""
        chain = self.chain
        parent, number = chain.head, chain.height(chain.head)
        ordered = tuple(sorted(reports, key=lambda r: (r.body.record, r.body.update, r.author, r.body.check)))
        if decisions is None:
            decisions = chain.reports_after(parent).decisions(ordered)
        left_out = {d.author for d in decisions if d.convicted} | {without}
        updates = []
        for key in KEYS:
            if key not in left_out and not chain.is_barred(key, parent):
                first, blob = chain.next_window(key, parent), Digest(sha256(b"blob", key, parent))
                body = UpdateHeader(RUN, number, parent, STATE, first, first + WINDOWS, 1, blob, 9, 1.0, b"")
                updates.append(FakeSigner(key).sign(body))
        weights = chain.weights(parent, updates)
        body = RoundRecord(RUN, number, parent, STATE, 0, tuple(updates), None, weights, ordered, decisions)
        return certificate(FakeSigner(updates[0].author).sign(body), [u.author for u in updates])

    def add(self, *reports: Signed[WorkReport]) -> Certificate:
        made = self.record(*reports)
        assert self.chain.add(made) and self.chain.head == made.digest
        return made


def update_of(record: Certificate, author: PeerKey = LIAR) -> Signed[UpdateHeader]:
    return next(u for u in record.record.body.updates if u.author == author)


def report(
    record: Certificate, by: PeerKey, *, passed: bool = False, check: AuditCheck = "replay", author: PeerKey = LIAR
) -> Signed[WorkReport]:
    number, update = record.record.body.round, update_of(record, author).digest
    return FakeSigner(by).sign(
        WorkReport(RUN, number, record.digest, update, check, (Score("warm", float(passed), 0.5),))
    )


def test_reports_by_most_of_the_stake_convict_and_the_convicted_lose_everything():
    branch = Branch()
    record = branch.chain.certificate(branch.chain.head)
    first = branch.add(*(report(record, key) for key in OTHERS[:3]))
    assert first.record.body.decisions == () and len(first.record.body.reports) == 3
    assert branch.chain.stakes(branch.chain.head)[LIAR]
    second = branch.add(*(report(record, key) for key in OTHERS[3:]))
    assert second.record.body.decisions == (AuditDecision(record.digest, LIAR, True),)
    assert LIAR not in second.record.body.contributors and branch.chain.is_barred(LIAR, branch.chain.head)
    for _ in range(HOLD + 1):
        assert LIAR not in branch.chain.stakes(branch.chain.head)
        branch.add()
    fold = CreditFold(RUN, rule := CreditRule(6, 10**9, 16, HOLD))
    for made in branch.chain.path(branch.chain.root, branch.chain.head):
        fold.add(credits_of(made, rule))
    kept, others = fold.balances[LIAR], fold.balances[OTHERS[0]]
    voided = kept.voided.rounds
    assert kept.pending.rounds == 0 and voided == HOLD and kept.settled.rounds > 0  # settled credit stays
    assert others.voided.rounds == 0


def test_an_acquittal_costs_the_accusers_their_stake():
    branch = Branch()
    record = branch.chain.certificate(branch.chain.head)
    digest, update = record.digest, update_of(record)
    stakes, rule = branch.chain.stakes(record.record.body.parent), branch.chain.limits.audit
    assert set(draw_jury(digest, update.digest, stakes, rule)) == set(KEYS)
    first, second, _ = draw_auditors(digest, update.digest, LIAR, stakes, rule)
    fine = [report(record, key, passed=True) for key in OTHERS if key not in (first, second)]
    made = branch.add(report(record, first), report(record, second), *fine)
    assert made.record.body.decisions == ()  # three of six: the author has no say in its own case
    branch = Branch()
    fine = [report(record, key, passed=True) for key in OTHERS if key != first]
    made = branch.add(report(record, first), report(record, OWNER.key), *fine)
    refuted = tuple(sorted((first, OWNER.key)))
    assert made.record.body.decisions == (AuditDecision(digest, LIAR, False, refuted),)
    assert first not in branch.chain.stakes(branch.chain.head) and LIAR in branch.chain.stakes(branch.chain.head)
    assert not branch.chain.is_barred(first, branch.chain.head)


@pytest.fixture
def branch() -> Branch:
    return Branch()


def refusal(branch: Branch, made: Certificate) -> str:
    with pytest.raises(ChainError) as found:
        branch.chain.add(made)
    return str(found.value)


def test_reports_that_are_late_foreign_repeated_or_by_others_are_refused(branch):
    chain = branch.chain
    record = chain.certificate(chain.head)
    branch.add(report(record, OTHERS[0]))
    cases = {
        "carries what": report(record, OTHERS[0], passed=True),
        "was not drawn": report(record, PeerKey(sha256(b"a stranger"))),
        "no update whose credit is pending": report(chain.certificate(chain.main_chain_at(2)), OTHERS[0]),
    }
    for reason, told in cases.items():
        assert reason in refusal(branch, branch.record(told, decisions=()))
    assert "was not drawn" in refusal(branch, branch.record(report(record, LIAR, passed=True), decisions=()))
    wrong = report(record, OTHERS[1]).body
    for changed in (
        WorkReport(RUN, Round(wrong.round - 1), wrong.record, wrong.update, "replay", wrong.scores),
        WorkReport(RUN, wrong.round, wrong.record, Digest(sha256(b"other")), "replay", wrong.scores),
        WorkReport(RUN, wrong.round, Digest(sha256(b"other")), wrong.update, "replay", wrong.scores),
    ):
        made = branch.record(FakeSigner(OTHERS[1]).sign(changed), decisions=())
        assert "no update whose credit is pending" in refusal(branch, made)
    branch.add(report(record, OTHERS[1]), report(record, OTHERS[0], check="appeal"))
    branch.add(*(report(record, key) for key in OTHERS[2:]))
    late = report(record, OTHERS[1], check="appeal")
    assert "has decided" in refusal(branch, branch.record(late, decisions=()))


def test_a_report_is_carried_until_its_update_settles(branch):
    record = branch.chain.certificate(branch.chain.head)
    for _ in range(HOLD - 1):
        branch.add()
    branch.add(report(record, OTHERS[0]))
    assert "is pending" in refusal(branch, branch.record(report(record, OTHERS[1]), decisions=()))


def test_a_record_states_exactly_the_decisions_that_follow(branch):
    record = branch.chain.certificate(branch.chain.head)
    told = [report(record, key) for key in OTHERS]
    for wrong in (
        (), (AuditDecision(record.digest, LIAR, False),), (AuditDecision(record.digest, LIAR, True, (OTHERS[0],)),),
        (AuditDecision(record.digest, LIAR, True), AuditDecision(record.digest, OTHERS[0], True)),
    ):  # fmt: skip
        assert "other decisions" in refusal(branch, branch.record(*told, decisions=wrong))
    invented = (AuditDecision(record.digest, LIAR, True),)
    assert "other decisions" in refusal(branch, branch.record(decisions=invented))


def test_the_convicted_are_in_no_record_while_they_are_barred(branch):
    record = branch.chain.certificate(branch.chain.head)
    told = [report(record, key) for key in OTHERS]
    chain, parent = branch.chain, branch.chain.head
    made = branch.record(*told)
    with_liar = branch.record()
    listed = tuple(sorted((*made.record.body.updates, update_of(with_liar)), key=lambda u: u.author))
    body = made.record.body
    both = RoundRecord(
        RUN, body.round, parent, STATE, 0, listed, None, chain.weights(parent, listed), body.reports, body.decisions
    )
    assert "whom it convicts" in refusal(branch, certificate(FakeSigner(LIAR).sign(both), [u.author for u in listed]))
    assert chain.add(made)
    first = chain.next_window(LIAR, chain.head)
    header = FakeSigner(LIAR).sign(
        UpdateHeader(RUN, chain.height(chain.head), chain.head, STATE, first, first + 1, 1, STATE, 9, 1.0, b"")
    )
    lone = RoundRecord(RUN, chain.height(chain.head), chain.head, STATE, 0, (header,))
    assert "is barred" in refusal(branch, certificate(FakeSigner(LIAR).sign(lone), [LIAR]))
