"""A token bucket, which bounds a rate and allows bursts. The time is an argument."""

from __future__ import annotations


class TokenBucket:
    """Gains `rate` tokens per second, up to `burst`. It is full at first."""

    __slots__ = ("_at", "burst", "rate", "tokens")

    def __init__(self, rate: float, burst: float, now: float):
        self.rate = rate
        self.burst = burst
        self.tokens = burst
        self._at = now

    def refill(self, now: float) -> None:
        """Add the tokens gained until `now`, in seconds of the caller's clock."""
        self.tokens = min(self.burst, self.tokens + max(0.0, now - self._at) * self.rate)
        self._at = now

    def charge(self, tokens: float) -> None:
        """Remove tokens. With more than there are, `tokens` is negative until the debt is paid."""
        self.tokens -= tokens
