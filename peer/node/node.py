"""The node's loop: events into the round machine, its actions out to the store, the swarm and the trainer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Any

from peer.channel import Orders
from peer.errors import PeerError
from peer.node import seeking
from peer.node.assets import fetch_assets, start_message
from peer.node.chainlog import ChainLog
from peer.node.ending import end
from peer.node.exchange import Exchange
from peer.node.inbox import Inbox
from peer.node.keeping import Keeping
from peer.node.membership import Membership
from peer.node.network import Network
from peer.node.obeying import Obeying
from peer.node.options import NodeOptions
from peer.node.outbox import NETWORK_ERRORS
from peer.node.passing import Passing
from peer.node.reducing import Reducing
from peer.node.snapshot import Snapshot, write_snapshot
from peer.node.training import LEVELS, Training
from peer.node.updates import Updates
from peer.swarm import Handlers
from protocol.codec import make_codec
from protocol.ids import Digest, PeerKey
from protocol.message_codec import KeySigner
from protocol.messages import UpdateHeader
from protocol.reduce import Reduction
from protocol.rounds import actions, events
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import LocalStatus, RoundPolicy
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("peer.node")

MAX_EVENTS = 20_000
"""Events that wait for the machine; beyond it network messages are dropped (their senders repeat what matters)."""

SNAPSHOT_SECONDS, CHAIN_SECONDS, PUMP_SECONDS = 1.0, 15.0, 0.01
LEAVE_SECONDS, LEAVE_REDUCING_SECONDS = 3.0, 6.0
"""What a leaver gives the last round: where it is reduced, an update is asked for only when a record lists it."""

SEE_OUT_SECONDS = 600.0
QUIET_SECONDS, QUIET_BYTES = 5.0, 200_000
"""After a run's last round a node stays until it has sent less than this in that time, and nobody is behind."""

OBSERVED_RECORDS, OBSERVED_BYTES = 200_000, 2**30
"""How much of the chain an observer keeps in memory: its coordinator may have to catch up from far behind."""


