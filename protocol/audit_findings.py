"""The reports behind a decision, and what they measured, as one sentence for people. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from protocol.ids import PeerKey
from protocol.messages import AuditDecision, Certificate, Signed, WorkReport

_NAMES = {"replay": "replays", "loss": "loss checks"}

Attributed = tuple[PeerKey, WorkReport]
"""A work report with its author."""

MAX_NAMES = 3
"""Reporters, and scores, that a sentence names; the others are counted."""


@dataclass(frozen=True, slots=True)
class FailedScore:
    """A score that failed reports have in common: its least and greatest value, and the greatest threshold."""

    name: str
    least: float
    greatest: float
    threshold: float

    def __str__(self) -> str:
        values = f"{self.least:.3g}" if self.least == self.greatest else f"{self.least:.3g} to {self.greatest:.3g}"
        return f"{self.name} {values} where {self.threshold:.3g} is needed"


def reports_behind(decision: AuditDecision, newest_first: Iterable[Certificate]) -> tuple[Attributed, ...]:
    """Return the reports on the update that a decision is about, in the order in which a branch carries them.

    `newest_first` are the certificates of the branch from the deciding record down. Without the audited one among them
    nothing is returned.
    """
    found: list[Signed[WorkReport]] = []
    for certificate in newest_first:
        body = certificate.record.body
        if certificate.digest == decision.record:
            update = next((u.digest for u in body.updates if u.author == decision.author), None)
            return tuple((r.author, r.body) for r in reversed(found) if r.body.update == update)
        found += (r for r in reversed(body.reports) if r.body.record == decision.record)
    return ()


def failed_reports(reports: Iterable[Attributed]) -> tuple[Attributed, ...]:
    """Return the failed replays; the failed loss checks if there is no replay among them."""
    failed = tuple(r for r in reports if not r[1].passed)
    return tuple(r for r in failed if r[1].check == "replay") or failed


def failed_scores(reports: Iterable[WorkReport]) -> tuple[FailedScore, ...]:
    """Return the scores below their thresholds in these reports, by ascending name."""
    found: dict[str, FailedScore] = {}
    for report in reports:
        for s in report.scores:
            if s.value < s.threshold:
                old = found.get(s.name, FailedScore(s.name, s.value, s.value, s.threshold))
                found[s.name] = FailedScore(
                    s.name, min(old.least, s.value), max(old.greatest, s.value), max(old.threshold, s.threshold)
                )
    return tuple(found[name] for name in sorted(found))


def describe_failures(reports: Iterable[Attributed], name_of: Callable[[PeerKey], str] = lambda key: key.short) -> str:
    """Return what failed reports measured and who measured it; "" if none failed."""
    failed = failed_reports(reports)
    if not failed:
        return ""
    reporters = tuple(dict.fromkeys(key for key, _ in failed))
    scores = failed_scores(report for _, report in failed)
    measured = "; ".join(str(s) for s in scores[:MAX_NAMES])
    others = f" and {len(scores) - MAX_NAMES} other scores" if len(scores) > MAX_NAMES else ""
    return f"the {_NAMES[failed[0][1].check]} of {_names(reporters, name_of)} found {measured}{others}"


def _names(keys: tuple[PeerKey, ...], name_of: Callable[[PeerKey], str]) -> str:
    shown = ", ".join(map(name_of, keys[:MAX_NAMES]))
    more = len(keys) - MAX_NAMES
    peers = f"{len(keys)} peer{'s' * (len(keys) != 1)}"
    return f"{peers} ({shown}{f' and {more} more' if more > 0 else ''})"
