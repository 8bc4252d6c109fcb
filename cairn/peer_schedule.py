"""The watch over a peer's settings: it rests, trains and leaves at their times, and follows the file as it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from cairn.peer_settings import PeerSettings, SettingsError, SettingsFile, parse_until
from peer.node.rest import Rest
from peer.swarm.pace import Paces

log = logging.getLogger("cairn.peer")

LOOK_SECONDS = 2.0
"""Seconds between two looks at the clock and the file."""


class PeerSchedule:
    """One peer's schedule. `look` does what is due now; `keep` looks again and again."""

    def __init__(
        self,
        file: SettingsFile,
        rest: Rest,
        paces: Paces,
        leave: Callable[[], None],
        clock: Callable[[], datetime] = datetime.now,
    ):
        """`leave` has the peer end in order. `clock` gives this machine's wall clock."""
        self._file = file
        self._rest = rest
        self._paces = paces
        self._leave = leave
        self._clock = clock
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
        try:
            if self._file.refresh():
                log.info("new settings: %s", self._file.settings)
                self._follow(self._file.settings)
        except SettingsError as e:
            log.warning("the settings stay as they were: %s", e)
        now = self._clock()
        self._rest.want("schedule", self._file.settings.reason_to_rest(now))
        if self._end is not None and now >= self._end:
            log.info("it is %s: leaving", self._end.isoformat(" ", "minutes"))
            self._end = None
            self._leave()

    async def keep(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)
