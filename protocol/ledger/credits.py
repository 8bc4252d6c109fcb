"""Credits as a pure function of a certificate. Integers only, so that anybody who has the chain gets the same.

One credit is 10^15 model FLOPs of accepted training. It is kept in millionths (micro-credits, 10^9 FLOPs), rounded down
for each update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from protocol.ids import Digest, PeerKey, Round
from protocol.messages import AuditDecision, Certificate, Pardon, Rollback, Signed, Verdict, WorkReport
from protocol.spec import RunSpec

FLOPS_PER_MICRO_CREDIT = 10**9

LineStatus = Literal["pending", "settled", "voided"]


@dataclass(frozen=True, slots=True)
class CreditRule:
    """The run's rule: FLOPs per parameter and token (spec), the trained parameters, and tokens per window (spec).

    A frozen parameter counts for two thirds: its own gradient, a third of the work, is not computed. Credit settles
    when `hold_rounds` more rounds are final, or the run has its `total_tokens` (0: never).
    """

    flops_per_parameter_token: int
    parameters: int
    window_tokens: int
    hold_rounds: int = 12
    total_tokens: int = 0
    frozen_parameters: int = 0

    @classmethod
    def of(cls, spec: RunSpec) -> CreditRule:
        adapter = spec.model.adapter
        return cls(
            spec.credit.flops_per_parameter_token, spec.model.layout.numel, spec.data.window_tokens,
            spec.credit.hold_rounds, spec.total_tokens, 0 if adapter is None else adapter.parameters,
        )  # fmt: skip

    @property
    def flops_per_token(self) -> int:
        """FLOPs that count for one token."""
        return self.flops_per_parameter_token * (3 * self.parameters + 2 * self.frozen_parameters) // 3

    def micro_credits(self, windows: int) -> int:
        """Return the micro-credits of an accepted update over a number of windows."""
        return self.flops_per_token * windows * self.window_tokens // FLOPS_PER_MICRO_CREDIT

    def line(self, peer: PeerKey, update: Digest, windows: int) -> CreditLine:
        """Return the credits of an accepted update; `update` is the digest of its signed header."""
        return CreditLine(peer, update, windows, windows * self.window_tokens, self.micro_credits(windows))


@dataclass(frozen=True, slots=True)
class CreditLine:
    """The credits of one accepted update; `update` is the digest of its signed header."""

    peer: PeerKey
    update: Digest
    windows: int
    tokens: int
    micro_credits: int


@dataclass(frozen=True, slots=True)
class RoundCredits:
    """The credits of one record, derived from its certificate alone.

    `base_state` is the digest of state[round], from which the round started; `loss` is the median of the contributors'
    own training losses, weighted by windows. Windows are as weighed. The `verdicts`, the `rollback` and the `pardons`
    are those of the directive that the record carries. The `reports` and `decisions` of audits are the record's.
    `voided_tokens` are those of earlier records on its branch that it voids.
    """

    round: Round
    record: Digest
    parent: Digest
    base_state: Digest
    loss: float
    lines: tuple[CreditLine, ...]
    verdicts: tuple[Verdict, ...] = ()
    rollback: Rollback | None = None
    reports: tuple[Signed[WorkReport], ...] = ()
    decisions: tuple[AuditDecision, ...] = ()
    voided_tokens: int = 0
    pardons: tuple[Pardon, ...] = ()

    @property
    def convicted(self) -> tuple[PeerKey, ...]:
        """The authors that the record's decisions convict: all that is pending for them is void."""
        return tuple(d.author for d in self.decisions if d.convicted)

    @property
    def tokens(self) -> int:
        """Tokens of its updates."""
        return sum(e.tokens for e in self.lines)

    @property
    def progress(self) -> int:
        """Tokens by which it brings the run nearer to its end: below 0 if it voids more than it adds."""
        return self.tokens - self.voided_tokens

    @property
    def micro_credits(self) -> int:
        return sum(e.micro_credits for e in self.lines)


def credits_of(certificate: Certificate, rule: CreditRule) -> RoundCredits:
    """Return the credits of a certificate, by peer. Lines are by ascending peer key, as in the record."""
    record = certificate.record.body
    lines = tuple(rule.line(u.author, u.digest, n) for u, n in zip(record.updates, record.weighed, strict=True))
    directive = None if record.directive is None else record.directive.body
    return RoundCredits(
        record.round, certificate.digest, record.parent, record.base_state, record.loss, lines,
        () if directive is None else directive.verdicts, None if directive is None else directive.rollback,
        record.reports, record.decisions, record.voided * rule.window_tokens,
        () if directive is None else directive.pardons,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Balance:
    """The totals of a peer: micro-credits, accepted tokens, and rounds."""

    micro_credits: int = 0
    tokens: int = 0
    rounds: int = 0

    def plus(self, line: CreditLine) -> Balance:
        """Return the totals with a credit line."""
        return Balance(self.micro_credits + line.micro_credits, self.tokens + line.tokens, self.rounds + 1)

    def minus(self, line: CreditLine) -> Balance:
        """Return the totals without a credit line."""
        return Balance(self.micro_credits - line.micro_credits, self.tokens - line.tokens, self.rounds - 1)

    def combined(self, other: Balance) -> Balance:
        """Both together."""
        return Balance(self.micro_credits + other.micro_credits, self.tokens + other.tokens, self.rounds + other.rounds)


@dataclass(frozen=True, slots=True)
class PeerBalances:
    """A peer's three balances."""

    pending: Balance = Balance()
    settled: Balance = Balance()
    voided: Balance = Balance()

    def of(self, status: LineStatus) -> Balance:
        """Return one of the three."""
        return getattr(self, status)

    def plus(self, line: CreditLine, status: LineStatus = "pending") -> PeerBalances:
        """Return the balances with one more line."""
        return replace(self, **{status: self.of(status).plus(line)})

    def moved(self, line: CreditLine, status: Literal["settled", "voided"]) -> PeerBalances:
        """Return the balances after a pending line has settled, or was voided."""
        return replace(self, pending=self.pending.minus(line)).plus(line, status)


def sum_credits(rounds: Iterable[RoundCredits]) -> dict[PeerKey, Balance]:
    """Return the balances over rounds that are not finalized yet: they change when the chain does."""
    balances: dict[PeerKey, Balance] = {}
    for credits in rounds:
        for line in credits.lines:
            balances[line.peer] = balances.get(line.peer, Balance()).plus(line)
    return balances
