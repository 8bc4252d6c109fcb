"""How many requests to keep under way on one stream: what fills the line, found out as the replies come. Pure.

After BBR (RFC draft-ietf-ccwg-bbr): the line holds (highest rate of late) x (lowest latency of late), and GAIN times as
much is asked for. So the window grows as long as the rate does, a long fat line is filled after a few round trips, and
a holder that is slow, or shared by many, is not asked for more than it gives in a moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.merkle import CHUNK

FIRST, LEAST, MOST = 4, 2, 128
"""Requests: at first; always (one is read by the other side while it sends the other); whatever the line."""

GAIN = 3.0
"""TCP doubles in a round trip, and a rate is known one late: with less than this we would hold it up."""

SPARE_SECONDS = 0.25
"""Asked for on top of one latency, at the least: a short line is not left idle while this process is busy."""

QUICKLY, SLOWLY, LATE = 0.25, 0.03, 2.5
"""How much a reply counts in what is known of latencies; the most that one can say, in times of what is known."""

FEW = 16
"""Replies of a new stream, of which the first may have been late for being the first."""

RATE_SECONDS, BASE_SECONDS = 1.0, 30.0
"""How long the highest rate (or 4 latencies), while all is asked for that may be, and the lowest latency are believed,
at least; twice that at most."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A request was sent: when, what had come by then, how many were under way with it, and whether no more may be."""

    at: float
    delivered: int
    under_way: int
    full: bool


@dataclass(slots=True)
class _Epochs:
    """The best value of this epoch and the one before."""

    began: float = 0.0
    now: float | None = None
    before: float | None = None

    def turn(self, now: float, seconds: float) -> bool:
        """Whether a new epoch begins."""
        if self.now is None or now - self.began < seconds:
            return False
        self.began, self.before, self.now = now, self.now, None
        return True


@dataclass
class Pace:
    """Of one stream. Times are in seconds of any one clock, sizes in bytes."""

    window: int = FIRST
    """Requests that may be under way now."""

    latency: float = 0.0
    """How long a reply takes of late, from its request; 0 before the first."""

    laden: float = 0.0
    """The same, but what was slow is forgotten SLOWLY: who is spared for being slow answers quickly meanwhile, and is
    still slow when all ask. One moment in which all that is under way is late makes little of it."""

    _new: int = 0
    """Replies that are still forgotten quickly: of a stream of whose line nothing was known."""
    _risen_at: float = float("-inf")
    _delivered: int = 0
    _rate: _Epochs = field(default_factory=_Epochs)
    _base: _Epochs = field(default_factory=_Epochs)
    _draining: bool = False

    def sent(self, now: float, under_way: int, full: bool | None = None) -> Mark:
        """A request goes out, and so many are under way with it. `full`: as many as may be, or waiting to be kept."""
        return Mark(now, self._delivered, under_way, under_way >= self.window if full is None else full)

    def came(self, mark: Mark, size: int, now: float) -> None:
        """Its reply is here."""
        self._delivered += size
        took = max(1e-4, now - mark.at)
        if self._base.turn(now, BASE_SECONDS):
            self._draining = True  # our own queue is in every latency: let it run dry to see the line's
        if self._draining and mark.under_way <= LEAST:
            self._draining = False
        if not self._draining:
            self._base.now = took if self._base.now is None else min(took, self._base.now)
        if 2 * size < CHUNK:
            return  # says nothing of the rate
        self.latency += (took - self.latency) * (QUICKLY if self.latency else 1.0)
        self._judge(took, mark.at, now)
        base = min(b for b in (self._base.now, self._base.before, took) if b is not None)
        if mark.full:  # else it is us who asked for no more: that says nothing against a higher rate
            self._rate.turn(now, max(RATE_SECONDS, 4 * base))
        rate = (self._delivered - mark.delivered) / took
        self._rate.now = rate if self._rate.now is None else max(rate, self._rate.now)
        best = max(self._rate.now, self._rate.before or 0.0)
        ahead = best * max(GAIN * base, base + SPARE_SECONDS) / CHUNK
        self.window = LEAST if self._draining else max(LEAST, min(MOST, round(ahead)))

    def _judge(self, took: float, asked_at: float, now: float) -> None:
        """What a reply says of `laden`. More than it only once for all that was under way together."""
        if not self.laden:
            self.laden, self._new = took, FEW
        elif took < self.laden:
            self.laden -= (self.laden - took) * (QUICKLY if self._new else SLOWLY)
        elif asked_at >= self._risen_at:
            self.laden += (min(took, LATE * self.laden) - self.laden) * QUICKLY
            self._risen_at = now
        self._new = max(0, self._new - 1)
