"""Signed tree heads: each minute the owner's key binds the owner to the log of credits.

A head is on disk before it is published. A log that is shorter than a signed head, or has another root at that size,
was altered: then nothing more is signed, and `problem` says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coordinator.errors import LedgerConflictError
from coordinator.ledger import Ledger, TreeHeadRow
from coordinator.ledger_thread import LedgerThread
from protocol.errors import CairnError, ProtocolError
from protocol.identity import Identity
from protocol.ids import Digest, RunId
from protocol.ledger.statements import SignedStatement, TreeHead, open_tree_head, sign

log = logging.getLogger(__name__)

HEAD_SECONDS = 60.0
"""Seconds between two heads, and the maximum age of the newest when it is requested."""

POLL_SECONDS = 5.0
"""Seconds between two checks whether the log has grown."""

KEEP_UNCHANGED = 3600.0
"""Seconds between two stored heads of a log that has not grown: they bind the owner to nothing new."""


class TreeHeadSigner:
    """Signs the heads of one log. `start`, then `sign_forever` for as long as the coordinator lives."""

    def __init__(self, run: RunId, owner: Identity, ledger: LedgerThread, now: Callable[[], float]):
        self._run = run
        self._owner = owner
        self._ledger = ledger
        self._now = now
        self._newest: SignedStatement[TreeHead] | None = None
        self._kept_at = 0.0
        self._began = now()
        self._broken = ""
        self._lock = asyncio.Lock()
        self.problem = ""
        """Why nothing is signed, for people; empty when all is well."""

    @property
    def age(self) -> float:
        """Seconds since a head was signed, stored or not.

        It is about a minute while all is well, also while the log does not grow. Before the first head, or if the
        newest in the database is not the owner's, it counts from the start.
        """
        signed = None if self._newest is None or self._broken else self._newest.body.time / 1000
        return max(0.0, self._now() - (self._began if signed is None else signed))

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

    async def sign_forever(self) -> None:
        """Sign a head each minute. Problems are logged, kept in `problem`, and retried."""
        while True:
            try:
                await self.newest()
            except CairnError as e:
                if str(e) != self.problem:
                    log.error("the log of credits is not signed: %s", e)
                self.problem = str(e)
            except Exception as e:  # logged, kept in `problem`, and retried
                if not self.problem:
                    log.exception("the log of credits is not signed")
                self.problem = f"a fault of the coordinator ({type(e).__name__}: {e}); its log has the details"
            await asyncio.sleep(POLL_SECONDS)

    async def newest(self) -> SignedStatement[TreeHead]:
        """Return a head that is at most a minute old; it is signed now if the newest is older. Raises LedgerError."""
        async with self._lock:
            newest, now = self._newest, self._now()
            if newest is None or not 0 <= now - newest.body.time / 1000 < HEAD_SECONDS:
                newest = await self._sign(now)
            self.problem = ""
            return newest

    async def _sign(self, now: float) -> SignedStatement[TreeHead]:
        if self._broken:
            raise LedgerConflictError(self._broken)
        before = self._newest
        covered = before.body.size if before is not None else 0

        def roots(ledger: Ledger) -> tuple[int, Digest, Digest | None]:
            size = ledger.size()
            return size, ledger.root(size), ledger.root(covered) if covered <= size else None

        try:
            size, root, root_before = await self._ledger.read(roots)
        except IndexError as e:
            raise LedgerConflictError(
                f"a hash of the log is missing (level, place: {e}): the database was altered. Nothing is signed "
                "until it is as it was"
            ) from None
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
        head = sign(self._owner, TreeHead(self._run, size, root, time))
        if before is None or size > covered or now - self._kept_at >= KEEP_UNCHANGED:
            # On disk before it is published: a head that was lost could be contradicted.
            await self._ledger.run(lambda ledger: ledger.add_head(TreeHeadRow(size, root, time, head.encoded)))
            self._kept_at = now
        self._newest = head
        return head
