"""The reports behind a decision, and what they measured, as one sentence for people. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from protocol.ids import PeerKey
from protocol.messages import AuditDecision, Certificate, Score, Signed, WorkReport

_NAMES = {"replay": "replays", "loss": "loss checks"}

Attributed = tuple[PeerKey, WorkReport]
"""A work report with its author."""

MAX_NAMES = 3
"""Reporters, and scores, that a sentence names; the others are counted."""


@dataclass(frozen=True, slots=True)
class ScoreRange:
    """A score that reports have in common: its least and greatest value, and the greatest threshold."""

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


def failed_scores(reports: Iterable[WorkReport]) -> tuple[ScoreRange, ...]:
    """Return the scores below their thresholds in these reports, by ascending name."""
    return _ranges(s for report in reports for s in report.scores if not s.passed)


def describe_failures(reports: Iterable[Attributed], name_of: Callable[[PeerKey], str] = lambda key: key.short) -> str:
    """Return what failed reports measured and who measured it; "" if none failed."""
    failed = failed_reports(reports)
    return _described(failed, failed_scores(report for _, report in failed), name_of) if failed else ""


def describe_replays(reports: Iterable[Attributed], *, passed: bool) -> str:
    """Return what the replays measured that passed, or those that failed, and who made them; "" if there are none."""
    made = tuple(r for r in reports if r[1].check == "replay" and r[1].passed is passed)
    scores = _ranges(s for _, report in made for s in report.scores)
    return _described(made, scores, lambda key: key.short) if made else ""


def describe_scores(reports: Iterable[WorkReport]) -> str:
    """Return the scores of these reports; "" if there are none."""
    return _listed(_ranges(s for report in reports for s in report.scores))


def _ranges(scores: Iterable[Score]) -> tuple[ScoreRange, ...]:
    """Return the range of each score, by ascending name."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        found.setdefault(score.name, []).append(score)
    return tuple(
        ScoreRange(name, min(s.value for s in some), max(s.value for s in some), max(s.threshold for s in some))
        for name, some in sorted(found.items())
    )


def _described(
    reports: tuple[Attributed, ...], scores: tuple[ScoreRange, ...], name_of: Callable[[PeerKey], str]
) -> str:
    """Return these scores of reports by one check, and who measured them."""
    reporters = tuple(dict.fromkeys(key for key, _ in reports))
    return f"the {_NAMES[reports[0][1].check]} of {_names(reporters, name_of)} found {_listed(scores)}"


def _listed(scores: tuple[ScoreRange, ...]) -> str:
    others = f" and {len(scores) - MAX_NAMES} other scores" if len(scores) > MAX_NAMES else ""
    return "; ".join(str(s) for s in scores[:MAX_NAMES]) + others


def _names(keys: tuple[PeerKey, ...], name_of: Callable[[PeerKey], str]) -> str:
    shown = ", ".join(map(name_of, keys[:MAX_NAMES]))
    more = len(keys) - MAX_NAMES
    peers = f"{len(keys)} peer{'s' * (len(keys) != 1)}"
    return f"{peers} ({shown}{f' and {more} more' if more > 0 else ''})"
