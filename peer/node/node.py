"""The node's loop: events into the round machine, its actions out to the store, the swarm and the trainer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peer.channel import Applied as TrainerApplied
from peer.channel import Failed, FromTrainer, Note, NothingDone, Progress, Ready, Start, UpdateMade
from peer.channel import MakeUpdate as AskUpdate
from peer.errors import PeerError, TrainerDied
from peer.node.chainlog import ChainLog
from peer.node.directory import Directory
from peer.node.inbox import Inbox
from peer.node.keeping import to_keep
from peer.node.membership import Membership
from peer.node.outbox import Outbox
from peer.node.snapshot import Snapshot, write_snapshot
from peer.node.states import States
from peer.node.trainer import Trainer
from peer.node.updates import Updates
from peer.store import StoreError
from peer.swarm import Handlers, Swarm
from peer.swarm.addresses import parse_address
from protocol.codec import make_codec
from protocol.errors import CairnError, MalformedError
from protocol.ids import Digest, PeerKey
from protocol.messages import Goodbye, Heartbeat, KeySigner, Signed
from protocol.rounds import actions, events
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import Facts, Policy
from protocol.state import state_layout
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("peer.node")

MAX_EVENTS = 20_000
"""Events that wait for the machine; beyond it network messages are dropped (their senders repeat what matters)."""

DISCOVER_SECONDS = 15.0
CHAIN_SECONDS = 15.0
LEAVE_SECONDS = 3.0
SAVE_SECONDS = 4.0
BLOB_SECONDS = 3600.0
SEE_OUT_SECONDS = 600.0
QUIET_SECONDS, QUIET_BYTES = 5.0, 200_000
"""After a run's last round a node stays until it has sent less than this in that time, and nobody is behind."""

OWN_BLOBS = 64
"""Own updates that stay in the store for some time, decided or not: forks may bring them back."""

