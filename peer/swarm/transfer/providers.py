"""The providers of a blob as one fetch sees them, and how often each kind of failure is followed by another request."""

from __future__ import annotations

import enum
import random
from collections import Counter
from dataclasses import dataclass, field
from math import inf

from peer.swarm.transfer.frames import ReplyStatus
from protocol.ids import PeerKey

BITMAP_SECONDS = (0.1, 1.0)
"""Seconds between bitmaps of a provider that fetches too: while its bitmap changes, and at most."""

JITTER = 0.2
"""Share by which a wait is shortened or extended, by chance."""

_MAX_EXPONENT = 40


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Requests until a provider is dropped, and the seconds between them: the first wait, its growth, the longest."""

    tries: float
    first: float
    growth: float
    most: float

    def wait(self, attempt: int, chance: random.Random) -> float:
        """Return the seconds to wait after failed attempt `attempt` (0 is the first)."""
        seconds = min(self.most, self.first * self.growth ** min(attempt, _MAX_EXPONENT))
        return seconds * chance.uniform(1 - JITTER, 1 + JITTER)


RETRIES = {
    # The other side may be about to receive our header: soon again, until the deadline.
    ReplyStatus.REFUSED: RetryPolicy(inf, 0.06, 1.4, 0.5),
    ReplyStatus.MISSING: RetryPolicy(5, 0.1, 2.0, 2.0),
    ReplyStatus.ABSENT: RetryPolicy(inf, 0.1, 1.4, 1.0),
    ReplyStatus.BUSY: RetryPolicy(8, 0.2, 1.6, 2.0),
}
LOST_RETRIES = RetryPolicy(3, 0.2, 3.0, 3.0)
"""For a stream that broke or could not be opened."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds without chunk requests to a provider. `absent`: then it says first which chunks it has."""

    seconds: float
    absent: bool = False


class ProviderActivity(enum.Enum):
    """The activity of a provider of chunks in this fetch."""

    OUT = "nothing: not begun, or dropped"
    BITMAP = "saying which chunks it has"
    SLOT = "a slot on its stream is awaited"
    FULL = "as many requests are under way as it may have"
    IDLE = "there is nothing to request"
    DRAINING = "it failed; the requests under way are awaited"
    EARLY = "it failed before the hashes were known, which are awaited"
    PAUSED = "it failed, and is asked again later"


@dataclass(eq=False)
class Provider:
    """One provider in one fetch."""

    peer: PeerKey
    reason: str = "not asked yet"
    """Its last failure or state, for a person."""

    bad: bool = False
    """Nothing more is requested from it."""

    counts: Counter[str] = field(default_factory=Counter)
    """Failures by kind, since the last data."""

    proved: bool = False
    """It gave a correct chunk."""

    suspected: bool = False
    """It gave a wrong chunk. Nothing more is requested until it is known whose fault that is."""

    # Of the attempt that is going on:
    activity: ProviderActivity = ProviderActivity.OUT
    wake_at: float = inf
    slot: int | None = None
    """The number of the slot request under way."""

    requests: dict[int, int] = field(default_factory=dict)
    """Chunks that are requested, or not yet stored, by the number of the request."""

    pause: Pause | None = None
    """Set by the first failure: all that was requested at the same time counts once."""

    pages: list[bytes] = field(default_factory=list)
    bitmap_failures: int = 0
    bitmap_due: float = 0.0
    bitmap_seconds: float = BITMAP_SECONDS[0]

    def begin(self) -> None:
        """Prepare for a new attempt at chunks."""
        self.activity, self.wake_at, self.slot, self.pause = ProviderActivity.OUT, inf, None, None
        self.requests, self.pages, self.bitmap_failures = {}, [], 0
        self.bitmap_due, self.bitmap_seconds = 0.0, BITMAP_SECONDS[0]
