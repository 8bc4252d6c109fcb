"""Compares the credits that a coordinator tells of with those that follow from the certificates. Pure.

An auditor receives the final rounds in the coordinator's order, folds in the certificate of each (`CreditFold`), and
finds each difference separately. After a difference it continues from the certificates, so that a single change is a
single finding, not a flood.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protocol.errors import LedgerRuleError
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import CreditLine, CreditRule, LineStatus, PeerBalances, RoundCredits
from protocol.ledger.fold import CreditFold
from protocol.spec import RunSpec

MAX_LINES_NAMED = 20
"""Lines of one round that are named one by one; the rest is counted."""

MAX_FINDINGS = 10_000
MAX_GAP = 100_000


@dataclass(frozen=True, slots=True)
class CreditedRound:
    """A final round as the coordinator tells of it. `number` counts final rounds from 0, on any branch.

    `time` is when the coordinator counted it, in unix milliseconds. `voided` gives for the place of a voided line the
    number of the round whose record voids it.
    """

    number: int
    round: Round
    record: Digest
    parent: Digest
    time: int
    lines: tuple[CreditLine, ...]
    voided: Mapping[int, int] = field(default_factory=dict)

    def status(self, line: int, settled_count: int) -> LineStatus:
        """Return the status of a line when the first `settled_count` rounds are settled."""
        return "voided" if line in self.voided else "settled" if self.number < settled_count else "pending"


@dataclass(frozen=True, slots=True)
class CreditedRounds:
    """Some of a coordinator's `size` final rounds, of which the first `settled` are settled."""

    rounds: tuple[CreditedRound, ...]
    size: int
    settled: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference. `number`: as in `CreditedRound`; None for what is about no single round."""

    number: int | None
    message: str


@dataclass(slots=True)
class AuditReport:
    """The result of an audit. `unproved`: what could not be checked, and why; amounts in micro-credits."""

    rounds: int = 0
    lines: int = 0
    pending: int = 0
    settled: int = 0
    voided: int = 0
    balances: dict[PeerKey, PeerBalances] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unproved: list[Finding] = field(default_factory=list)

    @property
    def issued(self) -> int:
        return self.pending + self.settled + self.voided

    @property
    def clean(self) -> bool:
        """Everything was checked, and all is as it should be."""
        return not self.findings and not self.unproved


CreditsLookup = Callable[[Digest], RoundCredits | None]
"""A function that returns the credits of a record's certificate (`credits.credits_of`); None without a certificate."""


