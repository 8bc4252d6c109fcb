"""The rows that are read from the ledger's tables."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import CreditLine, LineStatus
from protocol.messages import AuditDecision, Pardon, WorkReport


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A final round of the branch, without its lines. `seen_at`: unix seconds; None: not seen at first hand.

    `voided_tokens` are those of earlier rounds that its record voids.
    """

    round: Round
    record: Digest
    base_state: Digest
    loss: float
    tokens: int
    voided_tokens: int
    seen_at: float | None


@dataclass(frozen=True, slots=True)
class CreditedLine:
    """A credit line with its status. `number` counts final rounds.

    `voided_in` is the round whose record voids it, `convicted_for` the round of the update for which that record
    convicts the peer; None where a verdict of the owner voids it.
    """

    number: int
    round: Round
    record: Digest
    line: CreditLine
    status: LineStatus
    voided_in: Round | None = None
    convicted_for: Round | None = None

    @property
    def update(self) -> Digest:
        return self.line.update


@dataclass(frozen=True, slots=True)
class CarriedReport:
    """A work report that the record of round `carried` carries, about an update of `author`."""

    carried: Round
    reporter: PeerKey
    author: PeerKey
    body: WorkReport


@dataclass(frozen=True, slots=True)
class StatedDecision:
    """A decision that the record `stated_by` of round `stated` states, about an update in a record of `round`.

    `voided` are the micro-credits of its author that this record voids; None until it is final.
    """

    stated: Round
    stated_by: Digest
    round: Round
    update: Digest
    decision: AuditDecision
    voided: int | None


@dataclass(frozen=True, slots=True)
class StatedPardon:
    """A pardon that the directive in the record of round `stated` gives."""

    stated: Round
    pardon: Pardon


@dataclass(frozen=True, slots=True)
class RefusedUpdate:
    """An announced update that a round left out: `update` is the digest of its signed header; `at` in unix seconds."""

    round: Round
    parent: Digest
    record: Digest
    peer: PeerKey
    update: Digest
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class BindingRow:
    """A binding of a peer to an account: `encoded` is the account's envelope, `time` in unix seconds."""

    peer: PeerKey
    account: PeerKey
    time: int
    encoded: bytes


@dataclass(frozen=True, slots=True)
class AdmissionRow:
    """The newest admission of a peer; times in unix seconds, `encoded` is the envelope."""

    peer: PeerKey
    name: str
    first_at: int
    not_before: int
    not_after: int
    encoded: bytes