class Node:
    """One member of one run. `run()` returns when the run is over or `leave()` was called."""

    def __init__(self, membership: Membership, options: NodeOptions):
        self._membership = membership
        self._options = options
        self._spec = membership.spec
        self.store, self.key = membership.store, membership.identity.key
        self._codec = make_codec(self._spec.codec, self._spec.model.layout)
        self._signer = KeySigner(membership.identity)
        self.locator = membership.locator
        self._inbox = Inbox(membership.decoder, self.locator)
        self.network = Network(
            membership,
            Handlers(
                on_packet=self._take_packet,
                on_chain_request=self._on_chain_request,
                may_serve=self._may_serve,
                on_coordinator_address=self._on_coordinator_address_request,
            ),
            listen=options.listen,
            announce=options.announce,
            discovered=lambda packet: self._take_packet(self.key, packet),
            refused=lambda key: self._obeying.refusal(key) is not None,
        )
        self._events: asyncio.Queue[events.Event] = asyncio.Queue(maxsize=MAX_EVENTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._finished = asyncio.Event()
        self._started = asyncio.Event()
        self._leaving = False
        self._tick_waits = False
        self.finish_reason = ""
        self.again = False
        """It ended because it must start again: the run was rolled back further than its memory goes."""
        self.on_change: Callable[[], None] = lambda: None
        self._training: Training | None = None
        self._snapshot_failed = False
        self._exchange = Exchange()
        self._updates = Updates(
            self.store,
            self.network,
            self._codec,
            deadline_seconds=self._spec.round.exchange_seconds,
            everyone=self.network.everyone,
            answer=self.post,
            spawn=self._spawn,
        )
        reduction = Reduction(self._spec.codec, self._spec.model.layout)
        self._reducing = Reducing(
            self.store,
            self.network,
            self._updates,
            reduction,
            self._codec.size,
            self._spec.outer,
            exchange_seconds=self._spec.round.exchange_seconds,
            answer=self.post,
            spawn=self._spawn,
            relays=self.network.relays,
        )
        self._passing = Passing(
            self.key, self.store, self.network, reduction, self._codec.size, self._spec.round,
            lambda blob, by: self.machine.slices_for(blob, by), self._spawn,
        )  # fmt: skip
        self.chainlog = ChainLog(self.store, membership.decoder, self._spec)
        limits = RoundPolicy.of(self._spec).chain_limits
        if options.observer:
            limits = replace(limits, max_records=OBSERVED_RECORDS, max_bytes=OBSERVED_BYTES)
        self.chain = self.chainlog.load(limits)
        self._keeping = Keeping(self._spec, self.store, self.chain, self.key)
        self.machine = RoundMachine(
            policy=RoundPolicy.of(self._spec),
            run=self._spec.run_id,
            signer=self._signer,
            chain=self.chain,
            observer=options.observer,
            blob_size=self._codec.size,
            now=time.monotonic(),
        )
        self._obeying = Obeying(self.machine, self.store, self._spec.data.window, self._order, self._govern)
        self.latest: Snapshot = self.snapshot()
        """At most SNAPSHOT_SECONDS old: for other threads, which must not look at the node itself."""

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start everything, drive the machine until it is finished, stop everything. Raises CairnError."""
        try:
            await self._unless_over(self._start())
            if not self._finished.is_set():
                self._started.set()
                self._spawn(self._tick(), "ticks")
                await self._unless_over(self._pump())
        finally:
            await self._stop()

    async def _unless_over(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this, but not beyond the node's end. Raises what it, or any task of the node, raises."""
        task, finished = asyncio.ensure_future(work), asyncio.ensure_future(self._finished.wait())
        try:
            await asyncio.wait([task, finished, self._failure], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end([task, finished])
        if self._failure.done():
            self._failure.result()
        if not task.cancelled():
            task.result()

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
        if not self._started.is_set():
            self._finish("left before it had begun")
            return
        self.post(events.Leave())
        seconds = LEAVE_SECONDS if self._spec.round.exchange == "gather" else LEAVE_REDUCING_SECONDS
        asyncio.get_running_loop().call_later(seconds, self._finish, "left")

    def _order(self, orders: Orders) -> None:
        if self._training is not None:
            self._training.order(orders)

    def _govern(self, policy: RoundPolicy) -> None:
        self._updates.deadline_seconds = self._reducing.exchange_seconds = policy.exchange_seconds
        self.network.directory.limit = policy.max_members

    def _over(self, reason: str, at_once: bool = False) -> None:
        """The machine has nothing left to do. A run that is over still needs those who have its last state."""
        if self._leaving:
            self._finish(reason)
        elif self._options.observer:
            log.info("%s", reason)
        elif not self.finish_reason:
            self.finish_reason = reason
            log.warning("%s%s", reason, "" if at_once else ": staying until the others have its last state")
            self._spawn(self._see_out(at_once), "seeing the run out")

    async def _see_out(self, at_once: bool) -> None:
        """After the last round: serve until nobody lacks anything, then finish."""
        began = time.monotonic()
        if self._training is not None:
            await self._training.stop()
        served = -QUIET_BYTES
        while time.monotonic() - began < SEE_OUT_SECONDS and not at_once:
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
        m.ask = lambda: seeking.ask(self.network, self.locator, self._spec.run_id)
        if not o.observer:
            await fetch_assets(self._spec, self.store, self.network)
            start = start_message(
                self._spec, self.store, o.folder, self.key, o.device, o.threads, o.parallel, o.recompute, o.compile,
                o.overlap,
            )  # fmt: skip
            self._training = Training(
                self._spec,
                start,
                self.store,
                self.chain,
                self.network,
                self._updates,
                self._keeping,
                part_kind=self._reducing.kind,
                post=self.post,
                spawn=self._spawn,
                undecided=self._undecided,
                command=o.trainer_command or None,
            )
            self._obeying.prepare(o.folder / "trainer")
            self._training.begin()
            self._spawn(m.keep_valid(), "admission")
        self._spawn(self.network.discover(), "discovery")
        self._spawn(self.network.mend(), "swarm")
        self._spawn(seeking.pass_on(self.network, self.locator), "the coordinator's address")
        self._spawn(self._keep_snapshot(), "status file")
        self._set_facts()
        await self._act(self.machine.start(time.monotonic(), alone=not m.addresses))
        self._obeying.follow()

    async def _stop(self) -> None:
        """In order, each whatever became of the one before: the trainer saves, goodbyes go out, sockets close."""
        if not self._failure.done():
            self._failure.cancel()  # what fails from here on is only logged
        async with AsyncExitStack() as last_first:
            last_first.callback(self._write_snapshot)
            if self._membership.client is not None:
                last_first.push_async_callback(self._membership.client.close)
            last_first.push_async_callback(self.network.stop)
            last_first.push_async_callback(lambda: end(self._tasks))
            if self._training is not None:
                saved = await self._training.stop()
                log.info("the trainer has saved its state" if saved else "the trainer left without saving")

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """A task that belongs to the node: an error in it ends the node, loudly."""
        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)

        def ended(t: asyncio.Task[None]) -> None:
            self._tasks.discard(t)
            if t.cancelled() or (error := t.exception()) is None:
                return
            if self._failure.done():
                log.error("%s: %s", what, error)
            else:
                self._failure.set_exception(error)

        task.add_done_callback(ended)
        return task

    # -- events in -------------------------------------------------------------------------------------------

    def post(self, event: events.Event) -> None:
        """Queue an event for the machine."""
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            if isinstance(event, events.MessageReceived | events.CertificateReceived):
                return
            raise PeerError(f"{MAX_EVENTS} events wait for the round machine: this process does not keep up") from None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, max(0.005, self.machine.next_tick - time.monotonic())))
            if self.machine.next_tick <= time.monotonic() and not self._tick_waits:
                self._tick_waits = True
                self.post(events.Tick())

    async def _pump(self) -> None:
        rest = 0.0
        while True:
            if time.monotonic() > rest:
                await asyncio.sleep(0)  # a queue that is never empty never waits
                rest = time.monotonic() + PUMP_SECONDS
            event = await self._events.get()
            if isinstance(event, events.Tick):
                self._tick_waits = False
            elif isinstance(event, events.BlobHeld | events.ShardReduced):
                self._exchange.held(time.monotonic())
            elif (
                isinstance(event, events.StateReached)
                and event.record in self.chain
                and event.record != self.chain.root
            ):
                self._exchange.applied(self.chain.parent(event.record), time.monotonic())
            self._set_facts()
            await self._act(self.machine.step(event, time.monotonic()))
            self._obeying.follow()
            if isinstance(event, events.StateReached):
                self._obeying.reached()
            self.on_change()

    async def _take_packet(self, sender: PeerKey, packet: wire.Packet) -> None:
        # Our own events always have room, and members' messages whatever strangers send.
        room = MAX_EVENTS // (2 if sender == self.key or self.network.is_known(sender) else 16)
        for i, event in enumerate(self._inbox.packet(sender, packet, time.time())):
            if i % 32 == 31:
                await asyncio.sleep(0)  # verifying takes its time: others have a turn
            if isinstance(event, events.MessageReceived):
                message = event.message
                if message.author == self.key:
                    continue
                if self._obeying.refusal(message.author) is None:
                    self.network.note(message, sender)
            if event is not None and self._events.qsize() < room and not self._inbox.is_repeat(event):
                self.post(event)

    async def _on_chain_request(self, sender: PeerKey, request: wire.ChainRequest) -> wire.ChainReply:
        return self.chainlog.answer(request)

    def _on_coordinator_address_request(self, request: wire.CoordinatorAddressRequest) -> wire.CoordinatorAddressReply:
        return self.locator.answer(request, [*self.network.addresses, *self.network.directory.addresses()])

    def _may_serve(self, blob: Digest, requester: PeerKey) -> str | None:
        reason = self._obeying.refusal(requester) or self.machine.may_serve(blob, requester)
        if reason is None:
            self._passing.asked(blob, requester)
        return reason

    # -- actions out -----------------------------------------------------------------------------------------

    async def _act(self, todo: list[actions.Action]) -> None:  # noqa: C901 (a flat dispatch)
        for action in todo:
            match action:
                case actions.Broadcast(message):
                    if isinstance(message.body, UpdateHeader):
                        self._exchange.announced(message.body.parent, message.body.round, time.monotonic())
                    self.network.broadcast(message)
                case actions.Send(to, messages, certificates):
                    self.network.outbox.send(to, messages, certificates)
                case actions.RequestUpdate():
                    self._trainers_side.make_update(action)
                case actions.FetchBlob(blob, size, author, holders):
                    self._updates.fetch(blob, size, (author, *holders))
                case actions.DropBlob(blob):
                    self._updates.drop(blob)
                case actions.ReduceShard(record, part, committee):
                    self._reducing.reduce(record, part, committee)
                case actions.FetchShard(blob, record, part, holders):
                    self._reducing.fetch(blob, record, part, holders)
                case actions.CancelReduce(record):
                    self._reducing.drop(record)
                case actions.RequestChain(to, have):
                    self._spawn(self._request_chain(to, have), "chain request")
                case actions.StoreCertificate(certificate):
                    await asyncio.to_thread(self.chainlog.keep, certificate)
                case actions.StoreFinalization(message):
                    await asyncio.to_thread(self.chainlog.keep_final, message)
                case actions.StoreDirective(message):
                    await asyncio.to_thread(self.chainlog.keep_directive, message)
                case actions.ApplyRecord(certificate):
                    self._exchange.certified(certificate.record.body.parent, time.monotonic())
                    self._trainers_side.move(action)
                case actions.Resync():
                    self._trainers_side.move(action)
                case actions.Notice():
                    self._report(action)
                case actions.Finished(reason, at_once, again):
                    self.again = self.again or again
                    self._over(reason, at_once)

    async def _request_chain(self, to: PeerKey, have: tuple[Digest, ...]) -> None:
        request = wire.ChainRequest(run=self._spec.run_id, have=[bytes(d) for d in have])
        try:
            reply = await self.network.swarm.request_chain(to, request, timeout=CHAIN_SECONDS)
            self.post(await self._inbox.chain(to, reply))
        except NETWORK_ERRORS as e:
            log.info("no chain from %s: %s", to.short, str(e) or type(e).__name__)
            self.post(events.ChainUnanswered(to))

    def _report(self, report: actions.Notice) -> None:
        log.log(LEVELS[report.level], "%s", report.text)

    @property
    def _trainers_side(self) -> Training:
        if self._training is None:
            raise PeerError("an observer was asked to train, or to hold a state")
        return self._training

    async def hold(self, state: Digest) -> None:
        """Keep a checkpoint that was fetched into the store (an observer's trainer makes none). Raises StoreError."""
        self._keeping.state(state)
        self._updates.forget(await self._keeping.prune(self._undecided()))

    def _undecided(self) -> list[Digest]:
        """The blobs of the open round: updates, slices of them, and parts of their mean."""
        updates = [h.body.blob for h in self.machine.summary(time.monotonic()).headers]
        return updates + self._reducing.undecided()

    # -- views -----------------------------------------------------------------------------------------------

    def _set_facts(self) -> None:
        self.machine.facts = LocalStatus(
            sequence=int(time.time() * 1000),
            bytes_up=self.network.bytes_up,
            bytes_down=self.network.bytes_down,
            addresses=tuple(self.network.addresses),
            admission=b"" if self._options.observer else self._membership.admission,
            device=self._training.device if self._training is not None else "",
            unheard=self.network.unheard(),
        )

    def snapshot(self) -> Snapshot:
        """How the node is now."""
        view = self.machine.summary(time.monotonic())
        window, t = self._spec.data.window, self._training
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
            round_tokens=(sum(same) + (t.progress.windows if t is not None else 0)) * window,
            target_tokens=self.machine.orders.policy.target_windows * window,
            loss=t.progress.loss if t is not None else 0.0,
            tokens_per_second=t.progress.tokens_per_second if t is not None else 0.0,
            members=len(view.members),
            bytes_up=self.network.bytes_up,
            bytes_down=self.network.bytes_down,
            device=t.device if t is not None else "",
            own_updates=t.made if t is not None else 0,
            missed_updates=t.missed if t is not None else 0,
            exchange_seconds=asdict(self._exchange.times),
            exchange_rounds=[asdict(r) for r in self._exchange.rounds],
            trainer_restarts=t.restarts if t is not None else 0,
            finished=self.finish_reason,
            mfu=t.progress.mfu if t is not None else None,
            memory_used=t.progress.memory.used if t is not None and t.progress.memory else 0,
            memory_whole=t.progress.memory.whole if t is not None and t.progress.memory else 0,
            time_shares=asdict(t.progress.spent) if t is not None and t.progress.spent else {},
            trained_windows=t.trained if t is not None else 0,
            open_windows=t.progress.windows if t is not None else 0,
            next_window=t.progress.next_window if t is not None else 0,
            orders=self._obeying.words(self.key),
        )

    async def _keep_snapshot(self) -> None:
        while True:
            self.latest = self.snapshot()
            self._write_snapshot()
            await asyncio.sleep(SNAPSHOT_SECONDS)

    def _write_snapshot(self) -> None:
        try:
            write_snapshot(self._options.folder, self.snapshot())
            self._snapshot_failed = False
        except OSError as e:
            if not self._snapshot_failed:
                log.warning("status.json is not written: %s", (e.strerror or str(e)).lower())
            self._snapshot_failed = True
