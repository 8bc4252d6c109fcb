"""How long training stands still for a save of the trainer's state: written beside the training, and written at once.

Beside it, steps go on while another thread writes: how many, and how much longer each takes. Everything as a peer does
it, but for the pause before writing. The rival is the trainer itself, writing at once as it does when it stops.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  device, megabytes (of what is saved)
  layouts: a list, each with
    parallel, parameters; still_seconds (for a save beside), begin_seconds (the copy, of those), at_once_seconds, ratio
    write_seconds; step_seconds, step_seconds_beside (while it is written)
  goals: a list of goal, value, met
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.trainer import Size, trainer_of
from peer.training.trainer import Trainer

SIZE = Size("20M", 512, 1376, 5, 8, 4096, 128, 2)
QUICK = Size("5M", 320, 864, 4, 5, 2048, 128, 2)


def step(trainer: Trainer) -> float:
    """Seconds of one."""
    began = time.perf_counter()
    trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))
    return time.perf_counter() - began


def measured(size: Size, device: str, threads: int, parallel: str, turns: int) -> dict[str, Any]:
    """One layout: medians over turns, of which each saves once beside the training and once at once."""
    still, begin, write, once, alone, beside = ([] for _ in range(6))
    with trainer_of(size, device, threads, "muon", parallel) as (trainer, _):
        saving = trainer.checkpointer
        for turn in range(turns + 1):
            step(trainer)
            steps = [step(trainer) for _ in range(2)]
            saving.due = 0.0  # more often than a peer would
            began = time.perf_counter()
            saving.start()
            stood = time.perf_counter() - began
            kept = stood
            began = time.perf_counter()
            saving.step(now=True)
            stood += time.perf_counter() - began
            during = []
            while not saving.is_idle:
                during.append(step(trainer))
                before = time.perf_counter()
                saving.step()
                stood += time.perf_counter() - before
            took = time.perf_counter() - began
            trainer.checkpointer.save_now()  # warm caches for both
            began = time.perf_counter()
            trainer.checkpointer.save_now()
            seconds = time.perf_counter() - began
            if turn:  # the first warms up
                still.append(stood)
                begin.append(kept)
                write.append(took)
                once.append(seconds)
                alone += steps
                beside += during[:-1] or during
        parameters = trainer.spec.model.layout.numel
        megabytes = sum(p.stat().st_size for p in trainer.folder.folder.glob("trainer-*")) / 2**20
    m = statistics.median
    return {
        "parallel": parallel, "parameters": parameters, "megabytes": megabytes,
        "still_seconds": m(still), "begin_seconds": m(begin), "at_once_seconds": m(once), "ratio": m(still) / m(once),
        "write_seconds": m(write), "step_seconds": m(alone), "step_seconds_beside": m(beside),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save. Return 1 when a goal is missed."""
    parser = report.command_line(__doc__ or "", "saving")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--threads", type=int, default=1, help="of the trainer, on a CPU (default 1)")
    parser.add_argument("--parallel", nargs="+", default=["dp=1", "fsdp=2"], help="layouts (default dp=1 fsdp=2)")
    options = parser.parse_args(arguments)
    size, turns = (QUICK, 3) if options.quick else (SIZE, 5)
    provenance = report.provenance("saving", arguments)
    found = [measured(size, options.device, options.threads, p, turns) for p in options.parallel]
    results = provenance | {
        "device": options.device,
        "layouts": found,
        "goals": [
            report.goal(f"{f['parallel']}: training stands still for less than beside a save at once", f["ratio"],
                        f["ratio"] < 1) for f in found
        ],
    }  # fmt: skip
    return report.ended(results, options, show(results))


def show(results: Mapping[str, Any]) -> str:
    """Return the table."""
    columns = ("layout", "parameters", "saved MiB", "stands still ms", "of that copying", "at once ms", "ratio",
               "writing ms", "a step ms", "beside ms")  # fmt: skip
    rows = [
        [f["parallel"], f"{f['parameters']:,}", round(f["megabytes"])]
        + [f"{1e3 * f[k]:,.0f}" for k in ("still_seconds", "begin_seconds", "at_once_seconds")]
        + [f"{f['ratio']:.3f}"]
        + [f"{1e3 * f[k]:,.0f}" for k in ("write_seconds", "step_seconds", "step_seconds_beside")]
        for f in results["layouts"]
    ]
    m = results["machine"]
    about = f"{results['device']}, {m['cores']} cores at load {m['load']}, torch {m['torch']}"
    return f"{about}\n\n{report.table(columns, rows)}"


if __name__ == "__main__":
    sys.exit(main())
