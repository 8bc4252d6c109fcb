"""Jobs on several processes, each on one thread; what was computed before is taken from its file."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from benchmarks.convergence import job as jobs
from benchmarks.convergence.job import Job, Result


def results(wanted: Sequence[Job], folder: Path, *, processes: int, compiled: bool = False) -> dict[Job, Result]:
    """Run all jobs in any order; return their results. Progress goes to stderr, a line a job."""
    found = {j.key: r for j in wanted if (r := jobs.kept(folder, j))}
    missing = {j.key: j for j in wanted if j.key not in found}
    if missing:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin) as pool:
            futures = {pool.submit(jobs.run, j, compiled=compiled): j for j in missing.values()}
            for n, future in enumerate(as_completed(futures), 1):
                result = future.result()
                jobs.keep(folder, result)
                found[result.job.key] = result
                told = f"{n}/{len(missing)}  {result.job.method} {dict(result.job.options)} lr {result.job.lr:g}"
                print(f"{told} seed {result.job.seed}: {result.loss:.4f}  ({result.seconds:.0f} s)", file=sys.stderr)
    return {j: found[j.key] for j in wanted}


def _begin() -> None:
    torch.set_num_threads(1)
