"""The node's loop: events into the round machine, its actions out to the store, the swarm and the trainer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peer.channel import Applied as TrainerApplied
from peer.channel import Failed, FromTrainer, Note, NothingDone, Progress, Ready, UpdateMade
from peer.channel import MakeUpdate as AskUpdate
from peer.errors import PeerError, TrainerDied
from peer.node.assets import fetch_assets, start_message
from peer.node.chainlog import ChainLog
from peer.node.exchange import Exchange
from peer.node.inbox import Inbox
from peer.node.keeping import to_keep
from peer.node.membership import Membership
from peer.node.network import Network
from peer.node.snapshot import Snapshot, write_snapshot
from peer.node.states import States
from peer.node.trainer import Trainer
from peer.node.updates import Updates
from peer.store import StoreError
from peer.swarm import Handlers
from protocol.codec import make_codec
from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey
from protocol.messages import Header, KeySigner
from protocol.rounds import actions, events
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import Facts, Policy
from protocol.state import state_layout
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("peer.node")

MAX_EVENTS = 20_000
"""Events that wait for the machine; beyond it network messages are dropped (their senders repeat what matters)."""

SNAPSHOT_SECONDS = 1.0
CHAIN_SECONDS = 15.0
LEAVE_SECONDS = 3.0
SAVE_SECONDS = 4.0
SEE_OUT_SECONDS = 600.0
QUIET_SECONDS, QUIET_BYTES = 5.0, 200_000
"""After a run's last round a node stays until it has sent less than this in that time, and nobody is behind."""

OWN_BLOBS = 256
"""Own updates that stay in the store until they are final: a fork may leave them out, and they go back then."""

OBSERVED_RECORDS, OBSERVED_BYTES = 200_000, 2**30
"""How much of the chain an observer keeps in memory: its coordinator may have to catch up from far behind."""


@dataclass(frozen=True)
class NodeOptions:
    """How this node runs: where it listens, what it trains on (`observer`: nothing)."""

    folder: Path
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    device: str = "auto"
    threads: int = 1
    observer: bool = False


