"""The bytes a second that the user of this machine allows for blobs: nearly all that a peer sends and gets."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from protocol.token_bucket import TokenBucket

MIN_SECONDS, LOOK_SECONDS = 0.001, 1.0
"""The shortest sleep, and the longest: the rate may change meanwhile."""


class Pace:
    """A bound on one way's bytes a second, for all streams together. Without a rate there is none.

    A piece is let through whole once the debt of those before it is paid, in the order of asking.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ):
        """`clock` and `sleep` count seconds of one clock."""
        self._clock = clock
        self._sleep = sleep
        self._bucket: TokenBucket | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        """Bytes of those that wait."""
        self.gone = 0
        """Bytes that went so far, those under way included."""

    def set_rate(self, rate: int) -> None:
        """Allow these bytes a second from now on; 0: any number."""
        if rate != (0 if self._bucket is None else self._bucket.rate):
            self._bucket = TokenBucket(rate, rate, self._clock()) if rate else None

    @property
    def rate(self) -> float:
        """The bytes a second that are allowed; infinite without a bound."""
        return math.inf if self._bucket is None else self._bucket.rate

    async def take(self, size: int) -> None:
        """Wait until these bytes may go."""
        if self._bucket is not None:
            self._waiting += size
            try:
                async with self._turn:
                    while (wait := self._debt_seconds()) > 0:
                        await self._sleep(min(LOOK_SECONDS, max(MIN_SECONDS, wait)))
                    if self._bucket is not None:
                        self._bucket.charge(size)
            finally:
                self._waiting -= size
        self.gone += size

    def wait_seconds(self) -> float:
        """Return the seconds until more bytes may go, after those that wait."""
        return 0.0 if self._bucket is None else max(0.0, self._debt_seconds() + self._waiting / self._bucket.rate)

    def note_gone(self, size: int) -> None:
        """Count bytes that went elsewhere: no rate holds for them, and they take nothing from the others'."""
        self.gone += size

    def give_back(self, size: int) -> None:
        """Return bytes that were taken and did not go. A negative number counts bytes that went without being taken."""
        self.gone -= size
        if self._bucket is not None:
            self._bucket.charge(-size)

    def _debt_seconds(self) -> float:
        if self._bucket is None:
            return 0.0
        self._bucket.refill(self._clock())
        return -self._bucket.tokens / self._bucket.rate


@dataclass(frozen=True)
class Paces:
    """The bounds of both ways. They outlive the swarm, and may change at any time."""

    up: Pace = field(default_factory=Pace)
    down: Pace = field(default_factory=Pace)
