"""Run control at the coordinator (docs/control.md).

It accepts the owner's directives, and makes everything here follow them.

The order is: on disk, then published, then the ledger. These steps go on to their end, though the caller goes away.
After a fault they are tried again, and after a kill at any moment the next start completes the rest. The owner's
signature is the only authority: a directive counts for it, whoever delivers it.

A directive states everything, so one that was made from an old directive undoes all orders since. After a restore of
the folder only the swarm has these. So no order is given while the swarm may know a newer directive (`wait_reason`).
Then it counts only if it was made from the newest one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.chain_indexer import ChainIndexer
from coordinator.directive_file import DirectiveFile
from coordinator.directives import DirectiveEffects
from coordinator.errors import RefusedError
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import SwarmView
from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import Directive, Rollback, Signed

log = logging.getLogger(__name__)

STOP_SECONDS = 3.0
"""Seconds that a directive has to be followed to its end when the coordinator stops."""

WAIT_SECONDS = 60.0
"""Maximum seconds for which orders wait for a newer directive of the swarm. There may be no swarm, or none newer."""

CLAIM_SECONDS = 3600.0
"""Seconds until orders wait again for what a member claims to have: one that lies delays orders, and prevents none."""

LONGEST_WAIT = 120.0
"""Seconds of it at most, also if heartbeats are rare: the command waits a little longer."""

WAIT_BEATS, SETTLE_BEATS = 3, 2
"""Heartbeats for which orders wait at least for a first member, and for others after it."""


@dataclass(eq=False)
class RunControl:
    """The directives of one run. Used on the event loop."""

    decoder: MessageDecoder
    view: SwarmView
    effects: DirectiveEffects
    indexer: ChainIndexer
    ledger: LedgerThread
    file: DirectiveFile
    signer: KeySigner
    run: RunId
    now: Callable[[], float]
    on_rollback: Callable[[Rollback], Awaitable[None]]
    """Called with each rollback that is followed, before the ledger follows it."""

    clock: Callable[[], float] = time.monotonic

    newest: Signed[Directive] | None = field(default=None, init=False)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _receiving: asyncio.Task[None] | None = field(default=None, init=False)
    _giving: asyncio.Task[None] | None = field(default=None, init=False)
    _following: asyncio.Task[None] | None = field(default=None, init=False)
    _unfinished: bool = field(default=False, init=False)
    """True while the newest directive is not followed to its end."""

    _told: str = field(default="", init=False)
    """The reason that was logged last."""

    _told_giving: str = field(default="", init=False)
    """The reason why waiting orders were not given that was logged last."""

    _started_at: float | None = field(default=None, init=False)
    """When the wait for a first member began; None if the run has not begun, so that the swarm has no directive."""

    _heard_at: float | None = field(default=None, init=False)
    _claimed_at: float | None = field(default=None, init=False)
    """When orders began to wait for what a member claims to have."""

    _is_order_left: bool = field(default=False, init=False)

    _unsubscribe: Callable[[], None] | None = field(default=None, init=False)

    async def start(self, *, begun: bool = False) -> None:
        """Follow the newest directive, from the file or from the swarm. Raises CairnError.

        `begun`: the run has begun before, so its members may know a newer one.
        """
        self._unsubscribe = self.view.subscribe(self._check_swarm)
        async with self._changing:
            await self._resume()
            known = begun or self.newest is not None or await self.ledger.run(lambda ledger: ledger.last())
            self._started_at = self.clock() if known else None
            self._is_order_left = bool(await asyncio.to_thread(self.file.left))

    async def stop(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        for task in (self._receiving, self._giving):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._following is not None:
            await asyncio.wait({self._following}, timeout=STOP_SECONDS)
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Let one change of the directives end before the next begins."""
        async with self._changing:
            if self._following is not None:
                await asyncio.wait({self._following})
            yield

    async def _to_its_end(self, steps: Coroutine[Any, Any, None]) -> None:
        """Wait for steps that go on when the caller is cancelled: no directive may be followed half-way."""
        self._following = task = asyncio.create_task(steps, name="following a directive")
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    async def _resume(self) -> None:
        """Do what is left to do of the directives in the file, and of a newer one of the swarm. Raises CairnError."""
        stored, done = await asyncio.to_thread(self.file.read)
        theirs = self.view.directive
        if theirs is not None and all(theirs.body.precedence > d.body.precedence for d in stored):
            if self.newest is not None and theirs.body.sequence < self.newest.body.sequence:
                log.error(
                    "the last order was given here before the swarm's rollback was known, and does not count: give it "
                    "again"
                )
            await asyncio.to_thread(self.file.append, theirs)
            stored.append(theirs)
        if not stored:
            return
        self._unfinished = True
        in_order = sorted(stored, key=lambda d: d.body.precedence)
        for directive in in_order:  # each, since a ban's reason is in the directive that gave it
            if self._is_behind(directive):
                self.newest = directive
                self.effects.apply(directive.body)
        newest = in_order[-1]
        if theirs is None or theirs.encoded != newest.encoded:
            await self.view.publish_directive(newest)
        await self.indexer.note_verdicts(newest.body.verdicts)
        for epoch in range(1, newest.body.epoch + 1):
            first = next((d for d in stored if d.body.epoch == epoch), None)
            if first is None or (back := first.body.rollback) is None:
                continue
            if epoch not in done:
                await self._roll_back(first)
            elif (left := done[epoch]) is not None:
                await self.indexer.post_abandoned(left, back)
        await self.indexer.switch_epoch(newest.body.epoch)
        self._unfinished, self._told = False, ""
        log.warning("by the owner's newest directive: %s", describe(newest.body))

    def wait_reason(self) -> str:
        """Return why an order must wait, for people; "" when it need not."""
        if self._is_behind(self.view.directive):
            return "the swarm knows a newer directive of the owner, which is followed here first"
        if why := self._doubt():
            return why
        return "an order that was left in the run's folder is given first" if self._is_order_left else ""

    def _doubt(self) -> str:
        """Return why the swarm may know a newer directive than this one; "" when it is the newest.

        A member's heartbeat says which it has. That is only a claim until the directive is here.
        """
        now, heartbeat_seconds = self.clock(), self.effects.round_policy.heartbeat_seconds
        beats = [h.heartbeat for h in self.view.heartbeats().values()]
        if beats and self._heard_at is None:
            self._heard_at = now
        longest = min(LONGEST_WAIT, max(WAIT_SECONDS, WAIT_BEATS * heartbeat_seconds))
        if any(b.directive_sequence > self._sequence for b in beats):
            if self._claimed_at is None or now - self._claimed_at >= CLAIM_SECONDS:
                self._claimed_at = now
            if now - self._claimed_at < longest:
                return "a member has a newer directive of the owner, which is not here yet"
        if self._started_at is None or now >= self._started_at + longest:
            return ""
        if self._heard_at is None:
            return "no member has answered since the coordinator's start, and they may have a newer directive"
        if now < self._heard_at + min(LONGEST_WAIT / 2, SETTLE_BEATS * heartbeat_seconds):
            return "members have just begun to answer, and one may have a newer directive"
        return ""

    @property
    def _sequence(self) -> int:
        return 0 if self.newest is None else self.newest.body.sequence

    @property
    def _base(self) -> bytes:
        """Digest of the directive from which the next order must be made; b"" for none."""
        return b"" if self.newest is None else bytes(self.newest.digest)

    async def accept(self, encoded: bytes, base: bytes | None = None) -> Signed[Directive]:
        """Store, publish and follow a directive (an envelope). Raises RefusedError, ProtocolError, CairnError.

        `base` is the digest of the directive that it was made from (b"": none); None if the caller does not say. The
        same one again does what is left to do of it.
        """
        directive = self.decoder.decode(encoded, Directive)
        async with self._alone():
            if self.newest is not None and directive.encoded == self.newest.encoded:
                if self._unfinished:
                    await self._to_its_end(self._resume())
                return directive
            theirs = self.view.directive
            if theirs is not None and self._is_behind(theirs) and theirs.encoded != directive.encoded:
                self._check_swarm()
                raise RefusedError("the swarm knows a newer directive of the owner: read it, and give the order again")
            if why := self._doubt():
                raise RefusedError(f"{why}: give the order again in a minute")
            await self._give_left()
            if self.newest is not None and directive.body.precedence <= self.newest.body.precedence:
                raise RefusedError("a newer directive of the owner is known here: read it, and give the order again")
            if base is not None and base != self._base:
                raise RefusedError("another directive was given meanwhile: read it, and give the order again")
            before = 0 if self.newest is None else self.newest.body.epoch
            back = directive.body.rollback
            if self.newest is not None and back != self.newest.body.rollback and directive.body.epoch == before:
                raise RefusedError("the run was rolled back meanwhile: look where it is, and give the order again")
            await self._to_its_end(self._follow(directive))
        return directive

    async def _follow(self, directive: Signed[Directive]) -> None:
        back = directive.body.rollback
        if back is not None and (self.newest is None or back.epoch > self.newest.body.epoch):
            await self.view.offer_state(back.state, back.record)
        await asyncio.to_thread(self.file.append, directive)
        await self._resume()

    def _check_swarm(self) -> None:
        """Follow the swarm's directive if it is newer: another coordinator gave it, or files were lost here.

        One that a fault has interrupted is tried again.
        """
        due = self._unfinished or self._is_behind(self.view.directive)
        if due and (self._receiving is None or self._receiving.done()):
            self._receiving = asyncio.create_task(self._receive(), name="the owner's directive")

    def _is_behind(self, theirs: Signed[Directive] | None) -> bool:
        return theirs is not None and (self.newest is None or theirs.body.precedence > self.newest.body.precedence)

    async def _receive(self) -> None:
        try:
            async with self._alone():
                if self._unfinished or self._is_behind(self.view.directive):
                    await self._to_its_end(self._resume())
        except CairnError as e:
            if str(e) != self._told:  # each pass tries again
                log.error("the owner's directive is not followed to its end here, which is tried again: %s", e)
            self._told = str(e)

    def tend(self) -> None:
        """Try an interrupted directive again. Give the orders that wait, and verdicts that the chain should carry."""
        if self.indexer.lacks_rollback:
            self.indexer.lacks_rollback, self._unfinished = False, True
        if self._unfinished:
            self._check_swarm()
        if self._giving is None or self._giving.done():
            self._giving = asyncio.create_task(self._give_what_waits(), name="waiting orders")

    async def _give_what_waits(self) -> None:
        """Give the orders in the folder, then verdicts, once the newest directive is known here."""
        try:
            async with self._alone():
                if not self._is_behind(self.view.directive) and not self._doubt():
                    await self._give_left()
                    await self._issue_verdicts()
            self._told_giving = ""
        except CairnError as e:
            if str(e) != self._told_giving:  # each pass tries again
                log.error("orders or verdicts could not be given, which is tried again: %s", e)
            self._told_giving = str(e)

    async def _give_left(self) -> None:
        """Give the orders that were left in the folder, oldest first: those that were made from the newest directive.

        The others would undo what was ordered since, here or at another copy of the folder. Raises CairnError.
        """
        for order in await asyncio.to_thread(self.file.left):
            if order.base == self._base and self._is_behind(order.directive):
                await self._to_its_end(self._follow(order.directive))
                continue
            await asyncio.to_thread(self.file.mark_refused, order.directive)
            log.error(
                "an order that was left in the run's folder was made from an older directive than the newest, and "
                "would undo what was ordered since: it is not given. Give it again if you still want it. It was: %s",
                describe(order.directive.body),
            )
        self._is_order_left = False

    async def _issue_verdicts(self) -> None:
        """Bring verdicts that the chain should carry into a directive of their own. Raises CairnError."""
        verdicts = tuple(sorted(self.indexer.verdicts, key=lambda v: (v.record, v.peer)))
        before = Directive(self.run, 0) if self.newest is None else self.newest.body
        if set(verdicts) <= set(before.verdicts):
            return
        sequence = max(before.sequence + 1, int(self.now() * 1000))
        directive = self.signer.sign(replace(before, sequence=sequence, verdicts=verdicts))
        await self._to_its_end(self._follow(directive))
        for v in verdicts:
            log.warning("what peer %s is credited for in record %s is void: %s", v.peer.short, v.record.short, v.reason)

    def refusal(self, peer: PeerKey) -> str | None:
        """Return why a peer is not admitted; None when no directive forbids it."""
        if self.newest is None:
            return None
        if (reason := self.effects.bans.get(peer)) is not None:
            why = f" ({reason})" if reason else ""
            return f"the run's owner has banned this key{why}: write to the owner if you think that it is a mistake"
        if self.newest.body.run_status != "ended":
            return None
        last = self.view.resting_state()
        if last is not None and last.state is None and peer in last.contributors:
            return None  # it may be all that has the last state
        why = f" ({self.effects.order_reason})" if self.effects.order_reason else ""
        return f"the run has been ended by its owner{why}"

    async def _roll_back(self, directive: Signed[Directive]) -> None:
        """Take the ledger to the branch that the chain follows now, as far as it has posted the other one."""
        back = directive.body.rollback
        if back is None:
            return
        last, left = await self.ledger.run(lambda ledger: ledger.last()), None
        if not await self._continues_from(back.record, Round(back.round - 1)):
            if last is not None:  # soon, since the chain has left them; and before the ledger says that it is done
                await self.view.keep_abandoned(*last, back)
            await self.on_rollback(back)
            if await self.indexer.rollback(back) and last is not None:
                left = last[1]
        await asyncio.to_thread(self.file.mark_done, back.epoch, left)

    async def _continues_from(self, record: Digest, number: Round) -> bool:
        """Return whether the ledger's rounds after this record are those of the chain as it is now.

        Then nothing is taken back: the file that says so was lost, and the ledger was not.
        """
        rows = await self.ledger.run(lambda ledger: ledger.rounds(after=number, limit=1))
        following = await self.view.certificates_after(record, 1)
        return bool(rows) and bool(following) and rows[0].record == following[0].digest


def describe(body: Directive) -> str:
    """Return a directive as one phrase, for the log."""
    phrases = [body.run_status]
    if body.banned:
        phrases.append(f"{len(body.banned)} banned")
    if body.pardons:
        phrases.append(f"{len(body.pardons)} pardoned")
    changed = [n for n in body.changes.__slots__ if getattr(body.changes, n) is not None]
    if changed:
        phrases.append(f"{', '.join(changed)} changed from round {body.from_round}")
    if body.rollback is not None:
        phrases.append(f"rolled back to round {body.rollback.round} (rollback {body.rollback.epoch})")
    return "; ".join(phrases)


def _log_failure(following: asyncio.Task[None]) -> None:
    """Log why a directive was not followed whose caller has gone."""
    if not following.cancelled() and (error := following.exception()) is not None:
        fault = None if isinstance(error, CairnError) else error
        log.error("the owner's directive is not followed to its end here: %s", error, exc_info=fault)
