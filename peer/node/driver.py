"""The driver of the round machine: events in, status in, actions out in order.

`RoundDriver.step` and `carry_out` know no network, disk or trainer: these are behind `RoundEffects`. So the simulator
can use the same driver over effects and a clock of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from peer.node.events import EventQueue, MachineStepped, NodeEvents
from peer.node.round_timings import RoundTimings
from peer.node.tasks import cancel_and_wait
from protocol.messages import Signed, UpdateHeader
from protocol.rounds import actions, events
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import LocalStatus

YIELD_SECONDS = 0.01
"""Seconds after which the driver yields to other tasks: a queue that is never empty never waits."""

MIN_TICK_SECONDS, MAX_TICK_SECONDS = 0.005, 1.0

SLEPT_SECONDS = 60.0
"""Seconds without a turn after which a peer starts again: the others have gone on, and have forgotten it."""


def _awake_and_asleep() -> float:
    """Return seconds since the machine's start, with those in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class RoundEffects(Protocol):
    """The effects of the machine's actions."""

    async def carry_out(self, action: actions.Action) -> None:
        """Carry out an action other than Finished.

        Storing is finished on return; all else is only begun, and an event answers it, or nothing.
        """


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
        slept_seconds: float = math.inf,
        since_boot: Callable[[], float] = _awake_and_asleep,
    ):
        """Make it. After a pause of `slept_seconds` by the clock `since_boot`, `run` ends, to start again.

        A machine that slept would judge by its old stake what the others certified meanwhile, and take it from them.
        """
        self._machine = machine
        self._effects = effects
        self._queue = queue
        self._bus = bus
        self._timings = timings
        self._status = status
        self._clock = clock
        self._slept_seconds = slept_seconds
        self._since_boot = since_boot
        self._tick_is_queued = False

    @property
    def machine(self) -> RoundMachine:
        """The machine: to be read only."""
        return self._machine

    def post(self, event: events.Event) -> None:
        """Queue an event for the machine. Raises PeerError when too many wait."""
        self._queue.post(event)

    # -- one step --------------------------------------------------------------------------------------------

    async def introduce(self) -> None:
        """Send a heartbeat before `start`."""
        await self._effects.carry_out(actions.Broadcast(self._machine.introduction(self._status())))

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
        finished = None
        for action in todo:
            if isinstance(action, actions.Finished):
                finished = action
            else:
                await self._effects.carry_out(action)
        return finished

    # -- the loop --------------------------------------------------------------------------------------------

    async def run(self) -> actions.Finished:
        """Feed the machine with events and ticks until it says that the node may stop."""
        pump, ticks = asyncio.ensure_future(self._pump()), asyncio.ensure_future(self._tick())
        try:
            await asyncio.wait([pump, ticks], return_when=asyncio.FIRST_COMPLETED)
            return ticks.result() if ticks.done() else pump.result()
        finally:
            await cancel_and_wait([pump, ticks])

    async def _tick(self) -> actions.Finished:
        """Queue ticks until this process or machine has slept. Return that it is to start again."""
        seen = self._since_boot()
        while True:
            slept, seen = self._since_boot() - seen, self._since_boot()
            if slept > self._slept_seconds:
                return actions.Finished(f"this peer was asleep for {slept:.0f} s, and the others went on", again=True)
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
