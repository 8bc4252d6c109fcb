"""Plain values about credits: receipts with their status, totals of peers, accounts and teams."""

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
    """A receipt, its signed bytes (an envelope), and its status."""

    receipt: Receipt
    encoded: bytes
    status: ReceiptStatus


@dataclass(frozen=True, slots=True)
class ReceiptPage:
    """Receipts, newest first. `next` is the `before` of the next page; None at the end."""

    items: tuple[ReceiptItem, ...]
    next: int | None


@dataclass(frozen=True, slots=True)
class CreditSummary:
    """Totals of a peer, an account or a team, in micro-credits; `recent` is micro-credits a day.

    `account` is the one to which a peer is bound, `peers` are those of an account.
    """

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
    """The credit lines of a round entry, as they were written."""

    entry: int
    lines: tuple[bytes, ...]
