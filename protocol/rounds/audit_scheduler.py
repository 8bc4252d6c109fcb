"""A peer's part in audits: the checks that it is drawn for, and its reports until a record carries them.

The first auditor that is drawn for an update screens it, makes the checks that are due, and replays what its screen or
its loss check found strange. The other auditors replay what one of them accuses, and jurors what two accuse. So an
honest update costs the swarm one check and not three. The owner's auditor makes all checks that are due, and replays
what anybody accuses. The checks themselves are the driver's: `AuditUpdate`, answered by `UpdateAudited` or
`AuditNotMade`.

A check that could not be made is requested again in later rounds, while a record may still carry its report. A peer
that was away, or has started again, catches up: it requests the checks of all records whose reports may still be
carried. It repeats none whose report a record carries, and makes none of an author that is convicted already, unless
its vote may cost others the stake who spared that author.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from protocol.audits import SCREENED_UPDATES, AuditSeeds, UpdateCheck, due_audits, first_auditors
from protocol.bounded import BoundedDict
from protocol.carried_reports import CarriedReports
from protocol.ids import Digest, PeerKey
from protocol.message_codec import Signer
from protocol.messages import Signed, WorkReport
from protocol.report_rule import is_narrow
from protocol.rounds.actions import AuditUpdate, Broadcast
from protocol.rounds.context import Context
from protocol.rounds.events import AuditNotMade, UpdateAudited

MAX_ASKED = 16_384
"""Checks that are remembered while their reports may be carried, so that none is made twice."""

MAX_ATTEMPTS = 5
"""Requests for one check. After attempt n fails, the next comes 2^(n - 1) rounds later: the last after 15 rounds."""

MAX_CONTRADICTED = 1024
"""Accusers that are remembered because their accusation was wrong."""

UPDATES_AT_ONCE = 1024
"""Updates of earlier records that are looked at in one round: the draws of many take long."""


class _Name(NamedTuple):
    """A check of an update (header digest) of a record. `seed`: of a loss check alone, whose windows it draws."""

    record: Digest
    update: Digest
    check: UpdateCheck
    seed: bytes

    @classmethod
    def of(cls, record: Digest, update: Digest, check: UpdateCheck, seed: bytes) -> _Name:
        return cls(record, update, check, seed if check == "loss" else b"")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A check that was requested. `accuser`: the one on whose word it was. `is_accused`: as in `AuditUpdate`."""

    accuser: PeerKey | None = None
    is_accused: bool = False
    attempts: int = 1
    again_at: int | None = None
    """The round in which to request it again, after an attempt that failed."""


