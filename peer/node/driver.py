"""The driver of the round machine: events in, status in, actions out in order.

`RoundDriver.step` and `carry_out` know no network, disk or trainer: these are behind `RoundEffects`. So the simulator
can use the same driver over effects and a clock of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from peer.errors import PeerError
from peer.node.events import EventQueue, MachineStepped, NodeEvents
from peer.node.round_timings import RoundTimings
from peer.node.tasks import cancel_and_wait
from protocol.messages import Certificate, Directive, Finalization, Signed, UpdateHeader
from protocol.rounds import actions, events
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import LocalStatus

YIELD_SECONDS = 0.01
"""Seconds after which the driver yields to other tasks: a queue that is never empty never waits."""

MIN_TICK_SECONDS, MAX_TICK_SECONDS = 0.005, 1.0


class RoundEffects(Protocol):
    """The effects of the machine's actions. Storing is finished when the method returns."""

    def broadcast(self, message: Signed) -> None:
        """Send a message to all peers."""

    def send(self, action: actions.Send) -> None:
        """Send messages and certificates to one peer."""

    def request_update(self, action: actions.RequestUpdate) -> None:
        """Have the trainer make an update."""

    def fetch_blob(self, action: actions.FetchBlob) -> None:
        """Fetch an update's blob."""

    def cancel_fetch(self, action: actions.CancelFetch) -> None:
        """Stop fetching a blob."""

    def fetch_shard(self, action: actions.FetchShard) -> None:
        """Fetch a reduced shard."""

    def reduce_shard(self, action: actions.ReduceShard) -> None:
        """Make a reduced shard."""

    def cancel_reduce(self, action: actions.CancelReduce) -> None:
        """Stop the work on a record's shards."""

    def request_chain(self, action: actions.RequestChain) -> None:
        """Request certificates of a peer."""

    async def store_certificate(self, certificate: Certificate) -> None:
        """Store a certificate."""

    async def store_finalization(self, finalization: Signed[Finalization]) -> None:
        """Store the newest finalization."""

    async def store_directive(self, directive: Signed[Directive]) -> None:
        """Store the newest directive."""

    async def store_epoch(self, epoch: int) -> None:
        """Store the epoch of what the trainer saves from now on."""

    def move(self, action: actions.ApplyRecord | actions.SyncState) -> None:
        """Move the trainer to another state."""

    def keep_state(self, action: actions.KeepState) -> None:
        """Have the trainer write the state that it holds to the store."""

    def release_trainer(self) -> None:
        """Have the trainer save and end, and end the check that is being made: the user wants the devices."""

    def acquire_trainer(self) -> None:
        """Have a new trainer start, and checks be made again."""

    def audit_update(self, action: actions.AuditUpdate) -> None:
        """Make a check of an update. Only machines with `audits` ask for it."""

    def on_directives_changed(self, action: actions.DirectivesChanged) -> None:
        """Follow the directives in force."""

    def notify(self, action: actions.Notice) -> None:
        """Report something to people."""

    def on_run_completed(self, action: actions.RunCompleted) -> None:
        """Stop the trainer: the run is over."""


