"""How training goes, for people and for scheduling: late loss and tokens per second. The time is an argument."""

from __future__ import annotations

from collections import deque

SPAN = 10.0
"""Seconds that the rate looks back: a stall shows within this time."""

LATE_STEPS = 20


class Pace:
    """Fed with each inner step. `span_loss` is the mean since the last `new_span`."""

    def __init__(self, now: float):
        self._began = now
        self._done: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self._losses: deque[float] = deque(maxlen=LATE_STEPS)
        self._sum = 0.0
        self._steps = 0
        self.span_loss = 0.0

    def step(self, now: float, tokens: int, loss: float) -> None:
        self._done.append((now, tokens))
        self._tokens += tokens
        self._forget(now)
        self._losses.append(loss)
        self._sum += loss
        self._steps += 1
        self.span_loss = self._sum / self._steps

    def new_span(self) -> None:
        """`span_loss` starts anew (and keeps its value until the next step)."""
        self._sum, self._steps = 0.0, 0

    @property
    def late_loss(self) -> float:
        """Mean of the last steps; 0 before the first."""
        return sum(self._losses) / len(self._losses) if self._losses else 0.0

    def tokens_per_second(self, now: float) -> float:
        """Over the last SPAN seconds, or since the start when that is less."""
        self._forget(now)
        return self._tokens / max(0.1, min(SPAN, now - self._began))

    def _forget(self, now: float) -> None:
        while self._done and self._done[0][0] < now - SPAN:
            self._tokens -= self._done.popleft()[1]
