"""Where the time of the thread that trains goes: shares of the last minute. The time is an argument."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from peer.channel.messages import TimeShares

SPAN = 60
"""Seconds that the shares look back, to the second."""


class Doing(IntEnum):
    """What the thread does; one thing at a time."""

    TRAINING = 0
    DATA = 1
    """Waits for the next batch."""
    COMPRESSING = 2
    """Stands aside while an update is made."""
    APPLYING = 3
    """Stands aside while a round is applied, goes on from one, or loads a state."""
    SAVING = 4
    WAITING = 5
    """May not train: no state is held, or the next update could not claim more."""


class Spent:
    """Told by one thread what it turns to. Keeps a row for each second."""

    def __init__(self, now: float, doing: Doing = Doing.WAITING):
        self.doing = doing
        self._since = now
        self._rows: deque[tuple[int, list[float]]] = deque()
        """(which second, seconds of it for each Doing)."""

    def turn(self, doing: Doing, now: float) -> Doing:
        """From now on it does this. Returns what it did until now."""
        self._count(now)
        before, self.doing = self.doing, doing
        return before

    @contextmanager
    def during(self, doing: Doing, clock: Callable[[], float]) -> Iterator[None]:
        """It does this for a while, and then what it did before."""
        before = self.turn(doing, clock())
        try:
            yield
        finally:
            self.turn(before, clock())

    def shares(self, now: float) -> TimeShares:
        """Of the last SPAN seconds, or of the time since the start when that is less. They add up to 1."""
        self._count(now)
        seconds = [math.fsum(row[doing] for _, row in self._rows) for doing in Doing]
        whole = math.fsum(seconds)
        if whole == 0:
            return TimeShares(*(float(doing == self.doing) for doing in Doing))
        return TimeShares(*(min(1.0, s / whole) for s in seconds))

    def _count(self, now: float) -> None:
        since = max(self._since, now - SPAN)  # what is before that is forgotten at once
        self._since = max(self._since, now)
        while since < now:
            second = math.floor(since)
            if not self._rows or self._rows[-1][0] != second:
                self._rows.append((second, [0.0] * len(Doing)))
            until = min(now, second + 1.0)
            self._rows[-1][1][self.doing] += until - since
            since = until
        while self._rows and self._rows[0][0] <= math.floor(now) - SPAN:
            self._rows.popleft()
