"""The run so far, for charts: loss by tokens, tokens per second by time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class RoundPoint:
    """A round: its number, tokens accepted up to its end (voided ones also), and its loss.

    `seen_at` is unix seconds; None: not seen at first hand.
    """

    round: int
    tokens: int
    loss: float
    seen_at: float | None


@dataclass(frozen=True, slots=True)
class Charts:
    """Columns for charts, thinned to what a screen can show.

    `rounds`, `tokens`, `loss` and `seen` (unix seconds, None: not at first hand) have equal lengths, and so have
    `times` and `rates` (tokens a second).
    """

    rounds: list[int]
    tokens: list[int]
    loss: list[float]
    seen: list[float | None]
    times: list[float]
    rates: list[float]


class RoundHistory:
    """All final rounds, 32 bytes each."""

    def __init__(self):
        self._round, self._tokens = array("q"), array("q")
        self._loss, self._seen = array("d"), array("d")
        self._voided = 0

    def append(self, round_: int, tokens: int, voided: int, loss: float, seen_at: float | None) -> None:
        """Add the next final round: `tokens` are its own, `voided` those of earlier ones that it voids."""
        self._round.append(round_)
        self._tokens.append(self.tokens + tokens)
        self._voided += voided
        self._loss.append(loss)
        self._seen.append(math.nan if seen_at is None else seen_at)

    @property
    def tokens(self) -> int:
        """Tokens accepted in final rounds, voided ones also."""
        return self._tokens[-1] if self._tokens else 0

    @property
    def progress(self) -> int:
        """Tokens accepted in final rounds that no record voids."""
        return self.tokens - self._voided

    @property
    def first(self) -> RoundPoint | None:
        """The first final round; None if there is none."""
        if not len(self):
            return None
        seen = self._seen[0]
        return RoundPoint(self._round[0], self._tokens[0], self._loss[0], None if math.isnan(seen) else seen)

    def __len__(self) -> int:
        return len(self._round)

    def points(self, last: int | None = None) -> list[RoundPoint]:
        """Return the last `last` final rounds (None: all), in order."""
        start = 0 if last is None else max(0, len(self) - last)
        return [
            RoundPoint(r, t, x, None if math.isnan(s) else s)
            for r, t, x, s in zip(
                self._round[start:], self._tokens[start:], self._loss[start:], self._seen[start:], strict=True
            )
        ]


def charts(points: Sequence[RoundPoint], limit: int = 600) -> Charts:
    """Return charts of at most `limit` points; neighbours are merged, their loss is the mean weighted by tokens."""
    step = max(1, math.ceil(len(points) / limit))
    rounds: list[int] = []
    tokens: list[int] = []
    loss: list[float] = []
    seen_at: list[float | None] = []
    times: list[float] = []
    rates: list[float] = []
    before = 0
    for i in range(0, len(points), step):
        group = points[i : i + step]
        weights = [p.tokens - q for p, q in zip(group, [before, *(p.tokens for p in group[:-1])], strict=True)]
        total = sum(weights)
        rounds.append(group[-1].round)
        tokens.append(group[-1].tokens)
        seen_at.append(group[-1].seen_at)
        loss.append(sum(p.loss * w for p, w in zip(group, weights, strict=True)) / total if total else group[-1].loss)
        before = group[-1].tokens
    seen = [p for p in points if p.seen_at is not None]
    for a, b in pairwise(seen[::step]):
        elapsed = (b.seen_at or 0.0) - (a.seen_at or 0.0)
        if elapsed > 0:
            times.append(b.seen_at or 0.0)
            rates.append((b.tokens - a.tokens) / elapsed)
    return Charts(rounds, tokens, loss, seen_at, times, rates)


RATE_ROUNDS = 8


def tokens_per_second(points: Sequence[RoundPoint], now: float) -> float:
    """Return the rate of accepted tokens over the last RATE_ROUNDS rounds seen at first hand.

    It falls when no more rounds come. `now` is unix seconds.
    """
    seen = [p for p in points if p.seen_at is not None][-RATE_ROUNDS - 1 :]
    if len(seen) < 2:
        return 0.0
    first, last = seen[0].seen_at or 0.0, seen[-1].seen_at or 0.0
    typical = (last - first) / (len(seen) - 1)
    # A round in progress changes nothing; an overdue one lowers the rate.
    elapsed = max(last, now - 1.5 * typical) - first
    return (seen[-1].tokens - seen[0].tokens) / elapsed if elapsed > 0 else 0.0
