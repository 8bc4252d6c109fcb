"""When the next round is due: from the swarm's progress and speed, or from the duration of past rounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.round_observations import TypicalDurations


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """The progress that one training peer reports.

    `tokens` of this round, `tokens_per_second`, and the age of the report in seconds.
    """

    tokens: int
    tokens_per_second: float
    seconds_since: float


def next_round_seconds(
    work: Iterable[PeerProgress],
    *,
    target_tokens: int,
    max_seconds: float,
    elapsed: float | None,
    announced: float | None,
    typical: TypicalDurations | None,
) -> float | None:
    """Return the seconds until the round that is being trained is decided; 0 if it is due, None if unknown.

    `elapsed` and `announced` are the seconds since it began, and since its first update was announced (None: unknown,
    not yet).
    """
    after = typical.after if typical is not None else 0.0
    if announced is not None:
        return max(0.0, after - announced) if typical is not None else None
    done, rate = 0.0, 0.0
    for w in work:
        done += w.tokens + w.tokens_per_second * w.seconds_since
        rate += w.tokens_per_second
    if rate > 0:
        left = max(0.0, target_tokens - done) / rate
        if elapsed is not None:
            left = min(left, max(0.0, max_seconds - elapsed))
        return left + after
    if typical is not None and elapsed is not None:
        return max(0.0, typical.whole - elapsed)
    return None
