"""When the next round is due: from how far the swarm is and how fast it trains, or from how long rounds take. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.round_observations import TypicalDurations


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """One training peer, by its own words: tokens done in this round, tokens a second, and how old these words are."""

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
    """Seconds until the round that is being trained is decided; 0 when it is due, None when nothing tells.

    elapsed, announced: seconds since it began, and since its first update was announced (None: unknown, not yet).
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