class LedgerAuditor:
    """An audit of the first `size` final rounds of a coordinator.

    `add` each in order, then `finish`, then `check_settled` and `check_totals`. `find` knows the certificates that were
    verified. `is_abandoned`: whether a record that `find` knows is not of the chain that the swarm follows; the owner
    must have rolled back what was credited for it.
    """

    def __init__(
        self, spec: RunSpec, find: CreditsLookup, size: int, *, is_abandoned: Callable[[Digest], bool] | None = None
    ):
        self._find = find
        self._size = size
        self._is_abandoned = is_abandoned or (lambda record: False)
        self._rule = CreditRule.of(spec)
        self._fold = CreditFold(spec.run_id, self._rule)
        self._posted: dict[Digest, int] = {}
        self._expected = 0
        self._told_voids: dict[tuple[Digest, PeerKey], tuple[int, int]] = {}
        """The number of the round with the voided line, and of the one that is said to void it."""
        self._true_voids: dict[tuple[Digest, PeerKey], int] = {}
        """The number of the round whose record carries the verdict."""
        self._later_void: int | None = None
        """The number of the first round with a line that a round after the audit's is said to void."""
        self._strange: dict[int, tuple[Round, Digest, bool]] = {}
        """Rounds that are not of the chain, by number, and whether their certificates are known."""
        self._before_strange: tuple[CreditFold, dict[tuple[Digest, PeerKey], int]] | None = None
        """The fold and the voids before the newest rounds, if these are not of the chain."""
        self.report = AuditReport()

    @property
    def tip(self) -> Digest:
        """The record of the newest round that is credited."""
        return self._fold.tip

    @property
    def is_full(self) -> bool:
        """True when no more differences are reported: more rounds would only cost time and memory."""
        return len(self.report.findings) + len(self._strange) >= MAX_FINDINGS

    def add(self, told: CreditedRound) -> None:
        """Check the next round as the coordinator tells of it."""
        report, n = self.report, told.number
        if n != self._expected:
            self._add_finding(n, f"entry {n} is where entry {self._expected} should be: rounds are missing or "
                                 "out of order")  # fmt: skip
        self._expected = n + 1
        report.rounds += 1
        report.lines += len(told.lines)
        if told.record in self._posted:
            self._add_finding(n, f"record {told.record.short} is credited twice: as number {self._posted[told.record]}")
            return
        true = self._find(told.record)
        if true is None or self._is_abandoned(told.record):
            self._strange[n] = (told.round, told.record, true is not None)
            if self._before_strange is None:
                self._before_strange = self._fold.copy(), dict(self._true_voids)
        elif self._before_strange is not None:
            rollback = true.rollback
            if true.parent != self.tip and (rollback is None or rollback.epoch <= self._fold.epoch):
                self._fold, self._true_voids = self._before_strange  # the chain goes on without the rounds since then
            self._before_strange = None
        if true is None:
            true = RoundCredits(told.round, told.record, told.parent, told.parent, 0.0, told.lines)
        else:
            self._compare(told, true)
        try:
            self._fill_gap(true, n)
            self._add(true, n)
        except LedgerRuleError as e:
            self._add_finding(n, f"number {n}: {e}")
        for i, by in told.voided.items():
            if i >= len(told.lines):
                continue
            if by < self._size:
                self._told_voids[told.record, told.lines[i].peer] = n, by
            elif self._later_void is None:
                self._later_void = n

    def finish(
        self, finalized: Round | None = None, record: Digest | None = None, *, epoch: int | None = None
    ) -> AuditReport:
        """Return the report.

        `finalized`: the newest round that the owner has finalized, as the swarm holds it; `record` its record.
        `epoch` is that of the newest rollback in the swarm; None if no member was asked.
        """
        report, fold = self.report, self._fold
        if epoch is not None and fold.epoch > epoch:
            message = f"no member that was asked knows of rollback {fold.epoch} of the run: audit again in a while"
            report.unproved.append(Finding(None, message))
        for n, (round_, strange, proved) in self._strange.items():
            why = "the swarm follows another" if proved else "it was invented, or its certificate is kept from us"
            self._add_finding(n, f"number {n} credits round {round_} with record {strange.short}, which is not in the "
                                 f"chain: {why}")  # fmt: skip
        for key in sorted(self._told_voids.keys() | self._true_voids.keys()):
            n, told = self._told_voids.get(key, (self._posted.get(key[0]), None))
            true, whose = self._true_voids.get(key), f"number {n}: the credit of peer {key[1].short}"
            if true is None:
                self._add_finding(n, f"{whose} is said to be void, and no verdict in the chain says so")
            elif told is None:
                self._add_finding(n, f"{whose} is void by a verdict in the chain, and the coordinator does not say so")
            elif told != true:
                self._add_finding(n, f"{whose} is said to be void by number {told}; the verdict is in number {true}")
        if self._later_void is not None:
            message = f"the coordinator says that a round after number {self._size - 1} voids credits of number "
            message += f"{self._later_void}, and perhaps of others: audit again in a while"
            report.unproved.append(Finding(None, message))
        if finalized is not None and finalized >= fold.rounds:
            missing = f"round {fold.rounds}" if finalized == fold.rounds else f"rounds {fold.rounds} to {finalized}"
            self._add_finding(None, f"the credits end before {missing}: finalized by the owner, and not credited")
        elif finalized is not None and record is not None and fold.record_of(finalized) != record:
            n = self._posted.get(fold.record_of(finalized))
            self._add_finding(n, f"round {finalized} is credited with record {fold.record_of(finalized).short}; the "
                                 f"owner has signed record {record.short} as final")  # fmt: skip
        report.balances = dict(fold.balances)
        for balance in report.balances.values():
            report.pending += balance.pending.micro_credits
            report.settled += balance.settled.micro_credits
            report.voided += balance.voided.micro_credits
        report.findings.sort(key=lambda d: (d.number is None, d.number or 0))
        return report

    def check_settled(self, settled: int) -> None:
        """Compare how many of the rounds the coordinator says are settled."""
        true = self._fold.settled_count
        if settled != true and self._fold.count == self._size:  # else a finding about the rounds says what is wrong
            self._add_finding(None, f"{settled} of {self._size} rounds are said to be settled, not {true}")

    def check_totals(self, totals: Mapping[PeerKey, tuple[int, int, int]]) -> None:
        """Compare what the coordinator tells of peers' totals: settled, pending, voided micro-credits."""
        for peer in sorted(totals.keys() | self._fold.balances.keys()):
            b = self._fold.balances.get(peer, PeerBalances())
            true = (b.settled.micro_credits, b.pending.micro_credits, b.voided.micro_credits)
            if (told := totals.get(peer, (0, 0, 0))) != true:
                words = f"{told[0]} settled, {told[1]} pending and {told[2]} voided micro-credits"
                self._add_finding(
                    None, f"peer {peer.short} is said to have {words}, not {true[0]}, {true[1]}, {true[2]}"
                )

    def _add(self, credits: RoundCredits, number: int) -> None:
        epoch, pending = self._fold.epoch, {p.number: p for p in self._fold.pending}
        step = self._fold.add(credits)
        self._posted[credits.record] = number
        for n, i in step.voided:
            self._true_voids[pending[n].record, pending[n].lines[i].peer] = number
        if self._fold.epoch > epoch:
            # The branch before is given up: its certificates need not be in the chain that peers keep.
            for n in [n for n, (round_, _, _) in self._strange.items() if round_ >= credits.round and n != number]:
                round_, _, proved = self._strange.pop(n)
                if not proved:
                    why = f"number {n}: nobody gives the certificate of round {round_}, which the owner has rolled back"
                    self.report.unproved.append(Finding(n, why))

    def _compare(self, told: CreditedRound, true: RoundCredits) -> None:
        n = told.number
        if (told.round, told.parent) != (true.round, true.parent):
            self._add_finding(n, f"number {n} is said to be round {told.round} after record {told.parent.short}; its "
                                 f"certificate is of round {true.round} after {true.parent.short}")  # fmt: skip
        if told.lines == true.lines:
            return
        wrong = [
            (i, _difference(told.lines[i] if i < len(told.lines) else None,
                            true.lines[i] if i < len(true.lines) else None))
            for i in range(max(len(told.lines), len(true.lines)))
            if told.lines[i : i + 1] != true.lines[i : i + 1]
        ]  # fmt: skip
        for i, what in wrong[:MAX_LINES_NAMED]:
            self._add_finding(n, f"line {i} of number {n} (round {true.round}): {what}")
        if len(wrong) > MAX_LINES_NAMED:
            self._add_finding(n, f"and {len(wrong) - MAX_LINES_NAMED} more lines of number {n}")

    def _fill_gap(self, credits: RoundCredits, n: int) -> None:
        """Fold in the rounds of the chain before this one that the coordinator does not tell of."""
        missing: list[RoundCredits] = []
        parent = credits.parent
        while parent != self._fold.tip and len(missing) < MAX_GAP:
            found = self._find(parent)
            if found is None or found.round < self._fold.rounds:
                return  # the fold says what is wrong
            missing.append(found)
            parent = found.parent
        for before in reversed(missing):
            self._add_finding(n, f"round {before.round} (record {before.record.short}) is not credited before number "
                                 f"{n}, which credits a later one")  # fmt: skip
            self._add(before, n)

    def _add_finding(self, number: int | None, message: str) -> None:
        if len(self.report.findings) < MAX_FINDINGS:
            self.report.findings.append(Finding(number, message))


def _difference(told: CreditLine | None, true: CreditLine | None) -> str:
    """Compare a credit line with the right one."""
    if told is None:
        assert true is not None
        return f"it is missing; peer {true.peer.short} earned {true.micro_credits} micro-credits"
    if true is None:
        return (
            f"it gives peer {told.peer.short} {told.micro_credits} micro-credits, and the certificate has no such line"
        )
    if told.peer != true.peer:
        return (
            f"it gives {told.micro_credits} micro-credits to peer {told.peer.short}; by the certificate they are peer "
            f"{true.peer.short}'s ({true.micro_credits})"
        )
    names = ("update", "windows", "tokens", "micro_credits")
    wrong = [
        f"{name.replace('_', '-')} {getattr(told, name)}, not {getattr(true, name)}"
        for name in names
        if getattr(told, name) != getattr(true, name)
    ]
    return f"peer {told.peer.short}: {'; '.join(wrong)}"
