"""The coordinator's answers about credits: rounds, receipts, totals, certificates. Bounded, a page at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from coordinator.credits.export import MAX_ROUNDS, exported
from coordinator.credits.leaderboard import Leaderboard
from coordinator.credits.receipts import LOOK_BACK, Receipts
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger import Ledger
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import SwarmView
from coordinator.tasks import wait_at_most
from protocol.errors import CairnError, MalformedError
from protocol.ids import Digest, PeerKey
from protocol.ledger.audit import CreditedRound, CreditedRounds
from protocol.ledger.credits import PeerBalances
from protocol.message_codec import encode_certificate

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0

DECODED_AT_ONCE = 8
"""Certificates that are taken from the chain before their size is looked at."""

PAGE_BYTES = 1024 * 1024
"""Maximum size of an answer; a larger certificate is sent alone."""

PAGE_LINES = 5000
"""Lines in one answer, which may exceed it by those of one round: about 1.5 MB as JSON, 2.5 MB at most."""

ROUNDS_AT_ONCE = 16
"""Rounds that are read at once, where they are small."""

MAX_CERTIFICATES = 256
"""Certificates in one answer."""


@dataclass(eq=False)
class CreditLog:
    """Credits as the ledger's database has them. `start`, then `run` for as long as the coordinator lives.

    Every answer raises CairnError.
    """

    ledger: LedgerThread
    view: SwarmView
    chain: IndexedChain
    receipts: Receipts
    leaderboard: Leaderboard
    news: asyncio.Event
    """Set when the chain or the ledger may have changed."""

    async def start(self) -> None:
        """Read the bindings. Raises LedgerError."""
        await self.leaderboard.load()

    async def run(self) -> None:
        """Note the updates that each new round leaves out, and add up what it earned."""
        reading = asyncio.create_task(self.leaderboard.load_recent(), name="recent credits")
        try:
            while True:
                await wait_at_most(self.news, POLL_SECONDS)
                self.news.clear()
                try:
                    await self.receipts.note(self.chain.newest(LOOK_BACK))
                    await self.leaderboard.refresh()
                except CairnError as e:  # the ledger's own trouble is on the page already; tried again in 5 s
                    log.error("credits are not brought up to date: %s", e)
                except Exception:  # tried again
                    log.exception("credits are not brought up to date")
                if reading.done() and not reading.cancelled() and (error := reading.exception()) is not None:
                    log.error("recent averages are read again: %s", error)
                    reading = asyncio.create_task(self.leaderboard.load_recent(), name="recent credits")
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def rounds(self, first: int, limit: int) -> CreditedRounds:
        """Return final rounds with their lines, from number `first` on."""

        def read(ledger: Ledger) -> CreditedRounds:
            found: list[CreditedRound] = []
            lines, largest, end = 0, PAGE_LINES, first + min(limit, MAX_ROUNDS)
            with ledger.snapshot():
                while lines < PAGE_LINES and (left := end - first - len(found)):
                    fitting = max(1, (PAGE_LINES - lines) // largest)
                    page = ledger.credited(first + len(found), min(ROUNDS_AT_ONCE, left, fitting))
                    if not page:
                        break
                    for r in page:
                        if lines < PAGE_LINES:  # else these rounds are larger than those before
                            found.append(r)
                            lines += len(r.lines)
                    largest = max(len(r.lines) for r in page)
                return CreditedRounds(tuple(found), ledger.size(), ledger.settled_count())

        return await self.ledger.read(read)

    async def balances(self, after: PeerKey | None, limit: int) -> tuple[int, list[tuple[PeerKey, PeerBalances]]]:
        """Return the number of final rounds, and the balances after them of peers with greater keys, in order."""

        def read(ledger: Ledger) -> tuple[int, list[tuple[PeerKey, PeerBalances]]]:
            with ledger.snapshot():
                return ledger.size(), list(ledger.balances(after=after, limit=limit).items())

        return await self.ledger.read(read)

    async def certificate(self, record: Digest) -> bytes | None:
        """Return the certificate of one record, also of a branch that was left; None if it is not held."""
        return await self.view.encoded_certificate(record)

    async def certificates(self, after: Digest, limit: int) -> tuple[list[bytes], bool]:
        """Return the chain after a record, and whether there is more."""
        limit = min(limit, MAX_CERTIFICATES)
        found: list[bytes] = []
        size, at = 0, after
        while len(found) < limit and size <= PAGE_BYTES:
            # A few at a time: old ones are read and decoded, which takes longer than to send them.
            wanted = min(DECODED_AT_ONCE, limit - len(found))
            page = await self.view.certificates_after(at, wanted)
            if page is None and not found:
                raise MalformedError(f"record {after.short} is not on the chain that this coordinator's observer holds")
            found += [encode_certificate(c) for c in page or ()]
            size = sum(map(len, found))
            if not page or len(page) < wanted:
                sent = _fitting(found)
                return sent, page is None or len(sent) < len(found)
            at = page[-1].digest
        return _fitting(found), True

    def export(self, form: str) -> AsyncIterator[bytes]:
        """Return all credits as a file ("csv" or "parquet"), in pieces. Raises ParquetMissingError."""
        return exported(self, form)


def _fitting(found: Iterable[bytes]) -> list[bytes]:
    """Return the first items that fill an answer, at least one; at most one more is made."""
    taken: list[bytes] = []
    total = 0
    for piece in found:
        total += len(piece)
        if taken and total > PAGE_BYTES:
            break
        taken.append(piece)
    return taken
