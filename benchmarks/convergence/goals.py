"""The goals of the comparison, checked against the measured rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.convergence import links, tables
from benchmarks.convergence.measure import Measured
from benchmarks.convergence.setting import Profile

WITHIN = 0.01
FEWER_THAN_BF16 = 500.0
FEWER_THAN_DILOCO = 50.0
SOONER = 20.0
MBIT = 100.0


@dataclass(frozen=True)
class Goal:
    """`found` in words; `met` is None when a row that it needs was not measured."""

    what: str
    wanted: str
    found: str
    met: bool | None


def judged(found: Sequence[Measured], profile: Profile, parameters: int, waiting: Mapping[str, float]) -> list[Goal]:
    """Return the goals, from the main comparison (the reference first)."""
    reference = found[0]
    ours = [m for m in found if m.row.method == "cairn"]
    diloco = [m for m in found if m.row.method == "diloco" and m.row.options.get("h") == 30 and not _muon(m)]
    parallel_muon = next((m for m in found if m.row.method == "synchronous" and _muon(m)), None)
    return [
        _as_good(ours, reference, profile, parameters),
        _as_good([m for m in ours if _muon(m)], parallel_muon, profile, parameters),
        _ahead_of_diloco(ours, min(diloco, key=lambda m: m.loss, default=None)),
        _sooner(ours, reference, _row(found, "hivemind Optimizer, fp16"), profile, waiting),
    ]


def target_loss(ours: Measured, reference: Measured) -> float:
    """Return a loss that both curves reach before their end: the worse of their last points, plus 1%."""
    last = [next(iter(m.results.values())).curve[-1][1] for m in (ours, reference)]
    return 1.01 * max(last)


def _row(found: Sequence[Measured], label: str) -> Measured | None:
    return next((m for m in found if m.row.label == label), None)


def _muon(m: Measured) -> bool:
    """Hidden matrices are stepped by Muon, on the peers or in data-parallel training."""
    return "muon" in (m.row.options.get("inner"), m.row.options.get("optimizer"))


def _as_good(ours: Sequence[Measured], reference: Measured | None, profile: Profile, parameters: int) -> Goal:
    what = "validation loss against {}, at 500 times fewer bytes than its gradients"
    wanted = f"at most {WITHIN:+.0%}"
    if reference is None:
        return Goal(what.format("data-parallel Muon"), wanted, "data-parallel Muon was not run", None)
    what = what.format(reference.row.label)
    cheap = [m for m in ours if (tables.fewer(m, profile, parameters) or 0) >= FEWER_THAN_BF16]
    if not cheap:
        return Goal(what, wanted, "no row of so few bytes", None)
    best = min(cheap, key=lambda m: m.loss)
    ratio, error = best.paired(reference)
    spread = f" +- {error:.2%}" if error else ""
    times = tables.fewer(best, profile, parameters)
    return Goal(what, wanted, f"{ratio:+.2%}{spread} at {times:,.0f}x ({best.row.label})", ratio <= WITHIN)


def _ahead_of_diloco(ours: Sequence[Measured], diloco: Measured | None) -> Goal:
    what = "validation loss against DiLoCo in fp32 (H 30, its better outer step), at 50 times fewer bytes than it sends"
    if diloco is None:
        return Goal(what, "less", "DiLoCo was not run", None)
    cheap = [m for m in ours if diloco.payload / m.payload >= FEWER_THAN_DILOCO]
    if not cheap:
        return Goal(what, "less", "no row of so few bytes", False)
    best = min(cheap, key=lambda m: m.loss)
    ratio, _ = best.paired(diloco)
    return Goal(what, "less", f"{ratio:+.2%} at {diloco.payload / best.payload:,.0f}x ({best.row.label})", ratio < 0)


def _sooner(
    ours: Sequence[Measured],
    reference: Measured,
    hivemind: Measured | None,
    profile: Profile,
    waiting: Mapping[str, float],
) -> Goal:
    what = f"time to one loss at {MBIT:g} Mbit/s, against hivemind's Optimizer (fp16) with its measured waiting"
    wanted = f"at least {SOONER:g}x sooner"
    if hivemind is None or hivemind.row.label not in waiting:
        return Goal(what, wanted, "hivemind's waiting was not measured (benchmarks.convergence.rival_hivemind)", None)
    best = min(ours, key=lambda m: m.loss)
    target = target_loss(best, reference)
    step = tables.compute_seconds(reference, profile)
    took = []
    for m in (best, hivemind):
        at = links.crossing(next(iter(m.results.values())).curve, target)
        if at is None:
            return Goal(what, wanted, f"{m.row.label} does not reach {target:.3f}", None)
        tokens, _, up, exchanges = at
        wait = waiting.get(m.row.label, 0.0)
        took.append(links.seconds(tokens / profile.step_tokens, step, up * m.row.scale, exchanges, MBIT, wait))
    times = took[1] / took[0]
    told = f"{times:.0f}x: {took[0]:.0f} s ({best.row.label}), {took[1]:.0f} s (hivemind), to {target:.3f}"
    return Goal(what, wanted, told, times >= SOONER)
