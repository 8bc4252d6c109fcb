"""The rate at which a number grows, over the last seconds. The time is an argument."""

from __future__ import annotations

from collections import deque

RATE_SECONDS = 10.0
"""Seconds over which a rate is measured."""

MAX_POINTS = 64


class RateMeter:
    """The growth per second of a number that is noted about once a second."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=MAX_POINTS)
        """(time, number), oldest first; the oldest is at least RATE_SECONDS old once that much time has passed."""

    def note(self, number: float, now: float) -> float:
        """Note the number at time `now`, and return its recent growth per second; 0 after the first note."""
        points = self._points
        points.append((now, number))
        while len(points) > 2 and points[1][0] <= now - RATE_SECONDS:
            points.popleft()
        seconds = now - points[0][0]
        return max(0.0, number - points[0][1]) / seconds if seconds > 0 else 0.0
