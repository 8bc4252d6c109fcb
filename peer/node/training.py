"""The node's training side: what the round machine asks of the trainer, and what the trainer answers.

The trainer's process is kept alive by `Trainer`, moved along the chain by `States`; here their words become the
machine's events, and what the trainer made gets into the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

from peer.channel import (
    SAVE_SECONDS,
    Applied,
    Failed,
    FromTrainer,
    MakeUpdate,
    Note,
    NothingDone,
    Orders,
    Progress,
    Ready,
    Start,
    UpdateMade,
)
from peer.errors import TrainerDied
from peer.node.keeping import Keeping
from peer.node.network import Network
from peer.node.obeying import forget_learnt
from peer.node.states import States
from peer.node.trainer import Trainer
from peer.node.updates import Kind, Updates
from peer.node.usage import UsageLog
from peer.store import Store, StoreError
from protocol.chain import Chain
from protocol.ids import Digest
from protocol.messages import Certificate
from protocol.rounds import actions, events
from protocol.spec import RunSpec
from protocol.state import state_layout

log = logging.getLogger("peer.training")

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Training:
    """Made once what the trainer needs is in the store; `begin`, then `stop`.

    `part_kind`: as in `States`. `post` takes events for the machine, `spawn` makes tasks whose errors end the node,
    `undecided` are the blobs of the open round. `command` replaces the trainer's own.
    """

    def __init__(
        self,
        spec: RunSpec,
        start: Start,
        store: Store,
        chain: Chain,
        network: Network,
        updates: Updates,
        keeping: Keeping,
        *,
        part_kind: Callable[[int, int], Kind],
        post: Callable[[events.Event], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        undecided: Callable[[], Iterable[Digest]],
        command: Sequence[str] | None = None,
    ):
        self._start = start
        self._command = command
        self._store = store
        self._chain = chain
        self._updates = updates
        self._keeping = keeping
        self._post = post
        self._spawn = spawn
        self._undecided = undecided
        self._trainer = self._new_trainer()
        self._states = States(
            spec,
            state_layout(spec.model.layout, spec.outer).checkpoint_size,
            store,
            network,
            updates,
            lambda message: self._trainer.send(message),
            me=start.identity_key,
            everyone=network.everyone,
            failed=post,
            part_kind=part_kind,
            back_from=self._back_from,
        )
        self.progress = Progress(0, 0.0, 0.0, 0, 0.0, False)
        self._usage = UsageLog()
        self._orders: Orders | None = None
        self._look: asyncio.Task[None] | None = None
        self.made = self.missed = 0
        """Own updates that were made, and that a round left out."""
        self._missing = 0
        """Those that the move under way puts back."""
        self._trained_before = 0

    def _back_from(self, record: Digest) -> Iterator[Certificate]:
        """A record's certificate, its parent's, and so on as far as memory goes."""
        if record in self._chain:
            for digest in self._chain.ancestors(record):
                if digest != self._chain.root:
                    yield self._chain.certificate(digest)

    def begin(self) -> None:
        """Start the trainer."""
        self._spawn(self._states.run(), "states")
        self._spawn(self._trainer.run(), "trainer")

    async def stop(self) -> bool:
        """Let the trainer save and leave. True when all that was learnt is on disk. May be called again."""
        return await self._trainer.stop(SAVE_SECONDS)

    @property
    def device(self) -> str:
        """For people; "" until the trainer is ready."""
        return self._trainer.ready.device[:80] if self._trainer.ready is not None else ""

    @property
    def trained(self) -> int:
        """Windows of all inner steps since this node started: what was trained twice counts twice."""
        return self._trained_before + self.progress.trained

    @property
    def restarts(self) -> int:
        return self._trainer.restarts

    def _new_trainer(self) -> Trainer:
        return Trainer(self._start, on_message=self._on_message, on_lost=self._on_lost, command=self._command)

    # -- what the machine asks -------------------------------------------------------------------------------

    def make_update(self, ask: actions.RequestUpdate) -> None:
        self._spawn(self._ask_for_update(ask), "update")

    async def _ask_for_update(self, ask: actions.RequestUpdate) -> None:
        out = self._store.scratch / f"update-{ask.round}.blob"
        try:
            await self._trainer.send(MakeUpdate(round=ask.round, parent=ask.parent, out=out))
        except TrainerDied as e:
            # `_on_lost` tells the machine that the state is gone.
            log.warning("no update for round %d: %s", ask.round, e)

    def order(self, orders: Orders) -> None:
        """What the trainer is to do and not to do from now on; those that follow it hear it too."""
        self._orders = orders
        self._spawn(self._send_orders(), "orders")

    async def _send_orders(self) -> None:
        if self._orders is not None:
            with contextlib.suppress(TrainerDied):  # the next one is told when it is ready
                await self._trainer.send(self._orders)

    async def _begin_afresh(self, action: actions.Resync) -> None:
        """With a new process: nothing that this one has learnt is of a state that counts."""
        log.warning("the trainer starts anew: what it had learnt since is of rounds that were rolled back")
        await self._trainer.stop(0.0)
        await asyncio.to_thread(forget_learnt, self._start.state_folder)
        self._trainer = self._new_trainer()
        self._spawn(self._trainer.run(), "trainer")
        self._states.resync(action)

    def move(self, action: actions.ApplyRecord | actions.Resync) -> None:
        """Get to the state that the action leads to."""
        if self._trainer.stopping:
            log.info("the chain turned after the run's end: the trainer is started again")
            self._trainer = self._new_trainer()
            self._spawn(self._trainer.run(), "trainer")
        self._stop_looking()
        self._missing = len(action.missed)
        if isinstance(action, actions.Resync) and action.afresh:
            self._states.drop()
            self._spawn(self._begin_afresh(action), "a fresh start")
            return
        if isinstance(action, actions.ApplyRecord):
            self._states.apply(action)
        else:
            self._states.resync(action)

    # -- what the trainer says -------------------------------------------------------------------------------

    def _on_message(self, message: FromTrainer) -> None:
        match message:
            case Progress():
                self.progress = message
                if line := self._usage.line(message, time.monotonic()):
                    log.info("%s", line)
                self._post(events.TrainingProgress(message.windows, message.loss, message.tokens_per_second))
            case UpdateMade():
                self._spawn(self._take_update(message), "own update")
            case NothingDone(parent):
                self._post(events.UpdateReady(parent, 0, 0, 0, None, 0, 0.0))
            case Applied():
                self._spawn(self._take_state(message), "state")
            case Failed(what, reason, fatal):
                log.error("trainer: %s", reason)
                if what in ("load", "apply") and not fatal:
                    self._look = self._spawn(self._not_applied(reason), "a look for damage")
                elif what == "update" and not fatal:
                    self._post(events.MoveFailed(self._chain.head, reason))
            case Note(level, _, text):
                log.log(LEVELS[level], "%s", text)
            case Ready():
                if self._orders is not None:
                    self._spawn(self._send_orders(), "orders")
                log.info(
                    "training on %s: %s parameters, %s bytes an update",
                    message.device, f"{message.parameters:,}", f"{message.update_size:,}",
                )  # fmt: skip
            case _:
                pass

    def _stop_looking(self) -> None:
        """What is asked of the trainer next, or its end, is newer than that it could not do what was asked before."""
        if self._look is not None:
            self._look.cancel()
            self._look = None

    async def _not_applied(self, reason: str) -> None:
        try:
            await self._states.look_for_damage()
        except StoreError as e:
            log.error("%s", e)
        self._post(events.MoveFailed(self._chain.head, reason))

    def _on_lost(self, reason: str) -> None:
        self._stop_looking()
        self._trained_before += self.progress.trained
        self.progress = Progress(0, 0.0, 0.0, 0, 0.0, False)
        self._states.drop()
        self._post(events.TrainingProgress(0, 0.0, 0.0))
        self._post(events.MoveFailed(self._chain.head, reason))

    async def _take_update(self, made: UpdateMade) -> None:
        blob = await asyncio.to_thread(self._store.adopt, made.blob_path, made.digest)
        self._updates.trust(blob)
        self.made += 1
        if made.parent in self._chain:
            self._keeping.own(self._chain.height(made.parent), blob)
        self._post(events.BlobHeld(blob))
        self._post(
            events.UpdateReady(
                made.parent, made.first_window, made.end_window, made.inner_steps, blob, made.size, made.loss
            )
        )

    async def _take_state(self, applied: Applied) -> None:
        self.missed, self._missing = self.missed + self._missing, 0
        if applied.checkpoint_path is not None:
            try:
                await asyncio.to_thread(self._store.adopt, applied.checkpoint_path, applied.state_digest)
                self._keeping.state(applied.state_digest)
            except StoreError as e:
                log.error("the checkpoint was not kept: %s", e)
                applied.checkpoint_path.unlink(missing_ok=True)
        self._post(events.StateReached(applied.record, applied.state_digest))
        self._updates.forget(await self._keeping.prune(self._undecided()))
