"""The rule by which work reports convict the author of an update, or cost their own authors the stake. Pure.

Two failed replays or appeals by different auditors accuse. More than half of the stake of a jury that was drawn by
the certificate digest convicts, with failed reports of its own; as much stake with passed ones acquits. An appeal
decides before a replay, since it sees more. Loss checks choose what is replayed and decide nothing. A report of
the opposite of what a jury decided, by the same check, costs its author the stake: that keeps auditors honest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from protocol.audits import AuditRule, draw_auditors, draw_jury
from protocol.ids import Digest, PeerKey, Round
from protocol.messages import AuditCheck, Certificate, Signed, UpdateHeader, WorkReport

ACCUSERS = 2
"""Auditors who must report a failure before a jury's reports count against an author."""

DECIDING: tuple[AuditCheck, ...] = ("appeal", "replay")
"""Checks that convict or acquit, the stronger first."""

MAX_DOUBLINGS = 16
"""The bars of a key double no more often: 64 rounds are then four million."""


@dataclass(frozen=True, slots=True)
class AuditDecision:
    """The decision of a jury about an update of a record, and the keys that reported the opposite by the same check."""

    record: Digest
    author: PeerKey
    convicted: bool
    refuted: tuple[PeerKey, ...]


def decide(
    certificate: Certificate,
    update: Signed[UpdateHeader],
    reports: Iterable[Signed[WorkReport]],
    stakes: Mapping[PeerKey, int],
    rule: AuditRule,
    owner: PeerKey,
) -> AuditDecision | None:
    """Return the decision about an update of a record; None while there is none.

    `reports` are in the order in which the chain carries them: of one key and check the first counts. Only those on
    this update count, by its auditors, its jury and the owner. `stakes` are those at the record's parent.
    """
    digest, author = certificate.digest, update.author
    auditors = {*draw_auditors(digest, update.digest, author, stakes, rule), owner} - {author}
    jury = draw_jury(digest, update.digest, author, stakes, rule)
    passed: dict[AuditCheck, dict[PeerKey, bool]] = {check: {} for check in DECIDING}
    for report in reports:
        body = report.body
        about = (body.record, body.round, body.update) == (digest, certificate.record.body.round, update.digest)
        if about and body.check in passed and (report.author in auditors or report.author in jury):
            passed[body.check].setdefault(report.author, body.passed)
    accusers = {key for found in passed.values() for key, fine in found.items() if not fine and key in auditors}
    if len(accusers) < ACCUSERS:
        return None
    total = sum(stakes[key] for key in jury)
    for found in passed.values():
        for fine in (True, False):
            if 2 * sum(stakes[key] for key in jury if found.get(key) is fine) > total:
                refuted = tuple(sorted(key for key, told in found.items() if told is not fine))
                return AuditDecision(digest, author, not fine, refuted)
    return None


@dataclass(frozen=True, slots=True)
class AuditPenalty:
    """The cost of decisions to a key on a branch. Rounds are those of the records that carry what decided."""

    stakeless_until: Round = Round(0)
    """Its contributions to earlier rounds are no stake."""
    void_until: Round = Round(0)
    """Its contributions to earlier rounds are void, as far as they are pending."""
    convictions: int = 0
    barred_until: Round = Round(0)
    """No record of an earlier round may list its updates."""


@dataclass(frozen=True, slots=True)
class AuditPenalties:
    """The penalties of all keys after some records of a branch: one step of the fold for each decision."""

    by_key: Mapping[PeerKey, AuditPenalty] = field(default_factory=dict)
    decided: frozenset[tuple[Digest, PeerKey]] = frozenset()
    """Updates (certificate digest, author) with a decision: it stands, whatever is reported later."""

    def of(self, key: PeerKey) -> AuditPenalty:
        """Return the penalty of a key; that of most is none."""
        return self.by_key.get(key, AuditPenalty())

    def after(self, decision: AuditDecision, round_: Round, rule: AuditRule) -> AuditPenalties:
        """Return the penalties after a decision that a record of a round makes. A second on an update does nothing.

        A conviction bars from the next round on: the first for `rule.bar_rounds`, each one after it for twice as long
        as the last. One that comes while the key is barred is for work of before, and is part of the same conviction.
        """
        name = decision.record, decision.author
        if name in self.decided:
            return self
        found, following = dict(self.by_key), Round(round_ + 1)
        for key in decision.refuted:
            old = self.of(key)
            found[key] = AuditPenalty(following, old.void_until, old.convictions, old.barred_until)
        if decision.convicted:
            old = found.get(decision.author, AuditPenalty())
            is_new = round_ >= old.barred_until
            count = old.convictions + is_new
            until = following + rule.bar_rounds * 2 ** min(count - 1, MAX_DOUBLINGS) if is_new else old.barred_until
            found[decision.author] = AuditPenalty(following, following, count, Round(until))
        return AuditPenalties(found, self.decided | {name})

    def is_barred(self, key: PeerKey, round_: Round) -> bool:
        """Return whether no record of a round may list an update of this key."""
        return round_ < self.of(key).barred_until

    def is_stake(self, key: PeerKey, round_: Round) -> bool:
        """Return whether what a key contributed to a round may count as its stake."""
        return round_ >= self.of(key).stakeless_until

    def is_void(self, key: PeerKey, round_: Round) -> bool:
        """Return whether what a key contributed to a round is void, if its credit is pending."""
        return round_ < self.of(key).void_until
