"""Bytes into seconds: what a training takes over links of one speed, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

RTT = 0.1
"""Seconds."""
LINKS = (20, 100, 1000)
"""Mbit/s, of each peer's uplink."""


def seconds(steps: float, step: float, up: float, exchanges: float, mbit: float) -> float:
    """Return the seconds of `steps` inner steps of `step` seconds, with `up` bytes sent in `exchanges` without overlap.

    An exchange costs its bytes and two round trips. Nothing overlaps: kind to those who cannot.
    """
    return steps * step + up * 8 / (mbit * 1e6) + exchanges * 2 * RTT


def crossing(curve: Sequence[Sequence[float]], target: float) -> list[float] | None:
    """[tokens, payload, up, exchanges] where the curve first falls to the target, by a line between its points."""
    before: Sequence[float] | None = None
    for point in curve:
        if point[1] <= target:
            if before is None:
                return [point[0], *point[2:]]
            share = (before[1] - target) / (before[1] - point[1])
            return [b + share * (p - b) for b, p in zip([before[0], *before[2:]], [point[0], *point[2:]], strict=True)]
        before = point
    return None
