"""The rows of the comparison, and the search of each one's learning rate, in a process of its own."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence import tuning
from benchmarks.finetune.base import BaseModel
from benchmarks.finetune.world import FineTuning, Tuning

BASE = BaseModel(160, 432, 3, 5, 1024, 96, steps=240, batch=16)
TUNING = Tuning(steps=144, batch=2, h=36, window=96)
QUICK = BaseModel(96, 256, 2, 4, 512, 96, steps=60, batch=16, every=8), Tuning(steps=12, batch=4, h=6, window=96)
Run = dict[str, Any]

KINDS = (
    ("whole", "alone", "muon"),
    ("whole", "together", "muon"),
    ("whole", "together, Nesterov", "muon"),
    ("whole", "together, uncompressed", "muon"),
    ("whole", "together, 12 steps a round", "muon"),
    ("whole", "alone, 8 windows a step", "muon"),
    ("whole", "together, 8 windows a step", "muon"),
    ("adapter", "alone", "adamw"),
    ("adapter", "alone", "muon"),
    ("adapter", "together", "adamw"),
    ("adapter", "together", "muon"),
    ("adapter", "together, Nesterov", "adamw"),
    ("adapter", "together, A frozen", "adamw"),
    ("adapter", "together, int8 base", "adamw"),
    ("adapter", "together, nf4 base", "adamw"),
)
"""The trained part of the model, the way of training, and the inner optimizer."""
LARGE_BATCH = ", 8 windows a step"
"""The end of the ways with four times the usual batch."""

LARGER = (
    ("whole", "alone", "muon"),
    ("whole", "together", "muon"),
    ("adapter", "alone", "adamw"),
    ("adapter", "alone", "muon"),
    ("adapter", "together", "adamw"),
    ("adapter", "together, Nesterov", "adamw"),
    ("adapter", "together, A frozen", "adamw"),
)
"""Those measured with more peers than the fewest: the written optimizers, and the outer steps."""

LONGER = (("adapter", "adamw", 3), ("adapter", "adamw", 9), ("whole", "muon", 9))
"""The trained part, the inner optimizer, and how many times the usual steps: measured with the fewest peers."""

LARGER_AND_LONGER = (("adapter", "adamw", 9),)
"""The same, measured with more peers."""

FIRST_LR = {("whole", "muon"): 4e-3, ("adapter", "adamw"): 8e-3, ("adapter", "muon"): 16e-3}
"""The first learning rate of a row's search."""


@dataclass(frozen=True, slots=True)
class Row:
    """One of KINDS, the number of peers, and the steps of each."""

    what: str
    way: str
    optimizer: str
    peers: int
    steps: int = TUNING.steps

    def holds(self, run: Run) -> bool:
        """Return whether a run is of this row."""
        return asdict(self).items() <= run.items()


def sizes_of(*, quick: bool) -> tuple[BaseModel, Tuning]:
    """Return the sizes of the base model and of its fine-tuning."""
    return QUICK if quick else (BASE, TUNING)


def rows(sizes: Sequence[int]) -> list[Row]:
    """Return the rows, the smallest swarm first, then those with more steps."""
    least, *others = sorted(sizes)
    longer = [
        Row(what, way, optimizer, n, times * TUNING.steps)
        for n, kinds in [(least, LONGER), *((n, LARGER_AND_LONGER) for n in others)]
        for what, optimizer, times in kinds
        for way in ("alone", "together")
    ]
    larger = [Row(*kind, n) for n in others for kind in LARGER]
    return [*(Row(*kind, least) for kind in KINDS), *larger, *longer]


def measure(
    row: Row, folder: str, quick: bool, seeds: Sequence[int], commit: str | None, known: Sequence[Run]
) -> Iterator[Run]:
    """Yield the runs of a row: the search of its rate on the first seed, then the other seeds."""
    torch.set_num_threads(1)
    size, plan = sizes_of(quick=quick)
    plan = replace(plan, steps=plan.steps * row.steps // TUNING.steps)
    if "12 steps" in row.way:
        plan = replace(plan, h=12)
    if row.way.endswith(LARGE_BATCH):
        plan = replace(plan, batch=8)
    base, texts = Path(folder) / "base", (Path(folder) / "conversations.jsonl", Path(folder) / "held-out.jsonl")
    worlds: dict[int, FineTuning] = {}

    def run(lr: float, seed: int) -> Run:
        if seed not in worlds:
            where = Path(tempfile.mkdtemp(dir=folder))
            worlds[seed] = FineTuning(
                where, base, texts, size, plan, adapter=row.what == "adapter", optimizer=row.optimizer, seed=seed,
                outer="nesterov" if "Nesterov" in row.way else "plain",
                codec="none" if "uncompressed" in row.way else "sign",
                dtype=next((d for d in ("int8", "nf4") if d in row.way), "bfloat16"),
            )  # fmt: skip
        made: Run = {**asdict(row), "seed": seed, "lr": lr, "commit": commit, "loss": None, "bytes": 0}
        try:
            if row.way.startswith("alone"):
                out = worlds[seed].alone(row.peers, lr)
            else:
                out = worlds[seed].together(row.peers, lr, freeze_a="A frozen" in row.way)
        except FloatingPointError:
            return made
        return made | {"loss": out.loss, "bytes": out.bytes}

    mine = [r for r in known if row.holds(r)]
    first = FIRST_LR[row.what, row.optimizer]
    found = {round(math.log2(r["lr"] / first)): _loss(r) for r in mine if r["seed"] == seeds[0]}
    while todo := tuning.missing(found):
        for e in [0] if quick else todo:
            made = run(first * 2.0**e, seeds[0])
            found[e] = _loss(made)
            yield made
        if quick:
            return
    lr = first * 2.0 ** tuning.best(found)
    for seed in seeds[1:]:
        if not any(r["seed"] == seed and r["lr"] == lr for r in mine):
            yield run(lr, seed)


def _loss(run: Run) -> float:
    return math.inf if run["loss"] is None else run["loss"]


def measured_row(*given: Any) -> list[Run]:
    """Return the runs of a row: see `measure`."""
    return list(measure(*given))
