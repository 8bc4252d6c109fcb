"""Credits as a pure function of a certificate. Integers only, so that anybody who has the chain gets the same ledger.

One credit is 10^15 model FLOPs of accepted training. It is kept in millionths (micro-credits, 10^9 FLOPs), rounded down
for each update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.entries import CreditLine
from protocol.messages import Certificate
from protocol.spec import RunSpec

FLOPS_PER_MICRO_CREDIT = 10**9


@dataclass(frozen=True, slots=True)
class CreditRule:
    """The run's rule: FLOPs per parameter and token (spec), the model's parameters, and tokens per window (spec).

    Credit settles when `hold_rounds` more rounds are posted, or the run has its `total_tokens` (0: never).
    """

    flops_per_parameter_token: int
    parameters: int
    window: int
    hold_rounds: int = 12
    total_tokens: int = 0

    @classmethod
    def of(cls, spec: RunSpec) -> CreditRule:
        return cls(
            spec.credit.flops_per_parameter_token, spec.model.layout.numel, spec.data.window, spec.credit.hold_rounds,
            spec.total_tokens,
        )  # fmt: skip

    def micro_credits(self, windows: int) -> int:
        """Return the micro-credits of an accepted update over a number of windows."""
        tokens = windows * self.window
        return self.flops_per_parameter_token * self.parameters * tokens // FLOPS_PER_MICRO_CREDIT


@dataclass(frozen=True, slots=True)
class RoundCredits:
    """The credits of one round, derived from its certificate alone.

    `base_state` is the digest of state[round], from which the round started; `loss` is the mean of the contributors'
    own training losses. Windows are as weighed.
    """

    round: Round
    record: Digest
    parent: Digest
    base_state: Digest
    loss: float
    lines: tuple[CreditLine, ...]

    @property
    def tokens(self) -> int:
        return sum(e.tokens for e in self.lines)

    @property
    def micro_credits(self) -> int:
        return sum(e.micro_credits for e in self.lines)


def credits_of(certificate: Certificate, rule: CreditRule) -> RoundCredits:
    """Return the credits of a certificate, by peer. Lines are by ascending peer key, as in the record."""
    record = certificate.record.body
    lines = tuple(
        CreditLine(u.author, u.digest, windows, windows * rule.window, rule.micro_credits(windows))
        for u, windows in zip(record.updates, record.weighed, strict=True)
    )
    return RoundCredits(record.round, certificate.digest, record.parent, record.base_state, record.loss, lines)


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


def sum_credits(rounds: Iterable[RoundCredits]) -> dict[PeerKey, Balance]:
    """Return the balances over rounds that are not finalized yet: they change when the chain does."""
    balances: dict[PeerKey, Balance] = {}
    for credits in rounds:
        for line in credits.lines:
            balances[line.peer] = balances.get(line.peer, Balance()).plus(line)
    return balances
