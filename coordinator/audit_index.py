"""The audits of a run as its records carry them: reports, decisions, and who is barred. For people.

No credit depends on it: the fold has the decisions itself. Final records come from the ledger, open ones beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.ledger import CarriedReport, StatedDecision, StatedPardon
from protocol.audit_findings import describe_failures
from protocol.audit_penalties import AuditPenalties, AuditPenalty, add_decision, add_pardon
from protocol.audits import AuditRule
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import RoundCredits

MAX_DECIDED = 256
"""Newest decided cases that are kept; the bars of all convictions are."""


@dataclass(frozen=True, slots=True)
class AuditCase:
    """The reports on one update, in their order, and the decision about it. `outcome` is None while there is none."""

    round: Round
    record: Digest
    update: Digest
    author: PeerKey
    reports: tuple[CarriedReport, ...]
    outcome: StatedDecision | None = None
    barred_until: Round = Round(0)
    """After a conviction: the first round in which a record may list the author again, if it is not pardoned."""
    pardoned_in: Round | None = None
    """The round whose record carries the owner's pardon of the conviction."""

    @property
    def is_conviction(self) -> bool:
        return self.outcome is not None and self.outcome.decision.convicted

    @property
    def stated(self) -> Round | None:
        """The round of the record that decides it."""
        return None if self.outcome is None else self.outcome.stated

    def finding(self, name_of: Callable[[PeerKey], str]) -> str:
        """Return what the failed reports measured and who measured it, for people; "" if none failed."""
        return describe_failures(((r.reporter, r.body) for r in self.reports), name_of)

    def describe(self, name_of: Callable[[PeerKey], str]) -> str:
        """Return whom a conviction convicts of what, and until when, as one sentence for people."""
        found = self.finding(name_of)
        in_round = "" if self.stated is None else f" in round {self.stated}"
        until = f"It is barred until round {self.barred_until}"
        if self.pardoned_in is not None:
            until = f"The owner pardoned it in round {self.pardoned_in}"
        return (
            f"peer {name_of(self.author)} ({self.author.short}) is convicted{in_round}: its update of round "
            f"{self.round} was not trained as it claims{f': {found}' if found else ''}. {until}"
        )


@dataclass(frozen=True, slots=True)
class RecentRounds:
    """The open rounds, oldest first, and all whose lines are in memory, by record."""

    open: tuple[RoundCredits, ...]
    by_record: Mapping[Digest, RoundCredits]
    newest: int
    """The newest round; -1 before the first."""

    def author_of(self, record: Digest, update: Digest) -> PeerKey | None:
        """Return the author of an update; None if its record is not in memory."""
        credits = self.by_record.get(record)
        return None if credits is None else next((e.peer for e in credits.lines if e.update == update), None)

    def update_of(self, record: Digest, author: PeerKey) -> tuple[Round, Digest] | None:
        """Return the round of a record and the update of a peer in it; None if it is not in memory."""
        credits = self.by_record.get(record)
        update = None if credits is None else next((e.update for e in credits.lines if e.peer == author), None)
        return None if credits is None or update is None else (credits.round, update)


