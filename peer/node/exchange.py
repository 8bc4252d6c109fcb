"""How long a round takes from our announcement until it is applied: the part of a round that is not training. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

from protocol.ids import Digest


class Exchange:
    """The last `remembered` rounds in which we announced, by the parent of each."""

    def __init__(self, remembered: int = 32):
        self._announced: tuple[Digest, float] | None = None
        self._seconds: deque[float] = deque(maxlen=remembered)

    def announced(self, parent: Digest, now: float) -> None:
        """Our header for the round after `parent` went out (repeats do not count)."""
        if self._announced is None or self._announced[0] != parent:
            self._announced = (parent, now)

    def applied(self, parent: Digest, now: float) -> None:
        """The record after `parent` is applied."""
        if self._announced is not None and self._announced[0] == parent:
            self._seconds.append(now - self._announced[1])

    @property
    def median(self) -> float:
        """Seconds; 0 before the first round."""
        return median(self._seconds) if self._seconds else 0.0
