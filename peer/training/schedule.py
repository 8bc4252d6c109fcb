"""The learning rate as a function of the swarm's tokens: in a replayable run the same for every peer of a round."""

from __future__ import annotations

import math

from protocol.spec import Schedule


def factor(schedule: Schedule, tokens: float) -> float:
    """Return the factor of `inner.lr` after `tokens` accepted tokens: in [0, 1].

    Warmup is linear from 0. `cosine` falls from 1 to min_ratio at total_tokens (Loshchilov and Hutter 2017). `wsd`
    stays at 1 and falls linearly to min_ratio over the last decay_fraction (Hu et al. 2024). Afterwards both stay at
    min_ratio.
    """
    if tokens < schedule.warmup_tokens:
        return max(0.0, tokens) / schedule.warmup_tokens
    if schedule.kind == "constant":
        return 1.0
    start = schedule.warmup_tokens
    if schedule.kind == "wsd":
        start = max(start, schedule.total_tokens * (1 - schedule.decay_fraction))
    done = 1.0 if schedule.total_tokens <= start else (tokens - start) / (schedule.total_tokens - start)
    done = min(1.0, max(0.0, done))
    if tokens < schedule.total_tokens and schedule.total_tokens <= start:
        done = 0.0  # nothing to decay over: full rate up to the end
    shape = 0.5 * (1 + math.cos(math.pi * done)) if schedule.kind == "cosine" else 1 - done
    return schedule.min_ratio + (1 - schedule.min_ratio) * shape


def replayable_factor(schedule: Schedule, accepted_tokens: int, target_tokens: int) -> float:
    """Return the factor of every step on a state whose chain has accepted `accepted_tokens`, in a replayable run.

    It is that in the middle of the round: a function of the chain and the spec, whose `target_tokens` these are.
    """
    return factor(schedule, accepted_tokens + target_tokens / 2)


def step_factor(
    schedule: Schedule, accepted_tokens: int, target_tokens: int, windows: float, usual_windows: int
) -> float:
    """Return the factor of a step within a round that began at `accepted_tokens` and ends `target_tokens` later.

    The peer's own windows estimate how far the swarm has come: `windows` since the state that it trains from, relative
    to `usual_windows` on the last one. Before there is one (0), the estimate is the round's middle, so that the first
    round does not train at a rate of 0. Windows beyond the round belong to the next one, and the estimate ends with it.
    """
    share = min(2.0, windows / usual_windows) if usual_windows else 0.5
    return factor(schedule, accepted_tokens + share * target_tokens)
