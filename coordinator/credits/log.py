"""The coordinator's answers about credits: the log and its proofs, receipts, standings. Bounded, a page at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from coordinator.admission import Admitter
from coordinator.chain_indexer import wait_at_most
from coordinator.credits.export import exported
from coordinator.credits.leaderboard import Leaderboard
from coordinator.credits.receipts import LOOK_BACK, Receipts
from coordinator.credits.tree_heads import TreeHeadSigner
from coordinator.credits.views import (
    MAX_CERTIFICATES,
    MAX_ENTRIES,
    MAX_PAGE,
    CreditSummary,
    EntryLines,
    Grouping,
    ReceiptPage,
)
from coordinator.errors import TooManyError
from coordinator.ledger import Ledger
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import SwarmView
from protocol.errors import CairnError, MalformedError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey
from protocol.ledger.credits import RoundAccount
from protocol.message_codec import encode_certificate
from protocol.proofs import consistency_proof, inclusion_proof
from protocol.spec import RunSpec

log = logging.getLogger(__name__)

PAGE_BYTES = 1024 * 1024
"""What an answer holds, and one entry, group of lines or certificate more: it fits a message of 4 MiB."""

MAX_EXPORTS = 2


class CreditLog:
    """A `CreditLog` over the ledger's database. `start`, then `keep_on` for as long as the coordinator lives."""

    def __init__(
        self,
        spec: RunSpec,
        owner: Identity,
        view: SwarmView,
        ledger: LedgerThread,
        admitter: Admitter,
        now: Callable[[], float],
    ):
        self._ledger = ledger
        self._view = view
        self._heads = TreeHeadSigner(spec.run_id, owner, ledger, now)
        self._receipts = Receipts(spec, owner, view, ledger, now)
        self._standings = Leaderboard(spec.run_id, ledger, admitter.name_of, admitter.knows, now)
        self._exports = 0
        self.news = asyncio.Event()
        """Set when the chain or the ledger may have changed."""

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read what was signed and who has what. Raises LedgerError."""
        await self._heads.start()
        await self._standings.load()

    async def keep_on(self, newest: Callable[[int], Sequence[RoundAccount]]) -> None:
        """For ever: sign a head each minute; note what each new round leaves out, and what it earned. `newest` gives so
        many of the newest rounds, newest first."""
        signing = asyncio.create_task(self._heads.sign_on(), name="tree heads")
        reading = asyncio.create_task(self._standings.load_recent(), name="recent credits")
        try:
            while True:
                await wait_at_most(self.news, 5.0)
                self.news.clear()
                try:
                    await self._receipts.note(newest(LOOK_BACK))
                    await self._standings.refresh()
                except CairnError as e:  # the ledger's own trouble is on the page already; tried again in 5 s
                    log.error("credits are not brought up to date: %s", e)
                except Exception:  # said loudly, and tried again: heads go on being signed meanwhile
                    log.exception("credits are not brought up to date")
                if reading.done() and not reading.cancelled() and (error := reading.exception()) is not None:
                    log.error("recent averages are read again: %s", error)
                    reading = asyncio.create_task(self._standings.load_recent(), name="recent credits")
        finally:
            for task in (signing, reading):
                task.cancel()
            await asyncio.gather(signing, reading, return_exceptions=True)

    @property
    def problem(self) -> str:
        """Why the log is not signed, for people; empty when all is well."""
        return self._heads.problem

    # -- answers ---------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        return self._standings.rounds

    @property
    def unsigned_seconds(self) -> float:
        return self._heads.unsigned_seconds

    @property
    def head_seconds(self) -> float:
        """Since a tree head was signed; before the first, since the start."""
        return self._heads.age

    async def heads(self, before: int | None, limit: int) -> list[bytes]:
        if before is not None:
            return [h.sent for h in await self._ledger.read(lambda ledger: ledger.heads(limit, before))]
        newest = await self._heads.newest()
        older = []
        if limit > 1:
            size = newest.body.size
            older = await self._ledger.read(lambda ledger: ledger.heads(limit - 1, size))
        return [newest.sent, *(h.sent for h in older)]

    async def entries(self, first: int, limit: int) -> tuple[list[bytes], int]:
        def read(ledger: Ledger) -> tuple[list[bytes], int]:
            found = ledger.entries(first, min(limit, MAX_ENTRIES))
            return found, ledger.size()

        found, size = await self._ledger.read(read)
        return _fitting(found), size

    async def lines(self, first: int, limit: int) -> tuple[list[EntryLines], int]:
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
        return await self._prove(size, lambda ledger: inclusion_proof(entry, size, ledger.node))

    async def consistency(self, first: int, second: int) -> tuple[bytes, ...]:
        return await self._prove(second, lambda ledger: consistency_proof(first, second, ledger.node))

    async def _prove(self, size: int, prove: Callable[[Ledger], tuple[bytes, ...]]) -> tuple[bytes, ...]:
        def checked(ledger: Ledger) -> tuple[bytes, ...]:
            if size > (there := ledger.size()):
                raise MalformedError(f"the log has {there} entries, not {size}")
            return prove(ledger)

        return await self._ledger.read(checked)

    async def receipts(self, peer: PeerKey, before: int | None, limit: int) -> ReceiptPage:
        return await self._receipts.page(peer, before, min(limit, MAX_PAGE))

    async def standing(self, key: PeerKey) -> CreditSummary:
        return self._standings.of(key)

    async def leaderboard(self, by: Grouping, limit: int, after: str) -> list[CreditSummary]:
        return self._standings.leaderboard(by, min(limit, MAX_PAGE), after)

    async def bind(self, sent: bytes) -> int:
        return await self._standings.bind(sent)

    async def certificate(self, record: Digest) -> bytes | None:
        found = self._view.certificate(record)
        return None if found is None else encode_certificate(found)

    async def certificates(self, after: Digest, limit: int) -> tuple[list[bytes], bool]:
        limit = min(limit, MAX_CERTIFICATES)
        found = await self._view.certificates_after(after, limit)
        if found is None:
            raise MalformedError(f"record {after.short} is not on the chain that this coordinator's observer holds")
        sent = _fitting(encode_certificate(c) for c in found)
        return sent, len(sent) < len(found) or len(found) == limit

    async def export(self, form: str) -> AsyncIterator[bytes]:
        """All credits as a file ("csv" or "parquet"), in pieces. Raises TooManyError, ParquetMissingError."""
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
    """The first of them that fill an answer: one at least. No more are made than that and one."""
    taken: list[bytes] = []
    total = 0
    for piece in found:
        total += len(piece)
        if taken and total > PAGE_BYTES:
            break
        taken.append(piece)
    return taken
