"""The same small search for every method's learning rate: factors of two, until the best is inside.

The best must have a worse neighbour on both sides, or the search has gone FARTHEST steps from where it began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

FARTHEST = 5


def missing(found: Mapping[int, float]) -> list[int]:
    """Return the exponents of 2 to try next, given the losses so far; empty when the search is over."""
    if not found:
        return [-1, 0, 1]
    best = min(found, key=lambda e: (found[e], abs(e)))
    return [e for e in (best - 1, best + 1) if e not in found and abs(e) <= FARTHEST]


def best(found: Mapping[int, float]) -> int:
    """Return the exponent with the least loss. Raises ValueError when every rate diverged."""
    chosen = min(found, key=lambda e: (found[e], abs(e)))
    if not math.isfinite(found[chosen]):
        raise ValueError("training diverged at every learning rate that was tried")
    return chosen
