"""A peer's part in audits: the checks that it is drawn for, and its reports until a record carries them.

It audits as an auditor what the certificate digest makes due, replays what a loss check found strange, and replays as
a juror what two auditors accuse. The checks themselves are its driver's: `AuditUpdate`, answered by `UpdateAudited`.
"""

from __future__ import annotations

from protocol.audits import due_audits
from protocol.bounded import BoundedDict
from protocol.ids import Digest
from protocol.messages import AuditCheck, Signed, WorkReport
from protocol.rounds.actions import AuditUpdate, Broadcast
from protocol.rounds.context import Context
from protocol.rounds.events import UpdateAudited

MAX_ASKED = 1024
"""Checks that are remembered, so that none is made twice."""


class WorkAuditor:
    """The checks that this peer makes. `is_able`: its driver can make them; otherwise it only passes reports on."""

    def __init__(self, context: Context, *, is_able: bool):
        self._context = context
        self._is_able = is_able
        self._asked: BoundedDict[tuple[Digest, Digest, AuditCheck], None] = BoundedDict(MAX_ASKED)

    def receive(self, report: Signed[WorkReport]) -> None:
        """Take in a report of anybody."""
        self._context.reports.add(report)

    def round_begun(self, parent: Digest) -> None:
        """Make the checks of the record before the round that are ours, and repeat reports that no record carries."""
        context, chain = self._context, self._context.chain
        context.reports.prune()
        for report in context.reports.by(context.me):
            context.emit(Broadcast(report))
        if parent == chain.root or not self._is_able:
            return
        certificate = chain.certificate(parent)
        stakes, rule = chain.stakes(certificate.record.body.parent), chain.limits.audit
        for audit in due_audits(certificate, stakes, rule):
            if context.me in audit.auditors:
                for check in audit.checks:
                    self._ask(parent, audit.update, check)
        following = chain.reports_after(parent)
        for report in certificate.record.body.reports:
            if context.me in following.jury_of(report):
                self._ask(report.body.record, report.body.update, "replay")

    def audited(self, event: UpdateAudited) -> None:
        """Report what a check measured. An update that fails a loss check is replayed."""
        context, chain = self._context, self._context.chain
        if event.record not in chain:
            return
        number = chain.certificate(event.record).record.body.round
        report = context.signer.sign(
            WorkReport(context.run, number, event.record, event.update, event.check, event.scores)
        )
        if event.check == "loss" and not report.body.passed:
            self._ask(event.record, event.update, "replay")
        if context.reports.add(report):
            context.emit(Broadcast(report))

    def _ask(self, record: Digest, update: Digest, check: AuditCheck) -> None:
        if (record, update, check) not in self._asked:
            self._asked[record, update, check] = None
            self._context.emit(AuditUpdate(self._context.chain.certificate(record), update, check))

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the size and the bound of each container."""
        return {"checks of updates": (len(self._asked), MAX_ASKED)} | self._context.reports.sizes()
