"""The owner's words on the run (docs/control.md) at the coordinator: kept, told to the swarm, and what follows here.

The order is: on disk, then published, then the ledger; after a kill at any moment the next start goes on where this one
was. Whoever has the owner's key may command: a word counts for its signature, whoever brings it.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.chain_indexer import ChainIndexer
from coordinator.errors import CoordinatorError, RefusedError
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import SwarmView
from protocol.errors import CairnError, MalformedError, ProtocolError
from protocol.ids import Digest, PeerKey, Round
from protocol.message_codec import MessageDecoder
from protocol.messages import Directive, Signed
from protocol.spec import RunSpec

log = logging.getLogger(__name__)

FILE = "directives"
"""In the run's folder: a line for each word, base64 of its envelope; and "done N" when the ledger has followed the N-th
rollback. Only ever added to."""

MAX_LINE = 128 * 1024


class RunControl:
    """One run's. Read on the event loop."""

    def __init__(self, spec: RunSpec, view: SwarmView, follower: ChainIndexer, ledger: LedgerThread, folder: Path):
        self._decoder = MessageDecoder(spec.run_id, spec.owner_key, remember=16)
        self._view = view
        self._follower = follower
        self._ledger = ledger
        self._path = folder / FILE
        self._taking = asyncio.Lock()
        self._hearing: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self.newest: Signed[Directive] | None = None

    async def start(self) -> None:
        """Go on by what was kept, or by what the swarm knows, whichever is newer. Raises CairnError."""
        self._unsubscribe = self._view.subscribe(self._look)
        async with self._taking:
            await self._go_on()

    async def stop(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)

    async def _go_on(self) -> None:
        words, done = await asyncio.to_thread(read_directives, self._path, self._decoder)
        theirs = self._view.directive
        if theirs is not None and all(theirs.body.rank > w.body.rank for w in words):
            await asyncio.to_thread(append_line, self._path, line_of(theirs))
            words.append(theirs)
        if not words:
            return
        newest = max(words, key=lambda w: w.body.rank)
        self._heed(newest)
        await self._view.publish_directive(newest)
        for epoch in range(1, newest.body.epoch + 1):
            first = next((w for w in words if w.body.epoch == epoch), None)
            if first is not None and epoch not in done:
                await self._roll_back(first)
        await self._follower.turn(newest.body.epoch)
        log.info("the owner's newest word: %s", describe(newest.body))

    async def take(self, sent: bytes) -> Signed[Directive]:
        """A word of the owner's: kept and told when this returns. Raises RefusedError, ProtocolError, CairnError."""
        word = self._decoder.open(sent, Directive)
        async with self._taking:
            if self.newest is not None and word.body.rank <= self.newest.body.rank:
                if word.sent == self.newest.sent:
                    return word
                raise RefusedError("a newer word of the owner is known here: look at it, and give the order again")
            theirs = self._view.directive
            if theirs is not None and self._is_behind(theirs) and theirs.sent != word.sent:
                self._look()
                raise RefusedError("the swarm knows a newer word of the owner: look at it, and give the order again")
            before = 0 if self.newest is None else self.newest.body.epoch
            back = word.body.rollback
            if self.newest is not None and back != self.newest.body.rollback and word.body.epoch == before:
                raise RefusedError("the run was rolled back meanwhile: look where it is, and give the order again")
            if back is not None and back.epoch > before:
                await self._view.offer_state(back.state, back.record)
            await asyncio.to_thread(append_line, self._path, line_of(word))
            self._heed(word)
            await self._view.publish_directive(word)
            if word.body.epoch > before:
                await self._roll_back(word)
            await self._follower.turn(word.body.epoch)
        log.warning("by the owner's word: %s", describe(word.body))
        return word

    def _look(self) -> None:
        """The swarm may know a newer word than we: from another coordinator, or before our files were lost."""
        if self._is_behind(self._view.directive) and (self._hearing is None or self._hearing.done()):
            self._hearing = asyncio.create_task(self._hear(), name="the owner's word")

    def _is_behind(self, theirs: Signed[Directive] | None) -> bool:
        return theirs is not None and (self.newest is None or theirs.body.rank > self.newest.body.rank)

    async def _hear(self) -> None:
        """Follow the swarm's newest word as if it had been brought here."""
        try:
            async with self._taking:
                word = self._view.directive
                if word is None or not self._is_behind(word):
                    return
                before = 0 if self.newest is None else self.newest.body.epoch
                await asyncio.to_thread(append_line, self._path, line_of(word))
                self._heed(word)
                if word.body.epoch > before:
                    await self._roll_back(word)
                await self._follower.turn(word.body.epoch)
            log.warning("by the owner's word, heard from the swarm: %s", describe(word.body))
        except CairnError as e:
            log.error("the owner's word that the swarm knows cannot be followed here: %s", e)

    def refusal(self, peer: PeerKey) -> str | None:
        """Why a peer is not admitted; None when nothing is in its way."""
        if self.newest is None:
            return None
        body = self.newest.body
        why = f" ({body.reason})" if body.reason else ""
        if peer in body.banned:
            return f"the run's owner has banned this key{why}: write to the owner if you think that it is a mistake"
        return f"the run has been ended by its owner{why}" if body.order == "ended" else None

    def _heed(self, word: Signed[Directive]) -> None:
        self.newest, body = word, word.body
        self._follower.ruling.change(body.changes, body.from_round, self._follower.training)
        self._follower.ordered, self._follower.banned = None, frozenset(body.banned)
        if body.order != "running":
            since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(body.since))
            why = f": {body.reason}" if body.reason else ""
            self._follower.ordered = (body.order, f"{body.order} by the run's owner since {since}{why}")

    async def _roll_back(self, word: Signed[Directive]) -> None:
        """Take the ledger to where the chain has gone. Rounds that it has not posted it need not take back."""
        back = word.body.rollback
        if back is None:
            return
        number = Round(back.round - 1)
        if not await self._goes_on_from(back.record, number):
            await self._follower.rollback(back.record, number, word.sent)
        await asyncio.to_thread(append_line, self._path, f"done {back.epoch}")

    async def _goes_on_from(self, record: Digest, number: Round) -> bool:
        """Whether the ledger's rounds after this record are those of the chain as it has turned: then nothing is to be
        taken back, as when the file that says so was lost, and the ledger was not."""
        rows = await self._ledger.run(lambda ledger: ledger.rounds(after=number, limit=1))
        following = await self._view.certificates_after(record, 1)
        return bool(rows) and bool(following) and rows[0].record == following[0].digest


