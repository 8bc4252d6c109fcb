"""Measurement of how long a round takes from our announcement until it is applied, and of its stages. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from protocol.ids import Digest

REMEMBERED = 32
"""Rounds whose times are kept."""


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """Medians over the last rounds, in seconds since our announcement; 0 before the first round."""

    blobs: float = 0.0
    """Seconds until the last of the other members' updates was held and checked."""
    certified: float = 0.0
    """Seconds until there was a certificate to apply."""
    applied: float = 0.0
    """Seconds until the new state was held."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """The times of one round, by its number; fields as in ExchangeTimes."""

    round: int
    blobs: float
    certified: float
    applied: float


class RoundTimings:
    """The times of the last REMEMBERED rounds in which we announced an update.

    A round is identified by its parent record.
    """

    def __init__(self) -> None:
        self._parent: Digest | None = None
        self._number = 0
        self._began = self._blobs = 0.0
        self._certified: float | None = None
        """None while there is no certificate of this round."""
        self._rounds: deque[RoundTimes] = deque(maxlen=REMEMBERED)

    def note_announced(self, parent: Digest, number: int, now: float) -> None:
        """Note that our header for round `number`, the one after `parent`, was sent. Repeats do not count."""
        if parent != self._parent:
            self._parent, self._number = parent, number
            self._began = self._blobs = now
            self._certified = None

    def note_held(self, now: float) -> None:
        """Note that another member's update, or a reduced shard, is held."""
        if self._certified is None:
            self._blobs = now

    def note_certified(self, parent: Digest, now: float) -> None:
        """Note that the record after `parent` is to be applied."""
        if parent == self._parent:
            self._certified = now

    def note_applied(self, parent: Digest, now: float) -> None:
        """Note that the record after `parent` was applied."""
        if parent == self._parent:
            certified = self._began if self._certified is None else self._certified
            times = (round(t - self._began, 4) for t in (self._blobs, certified, now))
            self._rounds.append(RoundTimes(self._number, *times))

    @property
    def rounds(self) -> list[RoundTimes]:
        """The remembered rounds, oldest first."""
        return list(self._rounds)

    @property
    def times(self) -> ExchangeTimes:
        """The medians of the remembered rounds."""
        if not self._rounds:
            return ExchangeTimes()
        columns = zip(*((r.blobs, r.certified, r.applied) for r in self._rounds), strict=True)
        return ExchangeTimes(*(round(median(column), 4) for column in columns))
