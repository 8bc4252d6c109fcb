"""Failures that repeat, for the log: the first at once, the later ones as a count, with pauses that double."""

from __future__ import annotations

import math

FIRST_PAUSE, MAX_PAUSE = 30.0, 3600.0
"""Seconds between two lines of failures that go on: at first, and at most."""

QUIET_SECONDS = 600.0
"""Seconds without a failure after which the next one is a first one again."""


class FailureLog:
    """The schedule of the lines about one kind of failure. The time is an argument, in seconds."""

    def __init__(self) -> None:
        self._count = 0
        self._pause = FIRST_PAUSE
        self._due = self._last = -math.inf

    def failed(self, now: float) -> int:
        """Note a failure. Return the number of failures that a line logged now stands for; 0: log none."""
        if now - self._last >= QUIET_SECONDS:
            self._pause, self._due = FIRST_PAUSE, now
        self._last = now
        self._count += 1
        if now < self._due:
            return 0
        count, self._count = self._count, 0
        self._due, self._pause = now + self._pause, min(2 * self._pause, MAX_PAUSE)
        return count
