"""Signed tree heads: each minute the owner's key says what the log of credits is, and never anything else of it.

A head is written down before it is given out. A log that is shorter than a head that was signed, or has another root at
its size, was altered: then nothing is signed any more, and `problem` says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coordinator.errors import LedgerConflictError
from coordinator.ledger import Head, Ledger
from coordinator.ledger_thread import LedgerThread
from protocol.errors import CairnError, ProtocolError
from protocol.identity import Identity
from protocol.ids import Digest, RunId
from protocol.ledger.entries import decode_entry
from protocol.ledger.statements import TreeHead, Word, open_tree_head, sign
from protocol.proofs import root_at

log = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds between two heads, and the most that the newest is old when somebody asks."""

LOOK = 5.0
"""Seconds between two looks at whether the log has grown."""

KEEP_UNCHANGED = 3600.0
"""A head of a log that has not grown is fresh for who asks, and is written down only so often: it says nothing that the
one before did not bind the owner to."""


class TreeHeads:
    """`start`, then `sign_on` for as long as the coordinator lives."""

    def __init__(self, run: RunId, owner: Identity, ledger: LedgerThread, now: Callable[[], float]):
        self._run = run
        self._owner = owner
        self._ledger = ledger
        self._now = now
        self._newest: Word[TreeHead] | None = None
        self._kept_at = 0.0
        self._unsigned_since: float | None = None
        self._began = now()
        self._broken = ""
        self._lock = asyncio.Lock()
        self.problem = ""
        """Why nothing is signed, for people; empty when all is well."""

    @property
    def unsigned_seconds(self) -> float:
        """For how long the log holds entries that no head covers; 0 when all is signed. More than a few minutes are a
        reason to alarm the owner."""
        return 0.0 if self._unsigned_since is None else max(0.0, self._now() - self._unsigned_since)

    @property
    def head_seconds(self) -> float:
        """Since a head was signed (before the first: since the start), written down or not: about a minute while all is
        well, also while the log does not grow."""
        return max(0.0, self._now() - (self._began if self._newest is None else self._newest.body.time / 1000))

    @property
    def size(self) -> int:
        """Entries that the newest head covers."""
        return self._newest.body.size if self._newest is not None else 0

    async def start(self) -> None:
        """Read the newest head. Raises LedgerError."""
        heads = await self._ledger.read(lambda ledger: ledger.heads(1))
        if not heads:
            return
        try:
            self._newest = open_tree_head(heads[0].sent, self._run, self._owner.key)
            self._kept_at = self._newest.body.time / 1000
        except ProtocolError as e:
            self._broken = (
                f"the newest tree head in the database is none of this run's owner ({e}): the database was altered. "
                "Nothing is signed until it is as it was"
            )

    async def sign_on(self) -> None:
        """For ever: a head each minute. What is in the way is logged, kept in `problem`, and tried again."""
        while True:
            try:
                await self._look()
                await self.newest()
            except CairnError as e:
                if str(e) != self.problem:
                    log.error("the log of credits is not signed: %s", e)
                self.problem = str(e)
            await asyncio.sleep(LOOK)

    async def newest(self) -> Word[TreeHead]:
        """A head that is at most a minute old; signed now if the newest is older. Raises LedgerError."""
        async with self._lock:
            newest, now = self._newest, self._now()
            if newest is None or not 0 <= now - newest.body.time / 1000 < EVERY:
                newest = await self._sign(now)
            self.problem = ""
            return newest

    async def _look(self) -> None:
        covered = self.size

        def unsigned(ledger: Ledger) -> float | None:
            first = ledger.entries(covered, 1)
            return decode_entry(first[0]).time / 1000 if first else None

        self._unsigned_since = await self._ledger.read(unsigned)

    async def _sign(self, now: float) -> Word[TreeHead]:
        if self._broken:
            raise LedgerConflictError(self._broken)
        before = self._newest
        covered = before.body.size if before is not None else 0

        def roots(ledger: Ledger) -> tuple[int, Digest, Digest | None]:
            size = ledger.size()
            return size, root_at(size, ledger.node), root_at(covered, ledger.node) if covered <= size else None

        size, root, root_before = await self._ledger.read(roots)
        time = int(now * 1000)
        if before is not None:
            if size < covered:
                raise LedgerConflictError(
                    f"the log has {size} entries, but a tree head over {covered} was signed: the database was altered, "
                    "or an old copy of it was put in its place. Nothing is signed until it is whole again"
                )
            if root_before != before.body.root:
                raise LedgerConflictError(
                    f"the first {covered} entries of the log hash to another root than the one that was signed: the "
                    "database was altered. Nothing is signed until it is as it was"
                )
            time = max(time, before.body.time)
        word = sign(self._owner, TreeHead(self._run, size, root, time))
        if before is None or size > covered or now - self._kept_at >= KEEP_UNCHANGED:
            # First on disk, then given out: a head that was lost could be contradicted.
            await self._ledger.run(lambda ledger: ledger.add_head(Head(size, root, time, word.sent)))
            self._kept_at = now
        self._newest = word
        self._unsigned_since = None
        return word
