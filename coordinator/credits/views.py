"""What is told of credits: receipts with their status, standings of peers, accounts and teams. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from protocol.ids import Digest, PeerKey
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


class CreditLogProtocol(Protocol):
    """What the calls and the routes about credits are answered from. All raise CairnError."""

    async def heads(self, before: int | None, limit: int) -> list[bytes]:
        """Signed tree heads, newest first, of sizes less than `before`; the newest of all is at most a minute old."""
        ...

    async def entries(self, first: int, limit: int) -> tuple[list[bytes], int]:
        """Entries from `first` on, and the log's size."""
        ...

    async def lines(self, first: int, limit: int) -> tuple[list[EntryLines], int]:
        """The lines of the round entries among `limit` entries from `first` on, and where to go on."""
        ...

    async def inclusion(self, entry: int, size: int) -> tuple[bytes, ...]:
        """That an entry is in the log of a size."""
        ...

    async def consistency(self, first: int, second: int) -> tuple[bytes, ...]:
        """That the log of one size extends that of another."""
        ...

    async def receipts(self, peer: PeerKey, before: int | None, limit: int) -> ReceiptPage:
        """A peer's receipts, newest first, of entries before `before`."""
        ...

    async def standing(self, key: PeerKey) -> CreditSummary:
        """Of an account of that key, or of a peer; all zero for a key that is unknown."""
        ...

    async def leaderboard(self, by: Grouping, limit: int, after: str) -> list[CreditSummary]:
        """Those with most credits first, after the row of that key ("": from the first)."""
        ...

    async def bind(self, sent: bytes) -> int:
        """Keep a binding; how many peers the account has then."""
        ...

    async def certificate(self, record: Digest) -> bytes | None:
        """Of one record, also of a branch that was left; None when the observer does not hold it."""
        ...

    async def certificates(self, after: Digest, limit: int) -> tuple[list[bytes], bool]:
        """The chain after a record, and whether there is more."""
        ...

    @property
    def rounds(self) -> int:
        """Round entries in the log."""
        ...

    @property
    def unsigned_seconds(self) -> float:
        """For how long the log has grown without a signed tree head: 0 when all is signed."""
        ...
