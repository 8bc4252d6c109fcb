"""The registry of deadlines: a rule that must act when its time comes asks it, so no deadline is written down twice.

A comparison is also the registration: the next tick is the earliest deadline that the last step found in the future.
Comparisons that need no tick are not registered. They only choose what a step does that another event or deadline
causes (a heartbeat, a message, an attempt), or are examined again at the next heartbeat.
"""

from __future__ import annotations


class Deadlines:
    """The time of the step under way, and the deadlines that it has compared with that time."""

    def __init__(self, now: float):
        self.now = now
        """Seconds of a monotonic clock."""

        self.pending: dict[str, float] = {}
        """The earliest deadline of each name."""

    def begin(self, now: float) -> None:
        """Start a step at this time, or at the time of the previous step if that is later."""
        self.now = max(self.now, now)
        self.pending.clear()

    def due(self, name: str, at: float) -> bool:
        """Return whether a deadline has passed; register it if it has not."""
        if at <= self.now:
            return True
        if at < self.pending.get(name, float("inf")):
            self.pending[name] = at
        return False

    def register(self, name: str, at: float) -> None:
        """Register a deadline that a later step examines."""
        self.due(name, at)

    @property
    def next_tick(self) -> float:
        """The earliest deadline; infinite when there is none."""
        return min(self.pending.values(), default=float("inf"))
