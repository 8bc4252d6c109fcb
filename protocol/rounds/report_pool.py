"""Work reports for the records that this peer proposes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from protocol.carried_reports import ANSWER
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, sha256
from protocol.message_codec import report_place
from protocol.messages import MAX_REPORTS, AuditDecision, Signed, WorkReport

MAX_POOLED = 1024
MAX_ANSWERS = 48
"""Answers to accusations in a record while other reports wait: a jury of 64 seats decides by 43.

Else two keys that accuse all the time would keep all other accusations out until it is too late for these.
"""


class ReportPool:
    """Reports that a record after the chain's head may carry: bounded, and only by keys that were drawn for them."""

    def __init__(self, me: PeerKey, chain: Chain):
        """`me`: the key that signs this peer's reports."""
        self._me = me
        self._chain = chain
        self._pruned_at: Digest | None = None
        """The head at which a full pool was searched last for what no record may carry any more."""
        self._reports: dict[tuple[bytes, bytes, bytes, str], Signed[WorkReport]] = {}

    def add(self, report: Signed[WorkReport]) -> bool:
        """Add a report. Return whether it is new, and may be carried.

        In a full pool the key with the most reports makes room for others: it will repeat what is dropped.
        """
        place = report_place(report)
        known = self._reports.get(place)
        if known is not None and (report.author != self._me or known.digest == report.digest):
            return False  # of its own, a newer one may be of the windows of another branch
        if not self._may_be_carried(report):
            return False
        if len(self._reports) >= MAX_POOLED and self._pruned_at != self._chain.head:
            self._pruned_at = self._chain.head
            self._keep(self._may_be_carried)
        if len(self._reports) >= MAX_POOLED:
            counts = Counter(r.author for r in self._reports.values())
            author, most = counts.most_common(1)[0]
            if most <= counts[report.author] + 1:
                return False
            del self._reports[next(p for p, r in self._reports.items() if r.author == author)]
        self._reports[place] = report
        return True

    def prune(self) -> None:
        """Drop what no record after the head may carry: it is carried, late, or of another branch.

        Our own stay as long as their record may come back to the head's branch: nobody else has them then.
        """
        chain = self._chain
        oldest = chain.height(chain.head) - chain.limits.stake.hold_rounds

        def may_return(report: Signed[WorkReport]) -> bool:
            record = report.body.record
            return report.author == self._me and record in chain and chain.height(record) > oldest

        self._keep(lambda report: may_return(report) or self._may_be_carried(report))

    def _may_be_carried(self, report: Signed[WorkReport]) -> bool:
        return self._chain.reports_after(self._chain.head).report_refusal(report) is None

    def _keep(self, is_kept: Callable[[Signed[WorkReport]], bool]) -> None:
        self._reports = {place: report for place, report in self._reports.items() if is_kept(report)}

    def by(self, key: PeerKey) -> list[Signed[WorkReport]]:
        """Return the reports of a key."""
        return [report for report in self._reports.values() if report.author == key]

    def to_include(self, parent: Digest) -> tuple[tuple[Signed[WorkReport], ...], tuple[AuditDecision, ...]]:
        """Return the reports that a record of ours after `parent` carries, and the decisions that follow.

        Those of the greatest `CarriedReports.urgency` go first. Of equal ones the first of each key go before any
        key's second, and then chance decides among the keys: what a key may choose does not count. Accusations
        beyond a key's limit stay for later records. Reports that convict us are left to other proposers: the convicted
        cannot be in the record.
        """
        following, seed = self._chain.reports_after(parent), self._chain.seed(parent)

        def order(report: Signed[WorkReport]) -> tuple[int, bytes]:
            return -following.urgency(report), sha256(seed, report.author)

        possible = [r for _, r in sorted(self._reports.items()) if following.report_refusal(r) is None]
        turns: Counter[tuple[int, PeerKey]] = Counter()
        answers, others = [], []
        for report in following.within_limit(sorted(possible, key=order)):
            urgency, chance = order(report)
            turns[urgency, report.author] += 1
            ranked = urgency, turns[urgency, report.author], chance, report
            (answers if urgency == -ANSWER else others).append(ranked)
        answers, others = ([r for *_, r in sorted(some, key=lambda item: item[:3])] for some in (answers, others))
        reports = [*answers[:MAX_ANSWERS], *others, *answers[MAX_ANSWERS:]][:MAX_REPORTS]
        mine = {d.record for d in following.decisions(reports) if d.convicted and d.author == self._me}
        reports = sorted((r for r in reports if r.body.record not in mine), key=report_place)
        return tuple(reports), following.decisions(reports)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the size and the bound of each container."""
        return {"work reports": (len(self._reports), MAX_POOLED)}
