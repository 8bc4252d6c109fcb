"""The course of rounds, for charts: durations of the phases, training peers, bytes; thinned. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.round_observations import RoundObservation


@dataclass(frozen=True, slots=True)
class RoundCharts:
    """Columns of equal length, one entry for one round or for the mean of several; None where nothing was observed.

    `times` are unix seconds, `train`, `exchange` and `commit` seconds, `peers` the training peers, `sent` and
    `received` bytes a round.
    """

    times: list[float]
    train: list[float | None]
    exchange: list[float | None]
    commit: list[float | None]
    peers: list[float | None]
    sent: list[float | None]
    received: list[float | None]


def round_charts(seen: Sequence[RoundObservation], limit: int = 400) -> RoundCharts:
    """Return charts of at most `limit` entries, oldest first."""
    step = max(1, math.ceil(len(seen) / limit))
    groups = [seen[i : i + step] for i in range(0, len(seen), step)]
    return RoundCharts(
        [g[-1].certified for g in groups],
        [_mean(s.train for s in g) for g in groups],
        [_mean(s.exchange for s in g) for g in groups],
        [_mean(s.commit for s in g) for g in groups],
        [_mean(s.training for s in g) for g in groups],
        [_mean(s.sent for s in g) for g in groups],
        [_mean(s.received for s in g) for g in groups],
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