class AuditIndex:
    """The cases of one run. Only `IndexedChain` changes it."""

    def __init__(self, rule: AuditRule, hold_rounds: int):
        self._rule = rule
        self._hold_rounds = hold_rounds
        self._final: tuple[AuditCase, ...] = ()
        self._reports: list[CarriedReport] = []
        """Those of final records on updates that are pending and not decided."""
        self._penalties = AuditPenalties()
        """After the final records."""
        self.decided: tuple[AuditCase, ...] = ()
        """The newest decided cases, newest first."""
        self.undecided: tuple[AuditCase, ...] = ()
        """Cases with a failed report and without a decision, of updates whose credit is pending; newest first."""
        self.penalties = AuditPenalties()
        """After all records, final or not."""
        self._convictions: dict[PeerKey, AuditCase] = {}

    def barred_until(self, key: PeerKey, round_: int) -> Round | None:
        """Return the end of the bar of a key in a round; None if it is not barred then."""
        return self.penalties.of(key).barred_until if self.penalties.is_barred(key, Round(round_)) else None

    def bars(self, round_: int) -> list[tuple[PeerKey, AuditPenalty]]:
        """Return the keys that are barred in a round, with their penalties, those convicted last first."""
        found = [(k, p) for k, p in self.penalties.by_key.items() if self.penalties.is_barred(k, Round(round_))]
        return sorted(found, key=lambda bar: (-bar[1].convicted_in, bar[0]))

    def conviction_of(self, key: PeerKey) -> AuditCase | None:
        """Return the newest case that convicts a key, of those that are kept."""
        return self._convictions.get(key)

    def of_peer(self, key: PeerKey) -> list[AuditCase]:
        """Return the cases about updates of a key, decided ones first, newest first."""
        return [c for c in (*self.decided, *self.undecided) if c.author == key]

    def restore(
        self, decisions: Sequence[StatedDecision], pardons: Sequence[StatedPardon], reports: Iterable[CarriedReport],
        recent: RecentRounds,
    ) -> None:  # fmt: skip
        """Take over what the ledger holds of final records, oldest first; then follow the open rounds."""
        penalties: dict[PeerKey, AuditPenalty] = {}
        by_update = _grouped(reports)
        cases: list[AuditCase] = []
        in_order = sorted((*pardons, *decisions), key=lambda s: s.stated)  # stable: a record's pardons come first
        for stated in in_order:
            if isinstance(stated, StatedPardon):
                _pardon(penalties, stated, cases)
            else:
                self._decide(penalties, stated, by_update, cases)
        self._penalties = AuditPenalties(penalties)
        self._final = tuple(cases[-MAX_DECIDED:])
        self._reports = [report for group in by_update.values() for report in group]
        self.follow(recent)

    def post(self, added: Iterable[RoundCredits], recent: RecentRounds) -> None:
        """Take in the reports of rounds that became final. Their decisions come with the next `restore`."""
        for credits in added:
            self._reports += _carried(credits, recent)
        self.follow(recent)

    def follow(self, recent: RecentRounds) -> None:
        """Take in the open rounds in place of those before."""
        oldest = recent.newest - self._hold_rounds
        self._reports = [r for r in self._reports if r.body.round >= oldest]
        by_update = _grouped(self._reports)
        penalties, cases = dict(self._penalties.by_key), list(self._final)
        for credits in recent.open:
            for report in _carried(credits, recent):
                by_update.setdefault((report.body.record, report.author), []).append(report)
            for pardon in credits.pardons:
                _pardon(penalties, StatedPardon(credits.round, pardon), cases)
            for decision in credits.decisions:
                found = recent.update_of(decision.record, decision.author)
                if found is not None:
                    stated = StatedDecision(credits.round, credits.record, *found, decision, None)
                    self._decide(penalties, stated, by_update, cases)
        for i, case in enumerate(cases):  # jurors may report after the decision
            if late := by_update.pop((case.record, case.author), ()):
                cases[i] = replace(case, reports=(*case.reports, *late))
        self.penalties = AuditPenalties(penalties)
        self.decided = tuple(reversed(cases[-MAX_DECIDED:]))
        self._convictions = {c.author: c for c in cases if c.is_conviction}
        failed = [_case(group) for group in by_update.values() if any(not r.body.passed for r in group)]
        undecided = [c for c in failed if not self._is_settled(c)]
        self.undecided = tuple(sorted(undecided, key=lambda c: (-c.round, c.author)))

    def _is_settled(self, case: AuditCase) -> bool:
        """Return whether the author was convicted after an update: then no record reports on it any more."""
        stated = None if (conviction := self._convictions.get(case.author)) is None else conviction.stated
        return stated is not None and case.round <= stated

    def _decide(
        self, penalties: dict[PeerKey, AuditPenalty], stated: StatedDecision,
        by_update: dict[tuple[Digest, PeerKey], list[CarriedReport]], cases: list[AuditCase],
    ) -> None:  # fmt: skip
        """Add a decision to the penalties, and note it in `cases`; its reports are taken out of `by_update`.

        The second decision about an update adds those that it refutes to the case.
        """
        decision = stated.decision
        add_decision(penalties, decision, stated.stated, self._rule.bar_rounds)
        oldest = stated.stated - self._hold_rounds
        for i in range(len(cases) - 1, -1, -1):
            case, first = cases[i], cases[i].outcome
            if first is None or first.stated < oldest:
                break  # those before are as old
            if (case.record, case.author) == (decision.record, decision.author):
                whole = replace(first.decision, refuted=decision.refuted)
                cases[i] = replace(case, outcome=replace(first, decision=whole))
                return
        reports = tuple(by_update.pop((decision.record, decision.author), ()))
        until = penalties[decision.author].barred_until if decision.convicted else Round(0)
        cases.append(AuditCase(stated.round, decision.record, stated.update, decision.author, reports, stated, until))


def _pardon(penalties: dict[PeerKey, AuditPenalty], stated: StatedPardon, cases: list[AuditCase]) -> None:
    """Add a pardon to the penalties, and note it in the case that it is for, if it holds."""
    if not add_pardon(penalties, stated.pardon):
        return
    for i in range(len(cases) - 1, -1, -1):
        case = cases[i]
        if case.stated is None or case.stated < stated.pardon.round:
            break  # those before are as old
        if case.is_conviction and (case.author, case.stated) == (stated.pardon.peer, stated.pardon.round):
            cases[i] = replace(case, pardoned_in=stated.stated)


def _carried(credits: RoundCredits, recent: RecentRounds) -> list[CarriedReport]:
    """Return the reports of a round, each with the author of its update."""
    named = [(report, recent.author_of(report.body.record, report.body.update)) for report in credits.reports]
    return [CarriedReport(credits.round, r.author, author, r.body) for r, author in named if author is not None]


def _grouped(reports: Iterable[CarriedReport]) -> dict[tuple[Digest, PeerKey], list[CarriedReport]]:
    """Return reports by the record and the author of their update."""
    found: dict[tuple[Digest, PeerKey], list[CarriedReport]] = {}
    for report in reports:
        found.setdefault((report.body.record, report.author), []).append(report)
    return found


def _case(reports: Sequence[CarriedReport]) -> AuditCase:
    first = reports[0]
    return AuditCase(first.body.round, first.body.record, first.body.update, first.author, tuple(reports))