def line_of(word: Signed[Directive]) -> str:
    """As it is kept."""
    return base64.b64encode(word.sent).decode()


def describe(body: Directive) -> str:
    """For the log."""
    parts = [body.order]
    if body.banned:
        parts.append(f"{len(body.banned)} banned")
    changed = [n for n in body.changes.__slots__ if getattr(body.changes, n) is not None]
    if changed:
        parts.append(f"{', '.join(changed)} changed from round {body.from_round}")
    if body.rollback is not None:
        parts.append(f"rolled back to round {body.rollback.round} (rollback {body.rollback.epoch})")
    return "; ".join(parts)


def append_line(path: Path, line: str) -> None:
    """Durably. Raises CoordinatorError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # a kill in the middle of a line
            os.write(fd, (b"\n" if torn else b"") + line.encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        why = (e.strerror or str(e)).lower()
        raise CoordinatorError(f"{path} cannot be written: {why}; the order was not given") from None


def read_directives(path: Path, decoder: MessageDecoder) -> tuple[list[Signed[Directive]], set[int]]:
    """The words in the order in which they were kept, and the rollbacks that the ledger has followed. A line that was
    torn by a kill is left out: its order was not acknowledged. Raises CoordinatorError."""
    words: list[Signed[Directive]] = []
    done: set[int] = set()
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return [], set()
    except OSError as e:
        raise CoordinatorError(
            f"{path} cannot be read: {(e.strerror or str(e)).lower()}; mend its permissions"
        ) from None
    for line in lines:
        if line.startswith("done ") and line[5:].isdigit():
            done.add(int(line[5:]))
            continue
        try:
            if not line.strip() or len(line) > MAX_LINE:
                continue
            words.append(decoder.open(base64.b64decode(line, validate=True), Directive))
        except (ValueError, MalformedError, ProtocolError) as e:
            log.warning("%s: a line is left out: %s", path, e)
    return words, done
