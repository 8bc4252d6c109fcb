"""From rows to results: the search for each row's learning rate, then its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.convergence import tuning
from benchmarks.convergence.job import Job, Result
from benchmarks.convergence.setting import PROFILES
from benchmarks.convergence.studies import Row

Run = Callable[[Sequence[Job]], Mapping[Job, Result]]
"""The results of jobs: a pool of processes, or a test's own."""

TUNING_SEED = 0


@dataclass(frozen=True)
class Measured:
    """A row's results. `tried`: the loss at each learning rate of the search; `results` by seed, at the best one."""

    row: Row
    lr: float
    tried: dict[float, float]
    results: dict[int, Result]

    @property
    def losses(self) -> list[float]:
        return [r.loss for r in self.results.values()]

    @property
    def loss(self) -> float:
        """The mean over seeds, in nats a token."""
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def payload(self) -> float:
        """Bytes of what one peer says, over the whole training."""
        return self.row.scale * statistics.fmean(r.payload for r in self.results.values())

    @property
    def up(self) -> float:
        """Bytes that leave one peer, over the whole training."""
        return self.row.scale * statistics.fmean(r.up for r in self.results.values())

    @property
    def exchanges(self) -> float:
        return statistics.fmean(r.exchanges for r in self.results.values())

    def paired(self, other: Measured) -> tuple[float, float | None]:
        """Mean over common seeds of loss / other's loss - 1, and its standard error."""
        seeds = sorted(self.results.keys() & other.results.keys())
        ratios = [self.results[s].loss / other.results[s].loss - 1 for s in seeds]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
        return statistics.fmean(ratios), error


def tuned(rows: Iterable[Row], profile: str, seeds: Sequence[int], steps: int | None, run: Run) -> list[Measured]:
    """Run each row at its own best learning rate: searched on one seed, then run on all.

    Equal trainings are run once.
    """
    rows = list(rows)
    begin = PROFILES[profile].lr
    found: list[dict[int, float]] = [{} for _ in rows]
    while True:
        wanted = [
            (i, e, _job(row, profile, begin * 2.0**e, TUNING_SEED, steps))
            for i, row in enumerate(rows)
            for e in tuning.missing(found[i])
        ]
        if not wanted:
            break
        results = run([job for _, _, job in wanted])
        for i, e, job in wanted:
            found[i][e] = results[job].loss
    rates = [begin * 2.0 ** tuning.best(f) for f in found]
    tried = [{begin * 2.0**e: loss for e, loss in sorted(f.items())} for f in found]
    return _at(rows, rates, tried, profile, seeds, steps, run)


def at_rate(
    rows: Iterable[Row], lr: float, profile: str, seeds: Sequence[int], steps: int | None, run: Run
) -> list[Measured]:
    """Run all rows at one learning rate, without a search."""
    rows = list(rows)
    return _at(rows, [lr] * len(rows), [{} for _ in rows], profile, seeds, steps, run)


def _at(rows, rates, tried, profile, seeds, steps, run: Run) -> list[Measured]:
    jobs = {(i, s): _job(row, profile, rates[i], s, steps) for i, row in enumerate(rows) for s in seeds}
    results = run(list(jobs.values()))
    return [Measured(row, rates[i], tried[i], {s: results[jobs[i, s]] for s in seeds}) for i, row in enumerate(rows)]


def _job(row: Row, profile: str, lr: float, seed: int, steps: int | None) -> Job:
    return Job(profile, row.method, row.options, lr, seed, steps)
