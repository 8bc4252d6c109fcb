"""What is told of credits: receipts with their status, standings of peers, accounts and teams. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.ids import PeerKey
from protocol.ledger.statements import Receipt

ReceiptStatus = Literal["pending", "settled", "voided", "not accepted"]
Grouping = Literal["peer", "account", "team"]

MAX_PAGE = 100
"""Receipts, or rows of the leaderboard, in one answer."""

MAX_ENTRIES = 1000
"""Entries of the log in one answer."""

MAX_CERTIFICATES = 256
"""Certificates in one answer."""


@dataclass(frozen=True, slots=True)
class ReceiptItem:
    """A receipt, the bytes that were signed, and what has become of it."""

    receipt: Receipt
    sent: bytes
    status: ReceiptStatus


@dataclass(frozen=True, slots=True)
class ReceiptPage:
    """Newest first. `next`: what to ask for as `before` to go on; None at the end."""

    items: tuple[ReceiptItem, ...]
    next: int | None


@dataclass(frozen=True, slots=True)
class CreditSummary:
    """Totals of a peer, an account or a team. `recent`: micro-credits a day, see `standing.Recent`. `account`: to which
    a peer is bound. `peers`: those of an account."""

    key: str
    kind: Grouping
    name: str
    team: str
    settled: int
    pending: int
    voided: int
    recent: int
    tokens: int
    rounds: int
    account: PeerKey | None = None
    peers: tuple[PeerKey, ...] = ()


@dataclass(frozen=True, slots=True)
class EntryLines:
    """The lines of a round entry, as they were written."""

    entry: int
    lines: tuple[bytes, ...]
