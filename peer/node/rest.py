"""A rest of this peer: what its user wants, and whether the devices are free yet.

Each source that asks for a rest (a command, a schedule) gives a reason. The peer trains while nobody has one. An object
of this class outlives the node, so a node that is built again keeps the rest.
"""

from __future__ import annotations

import asyncio
import contextlib

import async_timeout


class RestWish:
    """The reasons for which this peer is to rest, by source, and the state of its devices."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._news = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()

    def want(self, source: str, reason: str) -> None:
        """Set the reason of a source; "" when it has none any more."""
        if self._reasons.get(source, "") != reason:
            self._reasons[source] = reason
            self._news.set()

    @property
    def reason(self) -> str:
        """The reason to rest, for people; "" while the peer may train."""
        return next((reason for reason in self._reasons.values() if reason), "")

    async def wait_for_news(self) -> None:
        """Wait until some reason has changed since the last call."""
        await self._news.wait()
        self._news.clear()

    # -- the devices -----------------------------------------------------------------------------------------

    @property
    def is_free(self) -> bool:
        """True while no process of this peer uses a device."""
        return self._free.is_set()

    def note_devices(self, *, free: bool) -> None:
        """Note that the devices are free, or in use."""
        self._free.set() if free else self._free.clear()

    async def until_free(self, seconds: float) -> bool:
        """Wait until the devices are free, at most these seconds. Return whether they are."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with async_timeout.timeout(seconds):
                await self._free.wait()
        return self.is_free