class AuditScheduler:
    """The checks that this peer makes. `report_signer` signs its reports; without one it only passes others' on."""

    def __init__(self, context: Context, report_signer: Signer | None):
        self._context = context
        self._signer = report_signer
        self._asked: BoundedDict[_Name, _Asked] = BoundedDict(MAX_ASKED)
        self._seen: set[Digest] = set()
        """Records of the branch that have drawn checks, as far as reports of these may still be carried."""
        self._contradicted: BoundedDict[PeerKey, None] = BoundedDict(MAX_CONTRADICTED)
        """Accusers of an update that passed our own replay: their word alone starts no other one here."""

    def receive(self, report: Signed[WorkReport]) -> None:
        """Take in a report of anybody."""
        context = self._context
        if context.reports.add(report):
            self._follow(report, context.chain.reports_after(context.chain.head))

    def _follow(self, report: Signed[WorkReport], following: CarriedReports) -> None:
        """Replay an update that a report accuses, if that is ours to do."""
        body = report.body
        if self._signer is None or self._context.is_resting:
            return
        if report.author == (me := self._signer.key):
            if body.check == "loss" and not body.passed:
                self._ask(following, body.record, body.update, "replay", _Asked())
            return
        accuses = body.check == "replay" and not body.passed
        trusted = accuses and report.author not in self._contradicted
        if me in following.jury_of(report) or (trusted and me in following.auditors_of(report)):
            asked = _Asked(report.author if accuses else None, is_accused=True)
            self._ask(following, body.record, body.update, "replay", asked)

    def round_begun(self, parent: Digest) -> None:
        """Request the checks of the records up to `parent` that are ours, and repeat reports that no record carries."""
        context, chain = self._context, self._context.chain
        context.reports.prune()
        if self._signer is None or context.is_resting:
            return
        me = self._signer.key
        following = chain.reports_after(parent)
        for report in context.reports.by(me):
            if following.report_refusal(report) is None:
                context.emit(Broadcast(report))
        for record in self._unseen(parent):
            self._request_checks(record, following)
        self._request_again(parent, following)

    def _unseen(self, parent: Digest) -> Iterator[Digest]:
        """Yield the records up to `parent`, newest first, that draw checks which were not requested; not too many."""
        chain, updates = self._context.chain, 0
        branch = [r for r in islice(chain.ancestors(parent), chain.limits.stake.hold_rounds) if r != chain.root]
        self._seen.intersection_update(branch)
        oldest = chain.height(parent) - chain.limits.stake.hold_rounds
        for name in [n for n in self._asked if n.record not in chain or chain.height(n.record) < oldest]:
            del self._asked[name]
        for record in branch:
            if record not in self._seen:
                updates += len(chain.certificate(record).record.body.updates)
                if updates > UPDATES_AT_ONCE and record != parent:
                    return
                self._seen.add(record)
                yield record

    def _request_checks(self, record: Digest, following: CarriedReports) -> None:
        """Request the checks that are ours of those that a record draws, and those that its reports have us make.

        The record's seed draws the audits of its own updates that are always due, and the other audits of its parent's
        updates.
        """
        chain, body = self._context.chain, self._context.chain.certificate(record).record.body
        seed = chain.seed(record)
        self._request_due(record, AuditSeeds(seed, None), following)
        if body.parent != chain.root:
            self._request_due(body.parent, AuditSeeds(None, seed), following)
        for report in body.reports:
            self._follow(report, following)

    def _request_due(self, record: Digest, seeds: AuditSeeds, following: CarriedReports) -> None:
        """Request the checks of a record that these seeds draw, and that are ours."""
        chain, me = self._context.chain, None if self._signer is None else self._signer.key
        body, rule = chain.certificate(record).record.body, chain.limits.audit
        stakes = chain.audit_stakes(record)
        convicted = chain.reports_after(record).convicted_stake  # of the record's own branch: the same at any time
        due = due_audits(body, seeds, stakes, rule, convicted)
        replayed = set[Digest]()
        for audit in due:
            if me in audit.auditors[:1] or (me == rule.owner and me != audit.author):
                self._ask(following, record, audit.update, audit.check, _Asked())
                replayed.update({audit.update} if audit.check == "replay" else ())
        self._request_screens(record, seeds, following, replayed)

    def _request_screens(
        self, record: Digest, seeds: AuditSeeds, following: CarriedReports, replayed: Collection[Digest]
    ) -> None:
        """Request the screens of a record's updates that are ours to make, except of those that we replay anyway.

        A peer that does not train holds no updates, and so makes no screens.
        """
        chain = self._context.chain
        body, rule = chain.certificate(record).record.body, chain.limits.audit
        updates, stakes = body.updates, chain.audit_stakes(record)
        me = None if self._signer is None else self._signer.key
        if self._context.observer or len(updates) < SCREENED_UPDATES or not rule.replay_rate:
            return
        first = first_auditors(body, seeds, stakes, rule)
        for update in updates:
            if update.author == me or update.digest in replayed:
                continue
            if update.digest in first and me in (rule.owner, first[update.digest]):
                self._ask(following, record, update.digest, "screen", _Asked())

    def _request_again(self, parent: Digest, following: CarriedReports) -> None:
        """Request the checks again that could not be made, and whose time has come."""
        chain = self._context.chain
        number = chain.height(parent)
        due = [n for n, asked in self._asked.items() if asked.again_at is not None and asked.again_at <= number]
        for name in due:
            asked, seed = self._asked[name], following.audit_seed(name.record, name.update)
            again = replace(asked, again_at=None)
            if seed is not None and name == _Name.of(*name[:3], seed) and self._is_wanted(following, *name[:3]):
                self._request(*name[:3], seed, replace(again, attempts=asked.attempts + 1))
            else:
                self._asked[name] = again

    def answered(self, event: UpdateAudited | AuditNotMade) -> None:
        """Follow the driver's answer to a request."""
        if isinstance(event, UpdateAudited):
            self._audited(event)
        else:
            self._not_made(event)

    def _audited(self, event: UpdateAudited) -> None:
        """Report what a check measured. An update that fails a loss check is replayed."""
        context, chain = self._context, self._context.chain
        if event.record not in chain or self._signer is None:
            return
        following = chain.reports_after(chain.head)
        asked = self._asked.get(_Name.of(event.record, event.update, event.check, event.seed))
        if event.check == "loss" and event.seed != following.audit_seed(event.record, event.update):
            return  # it compared windows that this branch has not drawn
        if event.check == "screen":
            if any(not s.passed for s in event.scores):
                self._ask(following, event.record, event.update, "replay", _Asked())
            return
        number = chain.certificate(event.record).record.body.round
        report = self._signer.sign(
            WorkReport(context.run, number, event.record, event.update, event.check, event.scores)
        )
        if asked is not None and asked.accuser is not None and report.body.passed and not is_narrow(event.scores):
            self._contradicted[asked.accuser] = None
        self._follow(report, following)
        if context.reports.add(report):
            context.emit(Broadcast(report))

    def _not_made(self, event: AuditNotMade) -> None:
        """Have a check that could not be made requested again later."""
        name = _Name.of(event.record, event.update, event.check, event.seed)
        asked, chain = self._asked.get(name), self._context.chain
        if asked is not None and asked.attempts < MAX_ATTEMPTS:
            again_at = chain.height(chain.head) + 2 ** (asked.attempts - 1)
            self._asked[name] = replace(asked, again_at=again_at)

    def _ask(
        self, following: CarriedReports, record: Digest, update: Digest, check: UpdateCheck, asked: _Asked
    ) -> None:
        """Request a check that was not requested before, if a record may still carry its report.

        An accusation requests again a check that has no report yet: it then comes before others, and at once after
        failures.
        """
        seed = following.audit_seed(record, update)
        if seed is None:
            return
        old = self._asked.get(_Name.of(record, update, check, seed))
        is_raised = old is not None and asked.is_accused and not old.is_accused
        is_due = old is None or (is_raised and not self._has_report(record, update, check))
        if is_due and self._is_wanted(following, record, update, check):
            self._request(record, update, check, seed, asked)

    def _has_report(self, record: Digest, update: Digest, check: UpdateCheck) -> bool:
        """Return whether we have reported what a check measured, as far as we keep it."""
        own = () if self._signer is None else self._context.reports.by(self._signer.key)
        return any((r.body.record, r.body.update, r.body.check) == (record, update, check) for r in own)

    def _is_wanted(self, following: CarriedReports, record: Digest, update: Digest, check: UpdateCheck) -> bool:
        """Return whether a record may carry our report. A screen is followed by the report of a replay, if by any."""
        signer, reported = self._signer, "replay" if check == "screen" else check
        return signer is not None and following.refusal(record, update, signer.key, reported) is None

    def _request(self, record: Digest, update: Digest, check: UpdateCheck, seed: bytes, asked: _Asked) -> None:
        self._asked[_Name.of(record, update, check, seed)] = asked
        certificate = self._context.chain.certificate(record)
        self._context.emit(AuditUpdate(certificate, update, check, seed, is_accused=asked.is_accused))

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the size and the bound of each container."""
        sizes = {
            "checks of updates": (len(self._asked), MAX_ASKED),
            "records with checks": (len(self._seen), self._context.chain.limits.stake.hold_rounds),
            "wrong accusers": (len(self._contradicted), MAX_CONTRADICTED),
        }
        return sizes | self._context.reports.sizes()
