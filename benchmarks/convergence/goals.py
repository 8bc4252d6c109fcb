"""The goals of the comparison, checked against the measured rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks.convergence import tables
from benchmarks.convergence.measure import Measured
from benchmarks.convergence.setting import Profile

WITHIN = 0.01
WITHIN_OF_MANY = 0.02
MANY = 16
"""Peers, from which on the wider goal holds."""
FEWER_THAN_BF16 = 500.0
LEAST_SEEDS = 3
"""Fewer can miss a goal and not meet it: they may differ by as much by chance."""
MBIT = 100.0


def judged(found: Sequence[Measured], profile: Profile, parameters: int) -> list[dict[str, Any]]:
    """Return the goals, from the main comparison (the reference first): see `report.goal`."""
    ours = [m for m in found if m.row.method == "cairn"]
    muon = next((m for m in found if m.row.method == "synchronous" and _muon(m)), None)
    return [
        _as_good([m for m in ours if _muon(m)], muon, "data-parallel Muon", profile, parameters),
        _as_good(ours, found[0], "data-parallel AdamW", profile, parameters),
    ]


def gap(found: Sequence[Measured], profile: Profile, parameters: int) -> dict[str, Any]:
    """Return the goal of the study of that name, whose first row is data-parallel Muon's."""
    return _as_good([m for m in found if m.row.method == "cairn"], found[0], "data-parallel Muon", profile, parameters)


def target_loss(ours: Measured, reference: Measured) -> float:
    """Return a loss that both curves reach before their end: the worse of their last points, plus 1%."""
    last = [next(iter(m.results.values())).curve[-1][1] for m in (ours, reference)]
    return 1.01 * max(last)


def _muon(m: Measured) -> bool:
    """Hidden matrices are stepped by Muon, on the peers or in data-parallel training."""
    return "muon" in (m.row.options.get("inner"), m.row.options.get("optimizer"))


def _as_good(
    ours: Sequence[Measured], rival: Measured | None, name: str, profile: Profile, parameters: int
) -> dict[str, Any]:
    within = WITHIN_OF_MANY if profile.peers >= MANY else WITHIN
    text = f"loss at most {within:+.0%} of {name}'s, at {FEWER_THAN_BF16:g} times fewer bytes than its bf16 gradients"
    cheap = [m for m in ours if (tables.fewer(m, profile, parameters) or 0) >= FEWER_THAN_BF16]
    if rival is None or not cheap:
        return report.goal(text, None, None)
    best = min(cheap, key=lambda m: m.loss)
    ratio, error = best.paired(rival)
    spread = f" +- {error:.2%}" if error else ""
    times = tables.fewer(best, profile, parameters)
    seeds = len(best.results.keys() & rival.results.keys())
    value = f"{ratio:+.2%}{spread} at {times:,.0f}x ({best.row.label}), {seeds} seed{'s' * (seeds != 1)}"
    return report.goal(text, value, False if ratio > within else True if seeds >= LEAST_SEEDS else None)
