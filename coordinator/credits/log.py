"""The coordinator's answers about credits: the log and its proofs, receipts, totals. Bounded, a page at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from coordinator.credits.export import exported
from coordinator.credits.leaderboard import Leaderboard
from coordinator.credits.receipts import LOOK_BACK, Receipts
from coordinator.credits.tree_heads import TreeHeadSigner
from coordinator.credits.views import MAX_CERTIFICATES, MAX_ENTRIES, EntryLines
from coordinator.errors import TooManyError
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger import Ledger
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import SwarmView
from coordinator.tasks import wait_at_most
from protocol.errors import CairnError, MalformedError
from protocol.ids import Digest
from protocol.message_codec import encode_certificate
from protocol.proofs import consistency_proof, inclusion_proof

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
PAGE_BYTES = 1024 * 1024
"""Maximum size of an answer, which may exceed it by one entry, group of lines or certificate: it fits in 4 MiB."""

MAX_EXPORTS = 2
"""Exports at once."""


class CreditLog:
    """The credit log over the ledger's database. `start`, then `run` for as long as the coordinator lives.

    Every answer raises CairnError.
    """

    def __init__(
        self, ledger: LedgerThread, view: SwarmView, chain: IndexedChain, tree_heads: TreeHeadSigner,
        receipts: Receipts, leaderboard: Leaderboard, news: asyncio.Event,
    ):  # fmt: skip
        """Prepare; `news` is set when the chain or the ledger may have changed."""
        self._ledger = ledger
        self._view = view
        self._chain = chain
        self.tree_heads = tree_heads
        self.receipts = receipts
        self.leaderboard = leaderboard
        self._news = news
        self._exports = 0

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the newest tree head and the bindings. Raises LedgerError."""
        await self.tree_heads.start()
        await self.leaderboard.load()

    async def run(self) -> None:
        """Sign a head each minute, note the updates that each new round leaves out, and add up what it earned."""
        signing = asyncio.create_task(self.tree_heads.sign_forever(), name="tree heads")
        reading = asyncio.create_task(self.leaderboard.load_recent(), name="recent credits")
        try:
            while True:
                await wait_at_most(self._news, POLL_SECONDS)
                self._news.clear()
                try:
                    await self.receipts.note(self._chain.newest(LOOK_BACK))
                    await self.leaderboard.refresh()
                except CairnError as e:  # the ledger's own trouble is on the page already; tried again in 5 s
                    log.error("credits are not brought up to date: %s", e)
                except Exception:  # tried again; heads are signed meanwhile
                    log.exception("credits are not brought up to date")
                if reading.done() and not reading.cancelled() and (error := reading.exception()) is not None:
                    log.error("recent averages are read again: %s", error)
                    reading = asyncio.create_task(self.leaderboard.load_recent(), name="recent credits")
        finally:
            for task in (signing, reading):
                task.cancel()
            await asyncio.gather(signing, reading, return_exceptions=True)

    # -- answers ---------------------------------------------------------------------------------------------

    async def heads(self, before: int | None, limit: int) -> list[bytes]:
        """Return signed tree heads, newest first, of sizes less than `before`.

        The newest of all is at most a minute old.
        """
        if before is not None:
            return [h.sent for h in await self._ledger.read(lambda ledger: ledger.heads(limit, before))]
        newest = await self.tree_heads.newest()
        older = []
        if limit > 1:
            size = newest.body.size
            older = await self._ledger.read(lambda ledger: ledger.heads(limit - 1, size))
        return [newest.encoded, *(h.sent for h in older)]

    async def entries(self, first: int, limit: int) -> tuple[list[bytes], int]:
        """Return entries from `first` on, and the log's size."""

        def read(ledger: Ledger) -> tuple[list[bytes], int]:
            found = ledger.entries(first, min(limit, MAX_ENTRIES))
            return found, ledger.size()

        found, size = await self._ledger.read(read)
        return _fitting(found), size

    async def lines(self, first: int, limit: int) -> tuple[list[EntryLines], int]:
        """Return the lines of the round entries among `limit` entries from `first` on, and where to continue."""

        def read(ledger: Ledger) -> tuple[list[EntryLines], int]:
            found: list[EntryLines] = []
            at, end, total = first, min(first + min(limit, MAX_ENTRIES), ledger.size()), 0
            while at < end and total < PAGE_BYTES:
                if lines := ledger.lines(at):
                    found.append(EntryLines(at, tuple(lines)))
                    total += sum(map(len, lines))
                at += 1
            return found, at

        return await self._ledger.read(read)

    async def inclusion(self, entry: int, size: int) -> tuple[bytes, ...]:
        """Return the proof that an entry is in the log of a size."""
        return await self._prove(size, lambda ledger: inclusion_proof(entry, size, ledger.node))

    async def consistency(self, first: int, second: int) -> tuple[bytes, ...]:
        """Return the proof that the log of one size extends that of another."""
        return await self._prove(second, lambda ledger: consistency_proof(first, second, ledger.node))

    async def _prove(self, size: int, prove: Callable[[Ledger], tuple[bytes, ...]]) -> tuple[bytes, ...]:
        def checked(ledger: Ledger) -> tuple[bytes, ...]:
            if size > (there := ledger.size()):
                raise MalformedError(f"the log has {there} entries, not {size}")
            return prove(ledger)

        return await self._ledger.read(checked)

    async def certificate(self, record: Digest) -> bytes | None:
        """Return the certificate of one record, also of a branch that was left; None if it is not held."""
        found = self._view.certificate(record)
        return None if found is None else encode_certificate(found)

    async def certificates(self, after: Digest, limit: int) -> tuple[list[bytes], bool]:
        """Return the chain after a record, and whether there is more."""
        limit = min(limit, MAX_CERTIFICATES)
        found = await self._view.certificates_after(after, limit)
        if found is None:
            raise MalformedError(f"record {after.short} is not on the chain that this coordinator's observer holds")
        sent = _fitting(encode_certificate(c) for c in found)
        return sent, len(sent) < len(found) or len(found) == limit

    async def export(self, form: str) -> AsyncIterator[bytes]:
        """Yield all credits as a file ("csv" or "parquet"), in pieces. Raises TooManyError, ParquetMissingError."""
        if self._exports >= MAX_EXPORTS:
            raise TooManyError("other exports are under way: try again in a minute")
        self._exports += 1
        try:
            async for piece in exported(self, form):
                yield piece
                await asyncio.sleep(0)
        finally:
            self._exports -= 1


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
