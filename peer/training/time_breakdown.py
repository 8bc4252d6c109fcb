"""The time of the thread that trains by activity, as shares of the last minute. The time is an argument."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from peer.channel.messages import TimeShares

BREAKDOWN_SECONDS = 60
"""Seconds that the shares cover, to the second."""


class Activity(IntEnum):
    """An activity of the thread; it does one thing at a time."""

    TRAINING = 0
    DATA = 1
    """Waits for the next batch."""
    COMPRESSING = 2
    """Waits while an update is made."""
    APPLYING = 3
    """Waits while a round is applied, moves the model onto the new base, or loads a state."""
    SAVING = 4
    WAITING = 5
    """Waits for the swarm: no state is held, or the next update could not claim more."""


class TimeBreakdown:
    """A stopwatch with one row of seconds for each second. Only the thread that trains uses it."""

    def __init__(self, now: float, activity: Activity = Activity.WAITING):
        self.activity = activity
        self._since = now
        self.rows: deque[tuple[int, list[float]]] = deque()
        """(a second's number, seconds of it for each Activity)."""

    def turn(self, activity: Activity, now: float) -> Activity:
        """Begin another activity at `now` (seconds, monotonic). Return the one that ends."""
        self._count(now)
        before, self.activity = self.activity, activity
        return before

    @contextmanager
    def during(self, activity: Activity, clock: Callable[[], float]) -> Iterator[None]:
        """Count the block as one activity, then continue the one before."""
        before = self.turn(activity, clock())
        try:
            yield
        finally:
            self.turn(before, clock())

    def shares(self, now: float) -> TimeShares:
        """Return the shares of the last minute, or since the start when that is less. They add up to 1."""
        self._count(now)
        seconds = [math.fsum(row[activity] for _, row in self.rows) for activity in Activity]
        whole = math.fsum(seconds)
        if whole == 0:
            return TimeShares(*(float(activity == self.activity) for activity in Activity))
        return TimeShares(*(min(1.0, s / whole) for s in seconds))

    def _count(self, now: float) -> None:
        since = max(self._since, now - BREAKDOWN_SECONDS)  # earlier time is forgotten at once
        self._since = max(self._since, now)
        while since < now:
            second = math.floor(since)
            if not self.rows or self.rows[-1][0] != second:
                self.rows.append((second, [0.0] * len(Activity)))
            until = min(now, second + 1.0)
            self.rows[-1][1][self.activity] += until - since
            since = until
        while self.rows and self.rows[0][0] <= math.floor(now) - BREAKDOWN_SECONDS:
            self.rows.popleft()
