"""The work reports and decisions that a record may carry, by what its branch carries already. Pure.

A record carries a report while the update's credit is pending: up to `hold_rounds` rounds after its own, once its
auditors are drawn (`audits`). After a decision about the update, or a conviction that voids it, it carries none. Exempt
are jurors' replays that agree with their jury's decision, until they refute those that do not. The last quarter is for
juries: an accusation that nobody could answer would cost its authors nothing. Each is by a key that was drawn for it
and has not lost the stake that drew it, or by the owner. A branch carries one of a key, update and check, and a record
MAX_ACCUSATIONS of a key. It states the decisions that follow, no others, as it states weights: so credit can be folded
from certificates alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from protocol.audits import AuditRule, AuditSeeds, Jury, audit_seed
from protocol.ids import Digest, PeerKey
from protocol.messages import AuditCheck, AuditDecision, Certificate, RoundRecord, Signed, UpdateHeader, WorkReport
from protocol.record_node import RecordNode
from protocol.report_rule import ACCUSERS, accusers, decide, drawn_reporters, may_refute

StakesAt = Callable[[RecordNode], Mapping[PeerKey, int]]

MAX_ACCUSATIONS = 2
"""Updates that a key may accuse in one record: one loss of its stake pays for all that it accuses until a jury decides.

An honest key replays about one update in a round. There is no limit of all its undecided accusations: two hostile
auditors could use that up, by leaving those that they share with it alone.
"""

ANSWER = 3
"""The urgency of a report that answers two accusations."""

NOTHING_PENDING = "it is about no update that is audited here"
DECIDED = "a jury has decided about its update, or has convicted its author"


@dataclass
class _AuditedUpdate:
    """An update that reports are about, those drawn for it with the owner, and what the branch carries on it."""

    certificate: Certificate
    seed: bytes
    """The one that drew its audit."""
    update: Signed[UpdateHeader]
    stakes: Mapping[PeerKey, int]
    rule: AuditRule
    age: int
    """Rounds from its own to that of the next record."""
    reports: list[Signed[WorkReport]] = field(default_factory=list)
    decisions: list[AuditDecision] = field(default_factory=list)
    """Those of its jury."""
    is_void: bool = False
    """A jury has convicted its author, of it or of another update since."""

    def may_report(self, key: PeerKey) -> bool:
        """Return whether a key may be drawn. A stranger's report costs no draw: those take a millisecond or more."""
        return key == self.rule.owner or self.stakes.get(key, 0) > 0

    @cached_property
    def _drawn(self) -> tuple[set[PeerKey], Jury]:
        return drawn_reporters(self.seed, self.update, self.stakes, self.rule)

    @property
    def auditors(self) -> set[PeerKey]:
        return self._drawn[0]

    @property
    def jury(self) -> Jury:
        return self._drawn[1]

    @property
    def is_accused(self) -> bool:
        """True once the branch carries two auditors' accusations."""
        return len(accusers(self.reports, self.auditors)) >= ACCUSERS

    @property
    def is_decided(self) -> bool:
        """True once a jury has decided about it, or has convicted its author since: that voids it, too."""
        return self.is_void or bool(self.decisions)

    @property
    def is_closed(self) -> bool:
        """True once it is decided and no further report changes anything: none may refute anybody."""
        if not self.decisions or any(d.refuted for d in self.decisions):
            return self.is_decided
        return not may_refute(self.decisions[0], self.reports, self.jury, self.stakes)


