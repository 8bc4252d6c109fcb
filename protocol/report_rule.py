"""The rule by which work reports convict the author of an update, or cost their own authors the stake. Pure.

Two failed replays by different auditors accuse. Most of a jury's votes (`Jury.needed`) convict, with failed replays of
their own; as many with passed ones acquit. Loss checks choose what is replayed and decide nothing. A replay that says
the opposite of what so many votes clearly say costs its author the stake: that keeps auditors honest. Numbers close
to a threshold say nothing clearly. Devices round differently, and an author could aim between two kinds of them.
Jurors may go on to report after a decision, until the votes suffice: no minority decides by its numbers whose stake is
lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from protocol.audits import AuditRule, Jury, draw_auditors, draw_jury
from protocol.ids import PeerKey
from protocol.messages import AuditDecision, Certificate, Score, Signed, UpdateHeader, WorkReport

ACCUSERS = 2
"""Auditors who must report a failure before a jury's reports count against an author."""

NARROW = 0.015
"""Shares of equal signs by which two replays of an update in one precision differed at most, but for 6 pairs of 1,000.

Measured for 12 updates on the five machines of `benchmarks.adversaries.honest`. Ratios of norms differed by less.
"""


def drawn_reporters(
    seed: bytes, update: Signed[UpdateHeader], stakes: Mapping[PeerKey, int], rule: AuditRule
) -> tuple[set[PeerKey], Jury]:
    """Return the auditors of an update, with the owner, and its jury.

    `seed`: the one that drew its audit.
    """
    author = update.author
    owner = set() if rule.owner is None else {rule.owner}
    auditors = {*draw_auditors(seed, author, stakes, rule), *owner} - {author}
    return auditors, draw_jury(seed, author, stakes, rule)


def accusers(reports: Iterable[Signed[WorkReport]], auditors: set[PeerKey]) -> set[PeerKey]:
    """Return the auditors whose first replay of an update failed."""
    return {key for key, replay in _replays(reports, auditors).items() if not replay.passed}


def _replays(reports: Iterable[Signed[WorkReport]], drawn: set[PeerKey]) -> dict[PeerKey, WorkReport]:
    """Return the replay of an update by each of these keys that made one: of one key the first report counts."""
    found: dict[PeerKey, WorkReport] = {}
    for report in reports:
        if report.author in drawn and report.body.check == "replay":
            found.setdefault(report.author, report.body)
    return found


def is_narrow(scores: Iterable[Score]) -> bool:
    """Return whether the score that is least above its threshold, or most below it, is close to it."""
    return abs(min((s.value - s.threshold for s in scores), default=0.0)) < NARROW


def decide(
    certificate: Certificate,
    seed: bytes,
    update: Signed[UpdateHeader],
    reports: Iterable[Signed[WorkReport]],
    stakes: Mapping[PeerKey, int],
    rule: AuditRule,
    *,
    is_decided: bool = False,
) -> AuditDecision | None:
    """Return the decision about an update of a record; None while there is none.

    `reports` are in the order in which the chain carries them: of one key and check the first counts. Only those on
    this update count, by its auditors, its jury and the owner. `stakes` are those of `Chain.audit_stakes`. `seed` is
    the one that drew the update's audit. `is_decided`: the chain has one about the update already, which refutes
    nobody. Then only one that refutes may follow.
    """
    digest, author = certificate.digest, update.author
    auditors, jury = drawn_reporters(seed, update, stakes, rule)
    name = digest, certificate.record.body.round, update.digest
    on_update = [r for r in reports if (r.body.record, r.body.round, r.body.update) == name]
    if len(accusers(on_update, auditors)) < ACCUSERS:
        return None
    votes = jury.votes
    results = _replays(on_update, {*auditors, *votes} - {author})
    for passed in (True, False):
        agreeing = {key: votes[key] for key, replay in results.items() if key in votes and replay.passed is passed}
        if sum(agreeing.values()) >= jury.needed:
            clear = sum(n for key, n in agreeing.items() if not is_narrow(results[key].scores))
            opposite = (key for key, replay in results.items() if replay.passed is not passed)
            refuted = tuple(sorted(opposite)) if clear >= jury.needed else ()
            if is_decided and not refuted:
                return None
            return AuditDecision(digest, author, not passed and not is_decided, refuted)
    return None


def may_refute(
    decision: AuditDecision, reports: Iterable[Signed[WorkReport]], jury: Jury, stakes: Mapping[PeerKey, int]
) -> bool:
    """Return whether jurors' votes may yet cost anybody the stake who reported the opposite of a decision.

    `reports`: those by auditors and jurors on the update, in their order. Somebody among them must have stake to lose,
    and the votes that are clear or not cast yet must suffice.
    """
    results = _replays(reports := tuple(reports), {r.author for r in reports})
    opposite = {key for key, replay in results.items() if replay.passed is decision.convicted}
    narrow = {key for key, replay in results.items() if is_narrow(replay.scores)}
    left = sum(votes for key, votes in jury.votes.items() if key not in opposite | narrow and key != decision.author)
    return any(stakes.get(key, 0) for key in opposite) and left >= jury.needed
