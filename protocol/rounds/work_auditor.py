"""A peer's part in audits: the checks that it is drawn for, and its reports until a record carries them.

The first auditor that is drawn for an update makes the checks that are due, and replays what its loss check found
strange. The other auditors replay what one of them accuses, and jurors what two accuse. So an honest update costs the
swarm one check and not three. The owner's auditor makes all checks that are due, and replays what anybody accuses. The
checks themselves are the driver's: `AuditUpdate`, answered by `UpdateAudited`.
"""

from __future__ import annotations

from itertools import islice

from protocol.audits import due_audits
from protocol.bounded import BoundedDict
from protocol.carried_reports import CarriedReports
from protocol.ids import Digest, PeerKey
from protocol.message_codec import Signer
from protocol.messages import AuditCheck, Signed, WorkReport
from protocol.rounds.actions import AuditUpdate, Broadcast
from protocol.rounds.context import Context
from protocol.rounds.events import UpdateAudited

MAX_ASKED = 1024
"""Checks that are remembered, so that none is made twice."""

MAX_CONTRADICTED = 1024
"""Accusers that are remembered because their accusation was wrong."""


class WorkAuditor:
    """The checks that this peer makes. `reporter` signs its reports; without one it only passes others' on."""

    def __init__(self, context: Context, reporter: Signer | None):
        self._context = context
        self._reporter = reporter
        self._asked: BoundedDict[tuple[Digest, Digest, AuditCheck], PeerKey | None] = BoundedDict(MAX_ASKED)
        """The checks that were asked for, each with the accuser on whose word it was."""
        self._contradicted: BoundedDict[PeerKey, None] = BoundedDict(MAX_CONTRADICTED)
        """Accusers of an update that passed our own replay: their word alone starts no other one here."""

    @property
    def has_say(self) -> bool:
        """False while no record may carry a report by our key, and none will by the work that it has done.

        Every report of the owner may be carried. Another key needs stake at a record whose credit is pending, or an
        update in one of these records, which may become stake.
        """
        reporter, chain = self._reporter, self._context.chain
        if reporter is None or reporter.key == chain.limits.audit.owner:
            return reporter is not None
        return any(
            chain.stakes(record).get(reporter.key)
            or (record != chain.root and reporter.key in chain.certificate(record).record.body.contributors)
            for record in islice(chain.ancestors(chain.head), chain.limits.stake.hold_rounds)
        )

    def receive(self, report: Signed[WorkReport]) -> None:
        """Take in a report of anybody."""
        context = self._context
        if context.reports.add(report):
            self._follow(report, context.chain.reports_after(context.chain.head))

    def _follow(self, report: Signed[WorkReport], following: CarriedReports) -> None:
        """Replay an update that a report accuses, if that is ours to do."""
        body = report.body
        if self._reporter is None or report.author == (me := self._reporter.key):
            return
        accuses = body.check == "replay" and not body.passed
        trusted = accuses and report.author not in self._contradicted
        if me in following.jury_of(report) or (trusted and me in following.auditors_of(report)):
            self._ask(body.record, body.update, "replay", report.author if accuses else None)

    def round_begun(self, parent: Digest) -> None:
        """Make the checks of the record before the round that are ours, and repeat reports that no record carries."""
        context, chain = self._context, self._context.chain
        context.reports.prune()
        if self._reporter is None:
            return
        me = self._reporter.key
        for report in context.reports.by(me):
            context.emit(Broadcast(report))
        if parent == chain.root:
            return
        certificate = chain.certificate(parent)
        stakes, rule = chain.stakes(certificate.record.body.parent), chain.limits.audit
        for audit in due_audits(certificate, stakes, rule):
            if me in audit.auditors[:1] or (me == rule.owner and me != audit.author):
                for check in audit.checks:
                    self._ask(parent, audit.update, check)
        following = chain.reports_after(parent)
        for report in certificate.record.body.reports:
            self._follow(report, following)

    def audited(self, event: UpdateAudited) -> None:
        """Report what a check measured. An update that fails a loss check is replayed."""
        context, chain = self._context, self._context.chain
        if event.record not in chain or self._reporter is None:
            return
        number = chain.certificate(event.record).record.body.round
        report = self._reporter.sign(
            WorkReport(context.run, number, event.record, event.update, event.check, event.scores)
        )
        accuser = self._asked.get((event.record, event.update, event.check))
        if accuser is not None and report.body.passed:
            self._contradicted[accuser] = None
        if event.check == "loss" and not report.body.passed:
            self._ask(event.record, event.update, "replay")
        if context.reports.add(report):
            context.emit(Broadcast(report))

    def _ask(self, record: Digest, update: Digest, check: AuditCheck, accuser: PeerKey | None = None) -> None:
        if (record, update, check) not in self._asked:
            self._asked[record, update, check] = accuser
            self._context.emit(AuditUpdate(self._context.chain.certificate(record), update, check))

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the size and the bound of each container."""
        sizes = {
            "checks of updates": (len(self._asked), MAX_ASKED),
            "wrong accusers": (len(self._contradicted), MAX_CONTRADICTED),
        }
        return sizes | self._context.reports.sizes()
