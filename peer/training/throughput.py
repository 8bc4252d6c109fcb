"""Training figures for people and for scheduling: recent loss and tokens per second. The time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RATE_SECONDS = 10.0
"""Seconds over which the rate is measured: a stall shows within this time."""

RECENT_STEPS = 20


@dataclass(frozen=True, slots=True)
class MeanLoss:
    """The mean loss in nats per token of consecutive steps; 0 before the first."""

    mean: float = 0.0
    _sum: float = 0.0
    _steps: int = 0

    def add(self, loss: float) -> MeanLoss:
        """Return the mean with one more step."""
        total, steps = self._sum + loss, self._steps + 1
        return MeanLoss(total / steps, total, steps)

    def restarted(self) -> MeanLoss:
        """Return a mean that starts from scratch at the next step; until then it keeps its value."""
        return MeanLoss(self.mean)


class ThroughputMeter:
    """Tokens per second and the mean loss of the last RECENT_STEPS steps."""

    def __init__(self, now: float):
        self._began = now
        self._steps: deque[tuple[float, int]] = deque()
        """(time, tokens) of each step in the last RATE_SECONDS."""
        self._tokens = 0
        self._losses: deque[float] = deque(maxlen=RECENT_STEPS)

    def step(self, now: float, tokens: int, loss: float) -> None:
        """Count one inner step that ended at `now` (seconds, monotonic)."""
        self._steps.append((now, tokens))
        self._tokens += tokens
        self._forget(now)
        self._losses.append(loss)

    @property
    def recent_loss(self) -> float:
        """Mean loss of the last RECENT_STEPS steps in nats per token; 0 before the first."""
        return sum(self._losses) / len(self._losses) if self._losses else 0.0

    def tokens_per_second(self, now: float) -> float:
        """Return the rate over the last RATE_SECONDS, or since the start when that is less."""
        self._forget(now)
        return self._tokens / max(0.1, min(RATE_SECONDS, now - self._began))

    def _forget(self, now: float) -> None:
        while self._steps and self._steps[0][0] < now - RATE_SECONDS:
            self._tokens -= self._steps.popleft()[1]