OBSERVED_RECORDS, OBSERVED_BYTES = 200_000, 2**30
"""How much of the chain an observer keeps in memory: its coordinator may have to catch up from far behind."""

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0",)


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
        self.directory = Directory(
            self.key,
            forget_seconds=max(60.0, 3 * self._spec.round.member_seconds),
            limit=self._spec.round.max_members,
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
        self._swarm: Swarm | None = None
        self._trainer: Trainer | None = None
        self._states: States | None = None
        self._held_states: deque[Digest] = deque(maxlen=self._spec.checkpoint.keep + 1)
        self._own_blobs: deque[Digest] = deque(maxlen=OWN_BLOBS)
        self._missed = 0
        self._last_heartbeat: Signed[Heartbeat] | None = None
        self._entry_peers = _peers_of(membership.addresses)
        self._progress = Progress(0, 0.0, 0.0, 0, 0.0, False)
        self._applied_seconds = 0.0
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
            busy, served = self._need_swarm().bytes_up - served > QUIET_BYTES, self._need_swarm().bytes_up
            if not behind and not busy:
                break
        self._finish(self.finish_reason)

    def _finish(self, reason: str) -> None:
        self.finish_reason = self.finish_reason or reason
        self._finished.set()

    async def _start(self) -> None:
        m, o = self._membership, self._options
        await self._start_swarm()
        self._outbox = Outbox(lambda to, packet, seconds: self._need_swarm().send(to, packet, seconds))
        self._updates = Updates(
            self.store,
            self,
            self._codec,
            deadline_seconds=self._spec.round.exchange_seconds,
            everyone=self.everyone,
            answer=self.post,
        )
        if not o.observer:
            await self._fetch_assets()
            self._trainer = Trainer(self._start_message(), on_message=self._on_trainer, on_lost=self._on_trainer_lost)
            self._states = States(
                self._spec,
                self._checkpoint_size,
                self.store,
                self,
                self._updates,
                self._trainer,
                me=self.key,
                everyone=self.everyone,
                failed=self.post,
            )
            self._spawn(self._trainer.run(), "trainer")
            self._spawn(self._states.run(), "states")
            self._spawn(m.keep_valid(), "admission")
        self._spawn(self._discover(), "discovery")
        self._spawn(self._mend_swarm(), "swarm")
        self._set_facts()
        await self._act(self.machine.start(time.monotonic(), alone=not m.addresses))

    async def _start_swarm(self) -> None:
        m, o = self._membership, self._options
        self._swarm = await Swarm.start(
            m.identity,
            self._run,
            store=self.store,
            listen=o.listen or DEFAULT_LISTEN,
            announce=o.announce,
            initial=m.addresses,
            handlers=Handlers(
                on_packet=self._on_packet, on_chain_request=self._on_chain_request, may_serve=self._may_serve
            ),
        )
        log.info("listening at %s", ", ".join(self._swarm.addresses) or "no address that others can dial")

    async def _mend_swarm(self) -> None:
        """For ever: when libp2p's daemon ends by itself, start another."""
        while True:
            cause = await self._need_swarm().wait_lost()
            log.error("libp2p's daemon ended (%s): starting another", cause)
            await self._need_swarm().stop()
            await asyncio.sleep(1.0)
            await self._start_swarm()

    def _start_message(self) -> Start:
        shards = {
            s.digest: str(self.store.path(s.name)) if self.store.has(s.name) else "" for s in self._spec.data.train
        }
        spec_file = self._options.folder / "spec.json"
        spec_file.write_bytes(self._spec.canonical())
        return Start(
            spec_path=spec_file,
            store=self._options.folder / "store",
            identity_key=self.key,
            state_folder=self._options.folder / "trainer",
            device=self._options.device,
            threads=self._options.threads,
            shards=shards,
        )

    async def _fetch_assets(self) -> None:
        """Shards and tokenizer from the swarm, where the spec names no address for them."""
        wanted = [self._spec.tokenizer]
        if not self._spec.data.addresses:
            wanted += self._spec.data.train
        for blob in wanted:
            if not self.store.has(blob.name):
                log.info("fetching %s of the run (%.1f MB)", blob.name.short, blob.size / 1e6)
                await self.fetch_blob(blob.name, blob.size, self.everyone(), deadline_seconds=BLOB_SECONDS)

    async def fetch_blob(
        self, digest: Digest, size: int | None, holders: Sequence[PeerKey], *, deadline_seconds: float
    ) -> None:
        """A blob into the store, from the swarm (see `Swarm.fetch_blob`)."""
        await self._need_swarm().fetch_blob(
            digest, size, holders, deadline_seconds=deadline_seconds, on_bad=_log_bad_chunk
        )

    async def _stop(self) -> None:
        """Everything in order: the trainer saves, goodbyes go out, sockets close."""
        trainer, swarm = self._trainer, self._swarm
        if trainer is not None:
            saved = await trainer.stop(SAVE_SECONDS)
            log.info("the trainer has saved its state" if saved else "the trainer left without saving")
        if swarm is not None:
            await self._outbox.flush(1.0)
            await self._outbox.close()
            await self._updates.close()
        self._save_addresses()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if swarm is not None:
            await swarm.stop()
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

    def _need_swarm(self) -> Swarm:
        if self._swarm is None:
            raise PeerError("the swarm is not started")
        return self._swarm

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
            self._set_facts()
            await self._act(self.machine.step(event, time.monotonic()))
            self.on_change()

    async def _on_packet(self, sender: PeerKey, packet: wire.Packet) -> None:
        for event in self._inbox.packet(sender, packet, time.time()):
            if isinstance(event, events.Heard):
                self._note(event.message)
            self.post(event)

    def _note(self, message: Signed) -> None:
        """Keep the directory; introduce newcomers to the others and the others to them."""
        if isinstance(message.body, Goodbye):
            self.directory.goodbye(message.author, message.body.sequence)
        if not isinstance(message.body, Heartbeat):
            return
        if self.directory.hear(message, time.monotonic()):
            log.info("heard of %s", message.author.short)
            self._outbox.send(message.author, self.directory.heartbeats())
            for key in self.directory.peers():
                if key != message.author:
                    self._outbox.send(key, (message,))
            self._spawn(self._connect(list(message.body.addresses)), "connect")

    async def _connect(self, addresses: list[str]) -> None:
        try:
            await self._need_swarm().connect(addresses)
        except (CairnError, asyncio.TimeoutError) as e:
            log.info("cannot dial: %s", e)

    async def _on_chain_request(self, sender: PeerKey, request: wire.ChainRequest) -> wire.ChainReply:
        return self.chainlog.answer(request)

    def _may_serve(self, blob: Digest, requester: PeerKey) -> str | None:
        return self.machine.may_serve(blob, requester)

    @property
    def addresses(self) -> list[str]:
        """Multiaddresses of this node; none before it has started."""
        return self._swarm.addresses if self._swarm is not None else []

    def broadcast(self, message: Signed) -> None:
        """Send a message that this process has signed otherwise (a final, by the owner) to everyone."""
        self._outbox.broadcast(self.everyone(), message)

    def everyone(self) -> list[PeerKey]:
        """All that may hold blobs: those heard of, and those whose addresses we entered by."""
        known = self.directory.peers()
        return list(dict.fromkeys([*known, *self._entry_peers]))

    async def _discover(self) -> None:
        """For ever: keep our heartbeat in the DHT, and learn of those there."""
        while True:
            swarm = self._need_swarm()
            try:
                if self._last_heartbeat is not None:
                    await swarm.publish(self._last_heartbeat.sent, 4 * DISCOVER_SECONDS)
                found = wire.Packet(messages=await swarm.discover())
                for event in self._inbox.packet(self.key, found, time.time()):
                    if isinstance(event, events.Heard) and event.message.author != self.key:
                        self._note(event.message)
                        self.post(event)
                await swarm.refresh_addresses()
                if not self.directory.peers() and self._membership.addresses:
                    await swarm.connect(self._membership.addresses)
            except (CairnError, asyncio.TimeoutError) as e:
                log.warning("the DHT does not answer: %s; members are still found through each other", e)
            for key in self.directory.forget_silent(time.monotonic()):
                log.info("%s has not been heard of for long", key.short)
            self._save_addresses()
            self._write_snapshot()
            await asyncio.sleep(DISCOVER_SECONDS if self.directory.peers() else 1.0)

    # -- actions out -----------------------------------------------------------------------------------------

    async def _act(self, todo: list[actions.Action]) -> None:
        for action in todo:
            match action:
                case actions.Broadcast(message):
                    if isinstance(message.body, Heartbeat):
                        self._last_heartbeat = message
                    self._outbox.broadcast(self.everyone(), message)
                case actions.Send(to, messages, certificates):
                    self._outbox.send(to, messages, certificates)
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
                case actions.Apply() | actions.Resync():
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
            reply = await self._need_swarm().request_chain(to, request, timeout=CHAIN_SECONDS)
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
        self._own_blobs.append(blob)
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
        await self._prune()

    async def _prune(self) -> None:
        """Drop what nobody needs any more. What to drop is decided here and now; blobs that arrive later stay."""
        chain, every = self.chain, self._spec.checkpoint.every
        height = chain.height(chain.head)
        back = max(chain.height(chain.root), height - every * (self._spec.checkpoint.keep + 2))
        start = chain.ancestor_at(chain.head, back) or chain.root
        undecided = [h.body.blob for h in self.machine.summary(time.monotonic()).headers]
        keep = to_keep(self._spec, chain.path(start, chain.head), self._held_states, [*self._own_blobs, *undecided]) | {
            self._run
        }
        gone = [digest for digest in self.store.blobs() if digest not in keep]
        self._updates.forget(gone)
        for digest in gone:
            await asyncio.to_thread(self.store.remove, digest)

    # -- views -----------------------------------------------------------------------------------------------

    def _set_facts(self) -> None:
        swarm = self._need_swarm()
        ready = self._trainer.ready if self._trainer is not None else None
        self.machine.facts = Facts(
            sequence=int(time.time() * 1000),
            bytes_up=swarm.bytes_up,
            bytes_down=swarm.bytes_down,
            addresses=tuple(swarm.addresses),
            admission=b"" if self._options.observer else self._membership.admission,
            device=ready.device[:80] if ready is not None else "",
        )

    def snapshot(self) -> Snapshot:
        """How the node is now."""
        view = self.machine.summary(time.monotonic())
        swarm, ready = self._swarm, self._trainer.ready if self._trainer is not None else None
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
            bytes_up=swarm.bytes_up if swarm is not None else 0,
            bytes_down=swarm.bytes_down if swarm is not None else 0,
            device=ready.device if ready is not None else "",
            own_updates=len(self._own_blobs),
            missed_updates=self._missed,
            trainer_restarts=self._trainer.restarts if self._trainer is not None else 0,
            finished=self.finish_reason,
        )

    def _write_snapshot(self) -> None:
        try:
            write_snapshot(self._options.folder, self.snapshot())
        except OSError as e:
            log.warning("status.json was not written: %s", e.strerror)

    def _save_addresses(self) -> None:
        fresh = self.directory.addresses()
        if fresh:
            try:
                self._membership.learn(fresh)
            except StoreError as e:
                log.warning("addresses of members were not kept: %s", e)


def _peers_of(addresses: Sequence[str]) -> list[PeerKey]:
    """The peers that multiaddresses name; those that name none are left out."""
    found: dict[PeerKey, None] = {}
    for address in addresses:
        try:
            found[parse_address(address)[0]] = None
        except MalformedError:
            continue
    return list(found)


def _log_bad_chunk(holder: PeerKey, reason: str) -> None:
    log.warning("%s served wrong bytes and is not asked for this blob again: %s", holder.short, reason)