class Node:
    """One member of one run. `run()` returns when the run is over or `leave()` was called."""

    def __init__(self, membership: Membership, options: NodeOptions):
        self._membership = membership
        self._options = options
        self._spec = membership.spec
        self._run = membership.spec.run_id
        self.store = membership.store
        self.key = membership.identity.key
        layout = self._spec.model.layout
        self._codec = make_codec(self._spec.codec, layout)
        self._checkpoint_size = state_layout(layout, self._spec.outer).checkpoint_size
        self._inbox = Inbox(membership.opener)
        self.network = Network(
            membership,
            Handlers(on_packet=self._take_packet, on_chain_request=self._on_chain_request, may_serve=self._may_serve),
            listen=options.listen,
            announce=options.announce,
            discovered=lambda packet: self._take_packet(self.key, packet),
        )
        self._signer = KeySigner(membership.identity)
        self._events: asyncio.Queue[events.Event] = asyncio.Queue(maxsize=MAX_EVENTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._finished = asyncio.Event()
        self._started = asyncio.Event()
        self._leaving = False
        self._tick_waits = False
        self.finish_reason = ""
        self.on_change: Callable[[], None] = lambda: None
        self._trainer: Trainer | None = None
        self._states: States | None = None
        self._held_states: deque[Digest] = deque(maxlen=self._spec.checkpoint.keep + 1)
        self._own_blobs: deque[tuple[int, Digest]] = deque(maxlen=OWN_BLOBS)
        self._made = self._missed = 0
        self._progress = Progress(0, 0.0, 0.0, 0, 0.0, False)
        self._exchange = Exchange()
        self._updates = Updates(
            self.store,
            self.network,
            self._codec,
            deadline_seconds=self._spec.round.exchange_seconds,
            everyone=self.network.everyone,
            answer=self.post,
        )
        self.chainlog = ChainLog(self.store, membership.opener, self._spec)
        limits = Policy.of(self._spec).chain_limits
        if options.observer:
            limits = replace(limits, max_records=OBSERVED_RECORDS, max_bytes=OBSERVED_BYTES)
        self.chain = self.chainlog.load(limits)
        self.machine = RoundMachine(
            policy=Policy.of(self._spec),
            run=self._run,
            signer=self._signer,
            chain=self.chain,
            observer=options.observer,
            blob_size=self._codec.size,
            now=time.monotonic(),
        )

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start everything, drive the machine until it is finished, stop everything. Raises CairnError."""
        try:
            await self._start()
            self._started.set()
            self._spawn(self._tick(), "ticks")
            pump = asyncio.ensure_future(self._pump())
            done = asyncio.ensure_future(self._finished.wait())
            await asyncio.wait([pump, done, self._failure], return_when=asyncio.FIRST_COMPLETED)
            for task in (pump, done):
                task.cancel()
            if self._failure.done():
                self._failure.result()
            if pump.done() and not pump.cancelled():
                pump.result()
        finally:
            await self._stop()

    async def started(self, running: asyncio.Future[None]) -> None:
        """Wait until the node is in the swarm. `running` is the task of `run`: when that fails first, so does this."""
        wait = asyncio.ensure_future(self._started.wait())
        await asyncio.wait([wait, running], return_when=asyncio.FIRST_COMPLETED)
        wait.cancel()
        if running.done():
            running.result()

    def leave(self) -> None:
        """The user wants to stop: announce what is done, say goodbye; `run` returns within seconds."""
        if self._leaving:
            return
        self._leaving = True
        self.post(events.Leave())
        asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._finish, "left")

    def _over(self, reason: str) -> None:
        """The machine has nothing left to do. A run that is over still needs those who have its last state."""
        if self._leaving:
            self._finish(reason)
        elif self._options.observer:
            log.info("%s", reason)
        elif not self.finish_reason:
            self.finish_reason = reason
            log.info("%s: staying until the others have its last state", reason)
            self._spawn(self._see_out(), "seeing the run out")

    async def _see_out(self) -> None:
        """After the last round: serve until nobody lacks anything, then finish."""
        began = time.monotonic()
        if self._trainer is not None:
            await self._trainer.stop(SAVE_SECONDS)
        served = -QUIET_BYTES
        while time.monotonic() - began < SEE_OUT_SECONDS:
            await asyncio.sleep(QUIET_SECONDS)
            head = self.machine.summary(time.monotonic()).head
            behind = [m for m in self.machine.summary(time.monotonic()).members if m.heartbeat.head != head]
            busy, served = self.network.bytes_up - served > QUIET_BYTES, self.network.bytes_up
            if not behind and not busy:
                break
        self._finish(self.finish_reason)

    def _finish(self, reason: str) -> None:
        self.finish_reason = self.finish_reason or reason
        self._finished.set()

    async def _start(self) -> None:
        m, o = self._membership, self._options
        await self.network.start()
        if not o.observer:
            await fetch_assets(self._spec, self.store, self.network)
            start = start_message(self._spec, self.store, o.folder, self.key, o.device, o.threads)
            self._trainer = Trainer(start, on_message=self._on_trainer, on_lost=self._on_trainer_lost)
            self._states = States(
                self._spec,
                self._checkpoint_size,
                self.store,
                self.network,
                self._updates,
                self._trainer,
                me=self.key,
                everyone=self.network.everyone,
                failed=self.post,
            )
            self._spawn(self._trainer.run(), "trainer")
            self._spawn(self._states.run(), "states")
            self._spawn(m.keep_valid(), "admission")
        self._spawn(self.network.discover(), "discovery")
        self._spawn(self.network.mend(), "swarm")
        self._spawn(self._keep_snapshot(), "status file")
        self._set_facts()
        await self._act(self.machine.start(time.monotonic(), alone=not m.addresses))

    async def _stop(self) -> None:
        """Everything in order: the trainer saves, goodbyes go out, sockets close."""
        trainer = self._trainer
        if trainer is not None:
            saved = await trainer.stop(SAVE_SECONDS)
            log.info("the trainer has saved its state" if saved else "the trainer left without saving")
        await self._updates.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.network.stop()
        if self._membership.client is not None:
            await self._membership.client.close()
        self._write_snapshot()

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """A task that belongs to the node: an error in it ends the node, loudly."""
        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)

        def ended(t: asyncio.Task[None]) -> None:
            self._tasks.discard(t)
            if not t.cancelled() and (error := t.exception()) is not None and not self._failure.done():
                self._failure.set_exception(error)

        task.add_done_callback(ended)

    # -- events in -------------------------------------------------------------------------------------------

    def post(self, event: events.Event) -> None:
        """Queue an event for the machine."""
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            if isinstance(event, events.Heard | events.CertificateHeard):
                return
            raise PeerError(f"{MAX_EVENTS} events wait for the round machine: this process does not keep up") from None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, max(0.005, self.machine.next_tick - time.monotonic())))
            if self.machine.next_tick <= time.monotonic() and not self._tick_waits:
                self._tick_waits = True
                self.post(events.Tick())

    async def _pump(self) -> None:
        while True:
            event = await self._events.get()
            if isinstance(event, events.Tick):
                self._tick_waits = False
            elif isinstance(event, events.BlobHeld):
                self._exchange.held(time.monotonic())
            self._set_facts()
            await self._act(self.machine.step(event, time.monotonic()))
            self.on_change()

    async def _take_packet(self, sender: PeerKey, packet: wire.Packet) -> None:
        for i, event in enumerate(self._inbox.packet(sender, packet, time.time())):
            if i % 32 == 31:
                await asyncio.sleep(0)  # verifying takes its time: others have a turn
            if isinstance(event, events.Heard):
                if event.message.author == self.key:
                    continue
                self.network.note(event.message)
            self.post(event)

    async def _on_chain_request(self, sender: PeerKey, request: wire.ChainRequest) -> wire.ChainReply:
        return self.chainlog.answer(request)

    def _may_serve(self, blob: Digest, requester: PeerKey) -> str | None:
        return self.machine.may_serve(blob, requester)

    # -- actions out -----------------------------------------------------------------------------------------

    async def _act(self, todo: list[actions.Action]) -> None:
        for action in todo:
            match action:
                case actions.Broadcast(message):
                    if isinstance(message.body, Header):
                        self._exchange.announced(message.body.parent, time.monotonic())
                    self.network.broadcast(message)
                case actions.Send(to, messages, certificates):
                    self.network.outbox.send(to, messages, certificates)
                case actions.MakeUpdate():
                    self._spawn(self._make_update(action), "update")
                case actions.FetchBlob(blob, size, author, holders):
                    self._updates.fetch(blob, size, author, holders)
                case actions.DropBlob(blob):
                    self._updates.drop(blob)
                case actions.RequestChain(to, have):
                    self._spawn(self._request_chain(to, have), "chain request")
                case actions.KeepCertificate(certificate):
                    await asyncio.to_thread(self.chainlog.keep, certificate)
                case actions.KeepFinal(message):
                    await asyncio.to_thread(self.chainlog.keep_final, message)
                case actions.Apply(certificate):
                    self._exchange.certified(certificate.record.body.parent, time.monotonic())
                    self._to_state(action)
                case actions.Resync():
                    self._to_state(action)
                case actions.Report():
                    self._report(action)
                case actions.Finished(reason):
                    self._over(reason)

    async def _make_update(self, ask: actions.MakeUpdate) -> None:
        if self._trainer is None:
            raise PeerError("an observer was asked for an update")
        out = self.store.scratch / f"update-{ask.round}.blob"
        try:
            await self._trainer.send(AskUpdate(round=ask.round, parent=ask.parent, out=out))
        except TrainerDied as e:
            # The supervisor restarts it, and tells the machine that the state is gone.
            log.warning("no update for round %d: %s", ask.round, e)

    async def _request_chain(self, to: PeerKey, have: tuple[Digest, ...]) -> None:
        request = wire.ChainRequest(run=self._run, have=[bytes(d) for d in have])
        try:
            reply = await self.network.swarm.request_chain(to, request, timeout=CHAIN_SECONDS)
            self.post(self._inbox.chain(to, reply))
        except (CairnError, asyncio.TimeoutError) as e:
            log.info("no chain from %s: %s", to.short, e)
            self.post(events.ChainSilent(to))

    def _to_state(self, action: actions.Apply | actions.Resync) -> None:
        if self._states is None:
            raise PeerError("an observer was asked to hold a state")
        self._missed += len(action.missed)
        if isinstance(action, actions.Apply):
            self._states.apply(action)
        else:
            self._states.resync(action)

    def _report(self, report: actions.Report) -> None:
        levels = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
        log.log(levels[report.level], "%s", report.text)

    # -- the trainer's words ---------------------------------------------------------------------------------

    def _on_trainer(self, message: FromTrainer) -> None:
        match message:
            case Progress():
                self._progress = message
                self.post(events.Progress(message.windows, message.loss, message.tokens_per_second))
            case UpdateMade():
                self._spawn(self._take_update(message), "own update")
            case NothingDone(parent):
                self.post(events.UpdateReady(parent, 0, 0, 0, None, 0, 0.0))
            case TrainerApplied():
                self._spawn(self._take_state(message), "state")
            case Failed(what, reason, fatal):
                log.error("trainer: %s", reason)
                if what in ("load", "apply", "update") and not fatal:
                    self.post(events.ApplyFailed(self.machine.summary(time.monotonic()).head, reason))
            case Note(level, _, text):
                log.log({"info": logging.INFO, "warning": logging.WARNING}.get(level, logging.ERROR), "%s", text)
            case Ready():
                log.info(
                    "training on %s: %s parameters, %s bytes an update",
                    message.device, f"{message.parameters:,}", f"{message.update_size:,}",
                )  # fmt: skip
            case _:
                pass

    def _on_trainer_lost(self, reason: str) -> None:
        self._progress = Progress(0, 0.0, 0.0, 0, 0.0, False)
        self.post(events.Progress(0, 0.0, 0.0))
        self.post(events.ApplyFailed(self.machine.summary(time.monotonic()).head, reason))

    async def _take_update(self, made: UpdateMade) -> None:
        blob = await asyncio.to_thread(self.store.adopt, made.blob_path, made.digest)
        self._updates.trust(blob)
        self._made += 1
        self._own_blobs.append((self.machine.summary(time.monotonic()).round, blob))
        self.post(events.BlobHeld(blob))
        self.post(
            events.UpdateReady(
                made.parent, made.first_window, made.end_window, made.inner_steps, blob, made.size, made.loss
            )
        )

    async def _take_state(self, applied: TrainerApplied) -> None:
        if applied.checkpoint_path is not None:
            try:
                await asyncio.to_thread(self.store.adopt, applied.checkpoint_path, applied.state_digest)
                self._held_states.append(applied.state_digest)
            except StoreError as e:
                log.error("the checkpoint was not kept: %s", e)
        self.post(events.Applied(applied.record, applied.state_digest))
        if applied.record in self.chain and applied.record != self.chain.root:
            self._exchange.applied(self.chain.parent(applied.record), time.monotonic())
        await self._prune()

    async def _prune(self) -> None:
        """Drop what nobody needs any more. What to drop is decided here and now; blobs that arrive later stay."""
        chain, every = self.chain, self._spec.checkpoint.every
        height = chain.height(chain.head)
        back = max(chain.height(chain.root), height - every * (self._spec.checkpoint.keep + 2))
        start = chain.ancestor_at(chain.head, back) or chain.root
        final = chain.final.body.round if chain.final is not None else -1
        own = [blob for number, blob in self._own_blobs if number > final]
        undecided = [h.body.blob for h in self.machine.summary(time.monotonic()).headers]
        keep = to_keep(self._spec, chain.path(start, chain.head), self._held_states, [*own, *undecided]) | {self._run}
        gone = [digest for digest in self.store.blobs() if digest not in keep]
        self._updates.forget(gone)
        for digest in gone:
            await asyncio.to_thread(self.store.remove, digest)

    # -- views -----------------------------------------------------------------------------------------------

    def _set_facts(self) -> None:
        ready = self._trainer.ready if self._trainer is not None else None
        self.machine.facts = Facts(
            sequence=int(time.time() * 1000),
            bytes_up=self.network.bytes_up,
            bytes_down=self.network.bytes_down,
            addresses=tuple(self.network.addresses),
            admission=b"" if self._options.observer else self._membership.admission,
            device=ready.device[:80] if ready is not None else "",
        )

    def snapshot(self) -> Snapshot:
        """How the node is now."""
        view = self.machine.summary(time.monotonic())
        ready = self._trainer.ready if self._trainer is not None else None
        window = self._spec.data.window
        same = [m.heartbeat.windows for m in view.members if m.heartbeat.head == view.head]
        return Snapshot(
            run=self._spec.name,
            name=self._membership.name,
            peer=str(self.key),
            phase=view.phase,
            round=view.round,
            head=str(view.head),
            state=str(view.state or ""),
            state_round=view.round,
            accepted_tokens=view.weight * window,
            total_tokens=self._spec.total_tokens,
            round_tokens=(sum(same) + self._progress.windows) * window,
            target_tokens=self._spec.round.target_tokens,
            loss=self._progress.loss,
            tokens_per_second=self._progress.tokens_per_second,
            members=len(view.members),
            bytes_up=self.network.bytes_up,
            bytes_down=self.network.bytes_down,
            device=ready.device if ready is not None else "",
            own_updates=self._made,
            missed_updates=self._missed,
            exchange_seconds=asdict(self._exchange.times),
            trainer_restarts=self._trainer.restarts if self._trainer is not None else 0,
            finished=self.finish_reason,
        )

    async def _keep_snapshot(self) -> None:
        while True:
            self._write_snapshot()
            await asyncio.sleep(SNAPSHOT_SECONDS)

    def _write_snapshot(self) -> None:
        try:
            write_snapshot(self._options.folder, self.snapshot())
        except OSError as e:
            log.warning("status.json was not written: %s", e.strerror)
