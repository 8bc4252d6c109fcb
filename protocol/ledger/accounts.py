"""Accounts and what moves between them. A transfer takes from one account what it gives to another: double entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.ids import PeerKey
from protocol.ledger.credits import AccountBalance as AccountBalance

Kind = Literal["issuance", "pending", "settled", "voided"]

ISSUANCE: Kind = "issuance"
PENDING: Kind = "pending"
SETTLED: Kind = "settled"
VOIDED: Kind = "voided"


@dataclass(frozen=True, slots=True)
class LedgerAccount:
    """Printed as "issuance", "pending/HEXKEY", "settled/HEXKEY", "voided/HEXKEY"."""

    kind: Kind
    peer: PeerKey | None = None

    def __str__(self) -> str:
        return self.kind if self.peer is None else f"{self.kind}/{self.peer}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """By the entry `sequence`, for line `line` of the round entry `entry`."""

    sequence: int
    entry: int
    line: int
    source: LedgerAccount
    target: LedgerAccount
    micro_credits: int


