"""The rule by which work reports convict the author of an update, or cost their own authors the stake. Pure.

Two failed replays by different auditors accuse. More than half of a jury's votes convict, with failed replays of
their own; as many with passed ones acquit. All present keys with stake are the jury, and vote with it; of more than 64
keys, 64 seats are drawn. Loss checks choose what is replayed and decide nothing. A replay that says the opposite of
what a jury decided costs its author the stake: that keeps auditors honest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from protocol.audits import AuditRule, draw_auditors, draw_jury
from protocol.ids import PeerKey
from protocol.messages import AuditDecision, Certificate, Signed, UpdateHeader, WorkReport

ACCUSERS = 2
"""Auditors who must report a failure before a jury's reports count against an author."""


def drawn_reporters(
    seed: bytes, update: Signed[UpdateHeader], stakes: Mapping[PeerKey, int], rule: AuditRule
) -> tuple[set[PeerKey], dict[PeerKey, int]]:
    """Return the auditors of an update, with the owner, and its jury with their votes.

    `seed`: the one that drew its audit.
    """
    author = update.author
    owner = set() if rule.owner is None else {rule.owner}
    auditors = {*draw_auditors(seed, author, stakes, rule), *owner} - {author}
    return auditors, draw_jury(seed, author, stakes, rule)


def accusers(reports: Iterable[Signed[WorkReport]], auditors: set[PeerKey]) -> set[PeerKey]:
    """Return the auditors whose first replay of an update failed."""
    return {key for key, passed in _replays(reports, auditors).items() if not passed}


def _replays(reports: Iterable[Signed[WorkReport]], drawn: set[PeerKey]) -> dict[PeerKey, bool]:
    """Return for each of these keys that replayed an update whether it passed: of one key the first report counts."""
    found: dict[PeerKey, bool] = {}
    for report in reports:
        if report.author in drawn and report.body.check == "replay":
            found.setdefault(report.author, report.body.passed)
    return found


def decide(
    certificate: Certificate,
    seed: bytes,
    update: Signed[UpdateHeader],
    reports: Iterable[Signed[WorkReport]],
    stakes: Mapping[PeerKey, int],
    rule: AuditRule,
) -> AuditDecision | None:
    """Return the decision about an update of a record; None while there is none.

    `reports` are in the order in which the chain carries them: of one key and check the first counts. Only those on
    this update count, by its auditors, its jury and the owner. `stakes` are those of `Chain.audit_stakes`. `seed` is
    the one that drew the update's audit.
    """
    digest, author = certificate.digest, update.author
    auditors, jury = drawn_reporters(seed, update, stakes, rule)
    name = digest, certificate.record.body.round, update.digest
    on_update = [r for r in reports if (r.body.record, r.body.round, r.body.update) == name]
    if len(accusers(on_update, auditors)) < ACCUSERS:
        return None
    results = _replays(on_update, {*auditors, *jury} - {author})
    total = sum(jury.values())
    for passed in (True, False):
        if 2 * sum(votes for key, votes in jury.items() if results.get(key) is passed) > total:
            refuted = tuple(sorted(key for key, result in results.items() if result is not passed))
            return AuditDecision(digest, author, not passed, refuted)
    return None
