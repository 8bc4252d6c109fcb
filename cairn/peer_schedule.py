"""The watch over a peer's settings: it rests, trains and leaves at their times, and follows the file as it changes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from cairn.day_traffic import DayTraffic
from cairn.idle_watch import IdleFacts, idle_facts
from cairn.peer_settings import PeerSettings, PeerSettingsError, SettingsFile, parse_until
from peer.node.rest import RestWish
from peer.swarm.pace import Paces

log = logging.getLogger("cairn.peer")

LOOK_SECONDS = 2.0
"""Seconds between two looks at the clock and the file."""

FACTS_SECONDS = 10.0
"""Seconds between two looks at who uses the machine."""

QUIET_SECONDS = 60.0
"""Seconds for which nobody must have used the machine: a trainer takes a while to start."""


class PeerSchedule:
    """One peer's schedule. `look` does what is due now; `keep` looks again and again."""

    def __init__(
        self,
        file: SettingsFile,
        rest: RestWish,
        paces: Paces,
        traffic: DayTraffic,
        leave: Callable[[], None],
        clock: Callable[[], datetime] = datetime.now,
        facts: Callable[[], Awaitable[IdleFacts]] = idle_facts,
        timer: Callable[[], float] = time.monotonic,
    ):
        """`leave` has the peer end in order. `clock` gives this machine's wall clock, `facts` who uses it.

        `timer` measures seconds: the wall clock may be set.
        """
        self._file = file
        self._rest = rest
        self._paces = paces
        self._traffic = traffic
        self._counted = (paces.up.gone, paces.down.gone)
        self.away = asyncio.Event()
        """Set while the day's volume is used up: the peer is to be out of the swarm."""
        self._back = asyncio.Event()
        self._leave = leave
        self._clock = clock
        self._ask = facts
        self._timer = timer
        self._facts = IdleFacts()
        self._asked_at: float | None = None
        self._quiet_from: float | None = None
        """The timer's seconds from which nobody will have used the machine for long enough."""
        self._said = ""
        self._is_outdated = False
        """The trainer was started with another limit of its memory: it is to start again."""
        self._end: datetime | None = None
        self._follow(file.settings)

    def _follow(self, settings: PeerSettings) -> None:
        up, down = settings.rates
        self._paces.up.set_rate(up)
        self._paces.down.set_rate(down)
        self._end = parse_until(settings.until, self._clock()) if settings.until else None
        if self._end is not None:
            log.info("this peer leaves at %s", self._end.isoformat(" ", "minutes"))

    def look(self) -> None:
        """Read the file if it has changed, then rest, train or leave as the settings say now."""
        gpu_memory = self._file.settings.gpu_memory
        try:
            if self._file.refresh():
                log.info("new settings: %s", self._file.settings)
                self._follow(self._file.settings)
                self._is_outdated |= self._file.settings.gpu_memory != gpu_memory
        except PeerSettingsError as e:
            log.warning("the settings stay as they were: %s", e)
        now, seconds = self._clock(), self._timer()
        reason = self._file.settings.reason_to_rest(now, self._facts)
        if self._file.settings.only_when_idle and self._facts.reason:
            self._quiet_from = seconds + QUIET_SECONDS
        elif not reason and self._file.settings.only_when_idle and self._quiet_from and seconds < self._quiet_from:
            reason = "the machine was in use a moment ago"
        self._rest.want("schedule", reason)
        self._is_outdated &= not self._rest.is_free
        self._rest.want("gpu_memory", "a new gpu_memory is set" if self._is_outdated else "")
        self._count(now)
        if self._end is not None and now >= self._end:
            log.info("it is %s: leaving", self._end.isoformat(" ", "minutes"))
            self._end = None
            self._leave()

    def _count(self, now: datetime) -> None:
        """Count what went since the last look, and see whether it was too much for a day."""
        gone = (self._paces.up.gone, self._paces.down.gone)
        up, down = (max(0, new - old) for new, old in zip(gone, self._counted, strict=True))
        self._counted = (max(gone[0], self._counted[0]), max(gone[1], self._counted[1]))
        # Out of the swarm it is all that is written, and by it a container's health check knows that the peer lives.
        self._traffic.add(now.date(), up, down, always=self.away.is_set())
        reason = self._file.settings.reason_to_be_away(self._traffic.up, self._traffic.down)
        if bool(reason) is not self.away.is_set():
            log.info("out of the swarm: %s", reason) if reason else log.info("back: there is traffic to use")
        for event, is_set in ((self.away, bool(reason)), (self._back, not reason)):
            event.set() if is_set else event.clear()

    async def until_back(self, stopping: asyncio.Future[Any]) -> bool:
        """Wait until the peer may be in the swarm. Return False when it is to stop instead."""
        back = asyncio.ensure_future(self._back.wait())
        await asyncio.wait([back, stopping], return_when=asyncio.FIRST_COMPLETED)
        back.cancel()
        return not stopping.done()

    async def learn(self) -> None:
        """Find out who uses the machine if that matters, and say once what cannot be known."""
        now = self._timer()
        if not self._file.settings.only_when_idle or (self._asked_at and now < self._asked_at + FACTS_SECONDS):
            return
        self._asked_at, self._facts = now, await self._ask()
        if (unknown := self._facts.unknown) != self._said:
            self._said = unknown
            if unknown:
                log.warning("only-when-idle: this machine does not tell of %s", unknown)

    async def keep(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.learn()
            self.look()
            await asyncio.sleep(LOOK_SECONDS)
