"""A peer follows accusations of those whose word was right, and of those whose word it never had to doubt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from protocol.audits import draw_auditors
from protocol.ids import PeerKey
from protocol.messages import Certificate, Score
from protocol.rounds.actions import AuditUpdate
from protocol.rounds.events import UpdateAudited
from protocol.rounds.report_pool import ReportPool
from protocol.rounds.work_auditor import WorkAuditor
from tests.simulation.signer import FakeSigner
from tests.support.audited_branch import OTHERS, Branch, accused, report, update_of
from tests.support.empty_chain import RUN


class Auditor:
    """A work auditor of one key, and what it asks its driver for."""

    def __init__(self, branch: Branch, me: PeerKey):
        self.asked: list[Any] = []
        context = SimpleNamespace(
            me=me, run=RUN, chain=branch.chain, reports=ReportPool(me, branch.chain), signer=FakeSigner(me),
            emit=lambda action: self.asked.append(action) if isinstance(action, AuditUpdate) else None,
        )  # fmt: skip
        self.work = WorkAuditor(cast(Any, context), is_able=True)

    def pass_all(self) -> None:
        """Answer that each update passed."""
        for action in self.asked:
            self.work.audited(
                UpdateAudited(action.certificate.digest, action.update, action.check, (Score("signs", 1.0, 0.97),))
            )
        self.asked.clear()


def drawn(branch: Branch, record: Certificate, author: PeerKey) -> tuple[PeerKey, ...]:
    stakes = branch.chain.stakes(record.record.body.parent)
    return draw_auditors(record.digest, update_of(record, author).digest, author, stakes, branch.chain.limits.audit)


def follows(branch: Branch, auditor: Auditor, me: PeerKey, accuser: PeerKey) -> bool:
    """Return whether an accusation by a key, of an update that both audit, has this peer replay it."""
    auditor.asked.clear()
    for _ in range(50):
        record = branch.add()
        for author in OTHERS:
            if {me, accuser} <= set(drawn(branch, record, author)):
                auditor.work.receive(report(record, accuser, author=author))
                return bool(auditor.asked)
    raise AssertionError("no update has both auditors")


def test_an_accuser_who_was_wrong_is_not_followed_again():
    branch = Branch()
    record = branch.chain.certificate(branch.chain.head)
    accuser, me, _ = drawn(branch, record, update_of(record).author)
    auditor = Auditor(branch, me)
    auditor.work.receive(report(record, accuser))
    assert [a.update for a in auditor.asked] == [update_of(record).digest]
    auditor.pass_all()
    assert not follows(branch, auditor, me, accuser)
    assert follows(branch, auditor, me, next(k for k in OTHERS if k not in (me, accuser)))


def test_a_reporter_who_said_that_an_update_passes_is_still_followed_when_it_does():
    branch = Branch()
    record, accusers, others = accused(branch)
    honest = next(k for k in drawn(branch, record, update_of(record).author) if k not in accusers)
    me = next(k for k in others if k != honest)
    auditor = Auditor(branch, me)
    auditor.work.receive(report(record, honest, passed=True))  # its report has this juror begin
    assert len(auditor.asked) == 1
    auditor.pass_all()
    assert follows(branch, auditor, me, honest)