class RoundDriver:
    """Drives one machine. `status` gives what heartbeats say of this node, `clock` monotonic seconds."""

    def __init__(
        self,
        machine: RoundMachine,
        effects: RoundEffects,
        queue: EventQueue,
        bus: NodeEvents,
        timings: RoundTimings,
        *,
        status: Callable[[], LocalStatus],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._machine = machine
        self._effects = effects
        self._queue = queue
        self._bus = bus
        self._timings = timings
        self._status = status
        self._clock = clock
        self._tick_is_queued = False

    @property
    def machine(self) -> RoundMachine:
        """The machine: to be read only."""
        return self._machine

    def post(self, event: events.Event) -> None:
        """Queue an event for the machine. Raise PeerError when too many wait."""
        self._queue.post(event)

    # -- one step --------------------------------------------------------------------------------------------

    def introduce(self) -> None:
        """Send a heartbeat before `start`."""
        self._effects.broadcast(self._machine.introduction(self._status()))

    async def start(self, *, alone: bool) -> actions.Finished | None:
        """Start the machine. `alone`: no peer is known that it could wait for."""
        return await self.carry_out(self._machine.start(self._clock(), self._status(), alone=alone))

    def step(self, event: events.Event) -> list[actions.Action]:
        """Return the actions that follow from an event."""
        now, timings, chain = self._clock(), self._timings, self._machine.chain
        if isinstance(event, events.BlobHeld | events.ShardReduced):
            timings.note_held(now)
        elif isinstance(event, events.StateReached) and event.record in chain and event.record != chain.root:
            timings.note_applied(chain.parent(event.record), now)
        following = self._machine.step(event, now, self._status())
        for action in following:
            match action:
                case actions.Broadcast(Signed(body=UpdateHeader() as header)):
                    timings.note_announced(header.parent, header.round, now)
                case actions.ApplyRecord(certificate):
                    timings.note_certified(certificate.record.body.parent, now)
                case _:
                    pass
        return following

    async def carry_out(self, todo: Iterable[actions.Action]) -> actions.Finished | None:
        """Carry out actions in order. Return Finished when that is among them."""
        effects, finished = self._effects, None
        for action in todo:
            match action:
                case actions.StoreCertificate(certificate):
                    await effects.store_certificate(certificate)
                case actions.StoreFinalization(message):
                    await effects.store_finalization(message)
                case actions.StoreDirective(message):
                    await effects.store_directive(message)
                case actions.StoreEpoch(epoch):
                    await effects.store_epoch(epoch)
                case actions.Finished():
                    finished = action
                case _:
                    self._start_effect(action)
        return finished

    def _start_effect(self, action: actions.Action) -> None:
        """Start the effect of an action that is answered by an event, or by nothing."""
        effects = self._effects
        match action:
            case actions.Broadcast(message):
                effects.broadcast(message)
            case actions.Send():
                effects.send(action)
            case actions.RequestUpdate():
                effects.request_update(action)
            case actions.FetchBlob():
                effects.fetch_blob(action)
            case actions.CancelFetch():
                effects.cancel_fetch(action)
            case actions.FetchShard():
                effects.fetch_shard(action)
            case actions.ReduceShard():
                effects.reduce_shard(action)
            case actions.CancelReduce():
                effects.cancel_reduce(action)
            case actions.RequestChain():
                effects.request_chain(action)
            case actions.ApplyRecord() | actions.SyncState():
                effects.move(action)
            case actions.KeepState():
                effects.keep_state(action)
            case actions.ReleaseTrainer():
                effects.release_trainer()
            case actions.AcquireTrainer():
                effects.acquire_trainer()
            case actions.DirectivesChanged():
                effects.on_directives_changed(action)
            case actions.AuditUpdate():
                effects.audit_update(action)
            case actions.Notice():
                effects.notify(action)
            case actions.RunCompleted():
                effects.on_run_completed(action)
            case _:
                raise PeerError(f"the driver does not know the action {type(action).__name__}")

    # -- the loop --------------------------------------------------------------------------------------------

    async def run(self) -> actions.Finished:
        """Feed the machine with events and ticks until it says that the node may stop."""
        pump, ticks = asyncio.ensure_future(self._pump()), asyncio.ensure_future(self._tick())
        try:
            await asyncio.wait([pump, ticks], return_when=asyncio.FIRST_COMPLETED)
            if ticks.done():
                ticks.result()  # raises: the ticks never end by themselves
            return pump.result()
        finally:
            await cancel_and_wait([pump, ticks])

    async def _tick(self) -> None:
        while True:
            left = self._machine.next_tick - self._clock()
            await asyncio.sleep(min(MAX_TICK_SECONDS, max(MIN_TICK_SECONDS, left)))
            if self._machine.next_tick <= self._clock() and not self._tick_is_queued:
                self._tick_is_queued = True
                self._queue.post(events.Tick())

    async def _pump(self) -> actions.Finished:
        yield_at = 0.0
        while True:
            if self._clock() > yield_at:
                await asyncio.sleep(0)
                yield_at = self._clock() + YIELD_SECONDS
            event = await self._queue.get()
            if isinstance(event, events.Tick):
                self._tick_is_queued = False
            finished = await self.carry_out(self.step(event))
            self._bus.post(MachineStepped())
            if finished is not None:
                return finished
