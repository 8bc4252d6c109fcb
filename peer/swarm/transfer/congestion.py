"""How many requests to keep under way on one stream: as many as fill the network path, measured by the replies. Pure.

After BBR (RFC draft-ietf-ccwg-bbr): the path holds (highest recent rate) x (lowest recent latency), and GAIN times as
much is requested. So the window grows as long as the rate does, and a long fat path is filled after a few round trips.
A provider that is slow, or shared by many, is not asked for more than it gives in a moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.merkle import CHUNK

FIRST, LEAST, MOST = 4, 2, 128
"""Requests under way: at first; always (one is read by the other side while it sends the other); at most."""

GAIN = 3.0
"""TCP doubles its window in a round trip, and a rate is known one round trip late. A smaller gain would hold TCP up."""

SPARE_SECONDS = 0.25
"""Seconds whose arrivals are requested beyond one latency, at least: a busy process leaves no short path idle."""

FAST, SLOW = 0.25, 0.03
"""Weights of one sample in the averages of latencies."""

MAX_SAMPLE = 2.5
"""Cap on one sample of the loaded latency, as a multiple of its average."""

NEW_REPLIES = 16
"""Replies of a new stream for which the loaded latency falls fast: the first may have been late for being the first."""

RATE_SECONDS, BASE_SECONDS = 1.0, 30.0
"""Lifetimes T of the highest rate (or 4 latencies, while the window is full) and of the lowest latency: T to 2T."""


@dataclass(frozen=True, slots=True)
class SentMark:
    """The state when a request was sent: the time, the bytes that had arrived, the requests under way with it."""

    at: float
    delivered: int
    under_way: int
    full: bool
    """The window was full."""


@dataclass(slots=True)
class _WindowedBest:
    """The best value of the current epoch and of the one before."""

    began: float = 0.0
    now: float | None = None
    before: float | None = None

    def turn(self, now: float, seconds: float) -> bool:
        """Begin a new epoch if the current one is over; return whether it was."""
        if self.now is None or now - self.began < seconds:
            return False
        self.began, self.before, self.now = now, self.now, None
        return True


@dataclass
class CongestionController:
    """The window of one stream. Times are in seconds of any one clock, sizes in bytes."""

    window: int = FIRST
    """Requests that may be under way now."""

    latency: float = 0.0
    """Moving average of the seconds from a request to its reply; 0 before the first."""

    loaded_latency: float = 0.0
    """The same, decaying slowly: a slow peer that is spared answers fast for a while and is slow again under load.

    Samples that are late together count once."""

    _new: int = 0
    _risen_at: float = float("-inf")
    _delivered: int = 0
    _rate: _WindowedBest = field(default_factory=_WindowedBest)
    _base: _WindowedBest = field(default_factory=_WindowedBest)
    _draining: bool = False

    def sent(self, now: float, under_way: int, full: bool | None = None) -> SentMark:
        """Note that a request is sent, the last of `under_way`; return the mark to pass to `received`.

        `full`: whether the window is full, also with replies that wait to be kept. None compares `under_way` with it.
        """
        return SentMark(now, self._delivered, under_way, under_way >= self.window if full is None else full)

    def received(self, mark: SentMark, size: int, now: float) -> None:
        """Note that the reply to a request is here, with `size` bytes."""
        self._delivered += size
        took = max(1e-4, now - mark.at)
        if self._base.turn(now, BASE_SECONDS):
            self._draining = True  # every latency contains our own queue: let it drain to measure the path's
        if self._draining and mark.under_way <= LEAST:
            self._draining = False
        if not self._draining:
            self._base.now = took if self._base.now is None else min(took, self._base.now)
        if 2 * size < CHUNK:
            return  # a small reply is no measure of the rate
        self.latency += (took - self.latency) * (FAST if self.latency else 1.0)
        self._update_loaded_latency(took, mark.at, now)
        base = min(b for b in (self._base.now, self._base.before, took) if b is not None)
        if mark.full:  # with less than a full window a low rate is no evidence against a higher one
            self._rate.turn(now, max(RATE_SECONDS, 4 * base))
        rate = (self._delivered - mark.delivered) / took
        self._rate.now = rate if self._rate.now is None else max(rate, self._rate.now)
        best = max(self._rate.now, self._rate.before or 0.0)
        fill = best * max(GAIN * base, base + SPARE_SECONDS) / CHUNK
        self.window = LEAST if self._draining else max(LEAST, min(MOST, round(fill)))

    def _update_loaded_latency(self, took: float, sent_at: float, now: float) -> None:
        """Count one sample. It raises the average only if it was sent after the last rise."""
        if not self.loaded_latency:
            self.loaded_latency, self._new = took, NEW_REPLIES
        elif took < self.loaded_latency:
            self.loaded_latency -= (self.loaded_latency - took) * (FAST if self._new else SLOW)
        elif sent_at >= self._risen_at:
            self.loaded_latency += (min(took, MAX_SAMPLE * self.loaded_latency) - self.loaded_latency) * FAST
            self._risen_at = now
        self._new = max(0, self._new - 1)
