"""What a fetch knows of those who may hold a blob, and how often it asks them again, by what they did."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from peer.swarm.frames import Status
from protocol.ids import PeerKey


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a holder is asked again, by what it did, and how long we wait in between (first, growth, at most)."""

    tries: float
    first: float
    growth: float
    most: float

    def wait(self, attempt: int) -> float:
        return min(self.most, self.first * self.growth ** min(attempt, 40)) * random.uniform(0.8, 1.2)


PATIENCE = {
    # The other side may be about to get our header: soon again, until the deadline.
    Status.REFUSED: Patience(float("inf"), 0.06, 1.4, 0.5),
    Status.MISSING: Patience(5, 0.1, 2.0, 2.0),
    Status.ABSENT: Patience(float("inf"), 0.1, 1.4, 1.0),
    Status.BUSY: Patience(8, 0.2, 1.6, 2.0),
}
LOST = Patience(3, 0.2, 3.0, 3.0)


@dataclass
class Holder:
    """What one holder did so far in this fetch."""

    peer: PeerKey
    reason: str = "not asked yet"
    bad: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    proved: bool = False
    """It gave a chunk that is the blob's."""

    suspected: bool = False
    """It gave one that is not: nothing more is asked of it until it is known whose fault that is."""


class Dropped(Exception):
    """This holder is of no more use to this attempt."""


class Later(Exception):
    """The holder does not give this now: worth asking again after a wait."""

    def __init__(self, seconds: float, *, absent: bool = False):
        self.seconds = seconds
        self.absent = absent
        """It may have other chunks."""


class WrongSize(Exception):
    """The chunk is the blob's own, and shows that the blob's stated size is wrong."""