class CarriedReports:
    """The reports and decisions that a branch carries up to a record, on updates whose credit is pending after it."""

    def __init__(self, parent: RecordNode, hold_rounds: int, rule: AuditRule, audit_stakes_at: StakesAt):
        """`audit_stakes_at` gives the stakes that draw auditors and juries for a record's updates."""
        self._parent = parent
        self._branch = tuple(islice(parent.branch(), hold_rounds))
        self._hold_rounds = hold_rounds
        self._rule = rule
        self._audit_stakes_at = audit_stakes_at
        self._found: dict[tuple[Digest, Digest], _AuditedUpdate] = {}

    def audit_seed(self, record: Digest, update: Digest) -> bytes | None:
        """Return the seed that drew the audit of an update; None if this branch has drawn none, or it has settled."""
        audited = self._named(record, update)
        return None if audited is None else audited.seed

    def report_refusal(self, report: Signed[WorkReport]) -> str | None:
        """Return why the next record may not carry a report; None when it may."""
        body, audited = report.body, self._audited(report)
        if audited is None:
            return NOTHING_PENDING
        if audited.decisions and body.passed is audited.decisions[0].convicted:
            return DECIDED
        return self.refusal(body.record, body.update, report.author, body.check)

    def refusal(self, record: Digest, update: Digest, author: PeerKey, check: AuditCheck) -> str | None:
        """Return why the next record may carry no report of a key about an update by a check; None when it may.

        Once the update is decided, it depends on the result, too (`report_refusal`).
        """
        audited = self._named(record, update)
        if audited is None:
            return NOTHING_PENDING
        if audited.is_closed:
            return DECIDED
        if check == "replay" and not self._rule.replay_rate:
            return "the run has no replays"
        if author == audited.update.author:
            return "its author is the update's"
        if not audited.may_report(author) or (author not in audited.auditors and author not in audited.jury.votes):
            return f"{author.short} was not drawn to report on its update"
        if self._has_lost_stake(author, audited):
            return f"{author.short} has lost the stake by which it was drawn"
        if audited.is_decided and (check != "replay" or author not in audited.jury.votes):
            return DECIDED
        if author not in audited.auditors and not audited.is_accused:
            return "a juror reports when records carry two accusations"
        if check == "replay" and not audited.is_accused and audited.age > self._hold_rounds - self._hold_rounds // 4:
            return "it accuses too late for a jury to answer"
        if any((r.author, r.body.check) == (author, check) for r in audited.reports):
            return f"an earlier record carries the report of {author.short} by this check"
        return None

    def _has_lost_stake(self, key: PeerKey, audited: _AuditedUpdate) -> bool:
        """Return whether a key has lost, since the draw for an update, the stake that drew it: it risks nothing more.

        A decision of the audited round or a later one takes the stake, and a ban while it is in force. A pardon gives
        no stake back. A bar needs no rule: it comes with such a decision. The owner is drawn by no stake.
        """
        parent = self._parent
        is_stake = parent.penalties.is_stake(key, audited.certificate.record.body.round)
        return key != self._rule.owner and (not is_stake or key in parent.directives.banned)

    def within_limit(self, reports: Iterable[Signed[WorkReport]]) -> list[Signed[WorkReport]]:
        """Return reports for the next record without those accusations of a key that come after MAX_ACCUSATIONS.

        To accuse is to say of an update that its replay failed, while the branch carries less than two accusations.
        Jurors' answers are not limited. Nor is the owner, which makes all checks and convicts nobody alone.
        """
        counts, kept = Counter[PeerKey](), list[Signed[WorkReport]]()
        for report in reports:
            if self._accuses(report):
                counts[report.author] += 1
                if counts[report.author] > MAX_ACCUSATIONS:
                    continue
            kept.append(report)
        return kept

    def _accuses(self, report: Signed[WorkReport]) -> bool:
        if report.body.check != "replay" or report.body.passed or report.author == self._rule.owner:
            return False
        audited = self._audited(report)
        return audited is not None and not audited.is_accused

    def urgency(self, report: Signed[WorkReport]) -> int:
        """Return how much a report may decide in the next record: the greater, the sooner it is carried.

        3: it answers two accusations. 2: it is the second accusation, or may refute somebody after a decision. 1: the
        first accusation, which costs nothing while it is alone. So it comes after those that may cost somebody the
        stake. 0: it decides nothing.
        """
        audited = self._audited(report)
        if audited is None or report.body.check != "replay":
            return 0
        if audited.is_decided:
            return 2  # no other replay may be carried then
        if audited.is_accused:
            return ANSWER
        if report.body.passed:
            return 0
        return 2 if accusers(audited.reports, audited.auditors) else 1

    def decisions(self, reports: Iterable[Signed[WorkReport]]) -> tuple[AuditDecision, ...]:
        """Return the decisions that follow if the next record carries these reports, in the order of a record."""
        added: dict[tuple[Digest, Digest], list[Signed[WorkReport]]] = {}
        for report in reports:
            added.setdefault((report.body.record, report.body.update), []).append(report)
        found = []
        for new in added.values():
            audited = self._audited(new[0])
            if audited is not None and not audited.is_closed:
                about = audited.certificate, audited.seed, audited.update, [*audited.reports, *new], audited.stakes
                found.append(decide(*about, self._rule, is_decided=audited.is_decided))
        return tuple(sorted((d for d in found if d is not None), key=lambda d: (d.record, d.author)))

    @cached_property
    def convicted_stake(self) -> int:
        """The stake that keys had until a record of this branch convicted them."""
        return sum(
            self._audit_stakes_at(node).get(author, 0)
            for node in self._branch
            if node.certificate is not None and node.parent is not None
            for author in {d.author for d in node.certificate.record.body.decisions if d.convicted}
        )

    def auditors_of(self, report: Signed[WorkReport]) -> set[PeerKey]:
        """Return the auditors of a report's update, with the owner, while nothing is decided about it; else nobody."""
        audited = self._audited(report)
        return set() if audited is None or audited.is_decided else audited.auditors

    def jury_of(self, report: Signed[WorkReport]) -> Collection[PeerKey]:
        """Return the jury of a report's update, while it has a case to judge; else nobody."""
        audited = self._audited(report)
        return audited.jury.votes.keys() if audited is not None and audited.is_accused and not audited.is_closed else ()

    def is_decided(self, record: Digest, update: Digest) -> bool:
        """Return whether the branch carries a decision about an update, or a later conviction of its author."""
        audited = self._named(record, update)
        return audited is not None and audited.is_decided

    def replayed_stake(self, record: Digest, update: Digest) -> int:
        """Return the stake of the keys whose replays of an update the branch carries; 0 once it is decided.

        Stake that they have lost since does not count.
        """
        audited = self._named(record, update)
        if audited is None or audited.is_decided:
            return 0
        replayed = [r.author for r in audited.reports if r.body.check == "replay"]
        return sum(audited.stakes.get(key, 0) for key in replayed if not self._has_lost_stake(key, audited))

    def record_refusal(self, record: RoundRecord) -> str | None:
        """Return why the reports and decisions of a record do not follow here; None when they do."""
        for report in record.reports:
            if (reason := self.report_refusal(report)) is not None:
                return f"it carries a report of {report.author.short}: {reason}"
        if len(self.within_limit(record.reports)) < len(record.reports):
            return f"it carries more than {MAX_ACCUSATIONS} accusations by one key"
        if record.decisions != self.decisions(record.reports):
            return "it states other decisions than those that follow from the reports"
        for decision in record.decisions:
            if decision.convicted and decision.author in record.contributors:
                return f"it lists an update of {decision.author.short}, whom it convicts"
        return None

    def _audited(self, report: Signed[WorkReport]) -> _AuditedUpdate | None:
        audited = self._named(report.body.record, report.body.update)
        right = audited is not None and audited.certificate.record.body.round == report.body.round
        return audited if right else None

    def _named(self, record: Digest, update: Digest) -> _AuditedUpdate | None:
        name = record, update
        found = self._found.get(name) or self._find(record, update)
        if found is not None:  # anybody may name updates that do not exist
            self._found[name] = found
        return found

    def _find(self, record: Digest, update: Digest) -> _AuditedUpdate | None:
        newer: list[RoundRecord] = []
        following: bytes | None = None
        for node in self._branch:
            if node.certificate is None or node.parent is None:
                return None
            body = node.certificate.record.body
            if node.digest == record:
                header = next((u for u in body.updates if u.digest == update), None)
                if header is None:
                    return None
                stakes = self._audit_stakes_at(node)
                seed = audit_seed(header, body, AuditSeeds(node.seed, following), stakes, self._rule)
                if seed is None:
                    return None
                audited = _AuditedUpdate(node.certificate, seed, header, stakes, self._rule, len(newer) + 1)
                for later in reversed(newer):
                    audited.reports += [r for r in later.reports if r.body.update == update and r.body.record == record]
                    about = [d for d in later.decisions if d.author == header.author]
                    audited.decisions += [d for d in about if d.record == record]
                    audited.is_void |= any(d.convicted for d in about)
                return audited
            newer.append(body)
            following = node.seed
        return None
