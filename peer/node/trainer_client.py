"""The node's side of the trainer: the round machine's requests to it, and its answers as events for the machine.

`TrainerSupervisor` keeps the process alive and `StateLoader` moves it along the chain. An update's fate (accepted,
missed, regained) is decided by the machine alone (`protocol.rounds.own_updates`). The trainer has a copy for its error
feedback, and changes it only as the machine says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from peer import channel
from peer.errors import TrainerDied
from peer.fetched_data import fetched_shards
from peer.node.blob_retention import BlobRetention
from peer.node.events import Post
from peer.node.network import Network
from peer.node.options import NodeOptions
from peer.node.rest import RestWish
from peer.node.round_blob_fetcher import RoundBlobFetcher
from peer.node.state_loader import StateLoader, drop_if_damaged
from peer.node.tasks import Tasks
from peer.node.trainer_files import (
    fetch_assets,
    fetch_training_files,
    remove_drafts,
    remove_outdated_state,
    remove_saved_state,
    start_message,
)
from peer.node.trainer_supervisor import EXIT_SECONDS, TrainerSupervisor
from peer.node.usage_log import UsageLog
from peer.store import Store, StoreError
from peer.swarm.pace import Pace
from protocol.chain import Chain
from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey
from protocol.rounds import events
from protocol.rounds.actions import ApplyRecord, KeepState, RequestUpdate, SyncState
from protocol.rounds.rest import HAND_IN_SECONDS, REST_SECONDS
from protocol.spec import RunSpec

log = logging.getLogger(__name__)

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

RELEASE_SECONDS = REST_SECONDS - HAND_IN_SECONDS - EXIT_SECONDS
"""Seconds in which a released trainer has to save and exit, before it is killed."""

NO_PROGRESS = channel.Progress(0, 0.0, 0.0, False)


@dataclass(eq=False)
class TrainerClient:
    """The node's access to its trainer: `begin` it once the node is in the swarm, `stop` it at the end.

    `post` receives events for the machine. While `rest` has a reason no step is made, and `release` ends the process
    until `acquire`.
    `pace`, of what this peer gets, counts the training data that comes from addresses. `supervise` makes the supervisor
    of a process (tests replace it).
    """

    spec: RunSpec
    me: PeerKey
    options: NodeOptions
    store: Store
    chain: Chain
    updates: RoundBlobFetcher
    retention: BlobRetention
    loader: StateLoader
    tasks: Tasks
    post: Post
    rest: RestWish
    pace: Pace
    supervise: Callable[..., TrainerSupervisor] = TrainerSupervisor

    def __post_init__(self) -> None:
        self._network: Network | None = None
        self._start: channel.Start | None = None
        self._supervisor: TrainerSupervisor | None = None
        self._launched = asyncio.Event()
        """Set once there was a process: `begin` starts none while there is a reason to rest."""
        self._was_ready = False
        self._usage = UsageLog()
        self._orders: channel.Orders | None = None
        self._holds = False
        """No step is to begin: the peer is about to rest."""
        self._changing: asyncio.Task[None] | None = None
        """The task that ends the process for a rest or a rollback, or starts the next one after it."""
        self._verifying: asyncio.Task[None] | None = None
        self._repairing: asyncio.Task[None] | None = None
        """The task that fetches a damaged data shard again."""
        self._keeping: Digest | None = None
        """The record of the last `KeepState`."""
        self._missing = 0
        """Own updates that the present move puts back."""
        self._is_checkpoint = False
        """The present move asks for a checkpoint."""
        self._trained_before = 0
        self.progress = NO_PROGRESS
        self.made = self.missed = 0
        """Own updates that were made, and that rounds left out."""

    async def begin(self, network: Network) -> None:
        """Fetch what the trainer needs, and start it. Raises CairnError."""
        folder, self._network = self.options.folder, network
        await fetch_assets(self.spec, self.store, network, private_data=self.options.private_data)
        self._start = start_message(self.spec, self.store, self.me, self.options)
        remove_outdated_state(self.store, self.chain, folder / "trainer")
        if not self.rest.reason:
            self._launch(self._start)
        self.tasks.spawn(self.loader.run(self.send), "states")

    def _launch(self, start: channel.Start) -> None:
        remove_drafts(self.store)
        self._supervisor = self.supervise(
            start,
            on_message=self._on_message,
            on_lost=self._on_lost,
            command=self.options.trainer_command or None,
            gpu_memory=lambda: self.options.gpu_share(replayable=self.spec.audit.replayable),
            was_ready=self._was_ready,
        )
        self.rest.note_devices(free=False)
        self._launched.set()
        self.tasks.spawn(self._supervisor.run(), "trainer")

    async def stop(self) -> bool:
        """Have the trainer save and exit. Return whether all that it learnt is on disk. Idempotent."""
        saved = self._supervisor is None or await self._supervisor.stop(channel.SAVE_SECONDS)
        self.rest.note_devices(free=True)
        return saved

    # -- a rest ----------------------------------------------------------------------------------------------

    def hold(self, holds: bool) -> None:
        """Start no step and drop the current one; if not `holds`, allow steps again.

        In the second case a process is started, if `begin` started none because there was a reason to rest.
        """
        self._holds = holds
        if not holds and self._start is not None and self._supervisor is None and self._changing is None:
            self._launch(self._start)
        self.tasks.spawn(self._send_orders(), "orders")

    def release(self, *others: Awaitable[None]) -> None:
        """Have the trainer save and end, whatever it does. The devices are free once it and `others` are done."""
        self._stop_verifying()
        self.loader.drop()
        self._changing = self.tasks.spawn(self._release(others, self._changing), "rest")

    async def _release(self, others: Iterable[Awaitable[None]], before: asyncio.Task[None] | None) -> None:
        done = asyncio.gather(*others)
        if before is not None:
            await asyncio.wait([before])  # the process that it starts is the one to end
        began, held = time.monotonic(), self._supervisor is not None
        is_saved = self._supervisor is None or await self._supervisor.stop(RELEASE_SECONDS)
        await done
        self._clear_progress()
        self.rest.note_devices(free=True)
        if not is_saved:
            log.warning("the trainer was ended before it had saved: it trains again what it did since its last save")
        elif held:
            log.info("the trainer has saved its state and ended after %.1f s", time.monotonic() - began)

    def acquire(self) -> None:
        """Start a process again after `release`."""
        self._changing = self.tasks.spawn(self._acquire(self._changing), "end of the rest")

    async def _acquire(self, released: asyncio.Task[None] | None) -> None:
        if released is not None:
            await asyncio.wait([released])  # two processes must not use one folder
        if self._start is not None:
            self._launch(self._start)

    def _clear_progress(self) -> None:
        """Note that the present process makes no progress any more."""
        self._trained_before += self.progress.trained
        self.progress = NO_PROGRESS
        self.post(events.TrainingProgress(0, 0.0, 0.0))

    async def send(self, message: channel.ToTrainer) -> None:
        """Send a message to the present trainer. Raises TrainerDied."""
        if self._changing is not None:
            await asyncio.wait([self._changing])
        await self._launched.wait()  # a rest drops what waits here
        if self._supervisor is None:
            raise TrainerDied("the trainer was not started")
        await self._supervisor.send(message)

    @property
    def device(self) -> str:
        """The device, for people; empty until the trainer is ready."""
        ready = self._supervisor.ready if self._supervisor is not None else None
        return ready.device[:80] if ready is not None else ""

    @property
    def trained(self) -> int:
        """Windows of all inner steps since this node started; windows that were trained twice count twice."""
        return self._trained_before + self.progress.trained

    @property
    def restarts(self) -> int:
        """The number of restarts of the present supervisor's process."""
        return self._supervisor.restarts if self._supervisor is not None else 0

    # -- requests of the machine -----------------------------------------------------------------------------

    def request_update(self, action: RequestUpdate) -> None:
        self.tasks.spawn(self._request_update(action), "update")

    async def _request_update(self, action: RequestUpdate) -> None:
        out = self.store.scratch / f"update-{action.round}.blob"
        try:
            await self.send(channel.MakeUpdate(round=action.round, parent=action.parent, out=out))
        except TrainerDied as e:
            # `_on_lost` informs the machine that the state is gone.
            log.warning("no update for round %d: %s", action.round, e)

    def keep_state(self, action: KeepState) -> None:
        self._keeping = action.record
        self.tasks.spawn(self._keep_held_state(action), "held state")

    async def _keep_held_state(self, action: KeepState) -> None:
        try:
            await self.send(channel.WriteCheckpoint(self.store.scratch / f"held-{action.record.short}.safetensors"))
        except TrainerDied as e:
            log.warning("the state of the stopped run was not written: %s", e)
            self.post(events.StateNotKept(action.record))

    def order(self, orders: channel.Orders) -> None:
        """Give the trainer its orders; trainers that are started later receive them too."""
        self._orders = orders
        self.tasks.spawn(self._send_orders(), "orders")

    async def _send_orders(self) -> None:
        if self._orders is not None and self._supervisor is not None:
            orders = replace(self._orders, is_idle=self._orders.is_idle or self._holds)
            with contextlib.suppress(TrainerDied):  # the next process receives them when it is ready
                await self._supervisor.send(orders)

    def move(self, action: ApplyRecord | SyncState) -> None:
        """Move the trainer to the state that the action leads to."""
        is_acquired = self._changing is not None and not self._changing.done()
        if self._start is not None and self._supervisor is not None and self._supervisor.stopping and not is_acquired:
            log.info("the chain changed after the run's end: the trainer is started again")
            self._clear_progress()
            self._launch(self._start)
        self._stop_verifying()
        self._missing, self._is_checkpoint = len(action.missed), action.is_checkpoint
        if isinstance(action, ApplyRecord):
            self.loader.apply(action)
        elif action.reset and self._start is not None:
            self.loader.drop()
            reset = self._reset(action, self._start, self._changing)
            self._changing = self.tasks.spawn(reset, "reset of the trainer")
        else:
            self.loader.sync(action)

    async def _reset(self, action: SyncState, start: channel.Start, before: asyncio.Task[None] | None) -> None:
        """Replace the trainer by a new process without its saved state, unless a rest has begun meanwhile."""
        log.warning("the trainer starts from scratch: what it had learnt is of rounds that were rolled back")
        if before is not None:
            await asyncio.wait([before])  # two processes must not use one folder
        if self._supervisor is not None:
            await self._supervisor.stop(0.0)
            self._clear_progress()
        await asyncio.to_thread(remove_saved_state, start.state_folder)
        if self._changing is asyncio.current_task():  # otherwise the machine asks for the move again after the rest
            self._launch(start)
            self.loader.sync(action)

    # -- messages of the trainer -----------------------------------------------------------------------------

    def _on_message(self, message: channel.FromTrainer) -> None:
        match message:
            case channel.Progress():
                self.pace.note_gone(max(0, message.data_bytes - self.progress.data_bytes))
                self.progress = message
                if line := self._usage.line(message, time.monotonic()):
                    log.info("%s", line)
                self._post_progress()
            case channel.UpdateMade():
                self.tasks.spawn(self._keep_update(message, self.progress), "own update")
            case channel.NothingDone(parent):
                self.post(events.UpdateReady(parent, 0, 0, 0, 0, None, 0, 0.0))
            case channel.Applied():
                self.tasks.spawn(self._note_applied(message), "state")
            case channel.Failed(what, reason, fatal):
                log.error("trainer: %s", reason)
                if what in ("load", "apply") and not fatal:
                    self._verifying = self.tasks.spawn(self._move_failed(reason), "verification")
                elif what == "write" and not fatal and self._keeping is not None:
                    self.post(events.StateNotKept(self._keeping))
                elif what == "update" and not fatal:
                    self.post(events.SyncFailed(self.chain.head, reason))
            case channel.DataUnavailable(shard) if self._network is not None:
                if self._repairing is None or self._repairing.done():
                    self._repairing = self.tasks.spawn(self._repair_shard(shard, self._network), "data shard")
            case channel.Note(level, _, text):
                log.log(LEVELS[level], "%s", text)
            case channel.Ready():
                self._was_ready = True
                if message.on_gpu and self._start is not None and self._start.device == "auto":
                    self._start = replace(self._start, device="cuda")  # after a rest, too: see `TrainerSupervisor`
                self.store.lend(message.disk)
                if self._orders is not None:
                    self.tasks.spawn(self._send_orders(), "orders")
                log.info(
                    "training on %s: %s parameters, %s bytes an update",
                    message.device, f"{message.parameters:,}", f"{message.update_size:,}",
                )  # fmt: skip
            case _:
                pass

    def _post_progress(self) -> None:
        now = self.progress
        self.post(events.TrainingProgress(now.windows, now.loss, now.tokens_per_second))

    def _stop_verifying(self) -> None:
        """Cancel the verification after a failed move: a newer request, or the trainer's loss, makes it obsolete."""
        if self._verifying is not None:
            self._verifying.cancel()
            self._verifying = None

    async def _move_failed(self, reason: str) -> None:
        try:
            await self.loader.verify_blobs_in_use()
        except StoreError as e:
            log.error("%s", e)
        self.post(events.SyncFailed(self.chain.head, reason))

    async def _repair_shard(self, shard: Digest, network: Network) -> None:
        """Fetch a data shard again if it is damaged, or gone. The trainer then finds it at its next attempt."""
        private = self.options.private_data
        try:
            await drop_if_damaged(self.store, shard)
            is_fetched = any(s.name == shard for s in fetched_shards(self.spec, private_data=private))
            if self.store.has(shard) or not is_fetched:
                return
            log.warning("data shard %s is fetched from members again: training waits for it", shard.short)
            await fetch_training_files(self.spec, self.store, network, private_data=private)
            log.info("data shard %s is here again: training goes on", shard.short)
        except (CairnError, asyncio.TimeoutError) as e:
            log.error("data shard %s is not repaired yet: %s", shard.short, str(e) or "it did not arrive in time")

    def _on_lost(self, reason: str) -> None:
        self._stop_verifying()
        self.loader.drop()
        self._clear_progress()
        remove_drafts(self.store)
        self.post(events.SyncFailed(self.chain.head, reason))

    async def _keep_update(self, made: channel.UpdateMade, before: channel.Progress) -> None:
        """Put one of our updates into the store, and inform the machine. `before`: the progress before it was made."""
        self.retention.protect_update(made.digest)
        blob = await asyncio.to_thread(self.store.adopt, made.blob_path, made.digest)
        self.updates.trust(blob)
        self.made += 1
        self.post(events.BlobHeld(blob, self.me))
        self.post(
            events.UpdateReady(
                made.parent,
                made.first_window,
                made.rebase_window,
                made.end_window,
                made.inner_steps,
                blob,
                made.size,
                made.loss,
            )
        )
        if self.progress is not before:
            # It came meanwhile and without the update's windows, which the machine has subtracted from it only now.
            self._post_progress()

    async def _note_applied(self, applied: channel.Applied) -> None:
        self.missed, self._missing = self.missed + self._missing, 0
        if applied.checkpoint_path is None:
            if self._is_checkpoint:
                self.post(events.StateNotKept(applied.record))
        else:
            try:
                await asyncio.to_thread(self.store.adopt, applied.checkpoint_path, applied.state_digest)
                self.retention.protect_state(applied.state_digest)
            except StoreError as e:
                log.error("the checkpoint was not kept: %s", e)
                applied.checkpoint_path.unlink(missing_ok=True)
                self.post(events.StateNotKept(applied.record))
        self.post(events.StateReached(applied.record, applied.state_digest))
        await self.retention.prune()
