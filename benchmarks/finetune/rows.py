"""The rows of the comparison, and the search of each one's learning rate, in a process of its own."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence import tuning
from benchmarks.finetune.base import BaseModel
from benchmarks.finetune.world import FineTuning, Tuning

WAYS = ("alone", "together", "together, A frozen")
BASE = BaseModel(160, 432, 3, 5, 1024, 96, steps=400, batch=32)
TUNING = Tuning(steps=180, batch=4, h=36, window=96)
QUICK = BaseModel(96, 256, 2, 4, 512, 96, steps=60, batch=16, every=8), Tuning(steps=12, batch=4, h=6, window=96)
Run = dict[str, Any]
FIRST_LR = {"whole": 4e-3, "adapter": 16e-3}
"""The first learning rate of a row's search."""


def sizes_of(*, quick: bool) -> tuple[BaseModel, Tuning]:
    """Return the sizes of the base model and of its fine-tuning."""
    return QUICK if quick else (BASE, TUNING)


def rows(sizes: Sequence[int]) -> list[tuple[str, str, int]]:
    """Return (what, way, peers) of each row, those that take longest first."""
    found = [(what, way, n) for n in sizes for what in FIRST_LR for way in WAYS if what == "adapter" or way in WAYS[:2]]
    return sorted(found, key=lambda row: -row[2])


def measure(
    row: tuple[str, str, int], folder: str, quick: bool, seeds: Sequence[int], commit: str | None, known: Sequence[Run]
) -> Iterator[Run]:
    """Yield the runs of a row: the search of its rate on the first seed, then the other seeds."""
    torch.set_num_threads(1)
    what, way, peers = row
    size, plan = sizes_of(quick=quick)
    base, texts = Path(folder) / "base", (Path(folder) / "conversations.jsonl", Path(folder) / "held-out.jsonl")
    made: dict[int, FineTuning] = {}

    def run(lr: float, seed: int) -> Run:
        if seed not in made:
            made.clear()
            where = Path(tempfile.mkdtemp(dir=folder))
            made[seed] = FineTuning(where, base, texts, size, plan, adapter=what == "adapter", seed=seed)
        world = made[seed]
        try:
            if way == "alone":
                out = world.alone(peers, lr)
            else:
                out = world.together(peers, lr, freeze_a=way == WAYS[2])
        except FloatingPointError:
            return said | {"seed": seed, "lr": lr, "loss": None, "bytes": 0}
        return said | {"seed": seed, "lr": lr, "loss": out.loss, "bytes": out.bytes}

    said: Run = {"what": what, "way": way, "peers": peers, "commit": commit}
    mine = [r for r in known if (r["what"], r["way"], r["peers"]) == row]
    first = FIRST_LR[what]
    found: dict[int, float] = {}
    for r in mine:
        if r["seed"] == seeds[0]:
            found[round(math.log2(r["lr"] / first))] = math.inf if r["loss"] is None else r["loss"]
    while todo := tuning.missing(found)[: 1 if quick else None]:
        for e in todo:
            made_run = run(first * 2.0**e, seeds[0])
            found[e] = math.inf if made_run["loss"] is None else made_run["loss"]
            yield made_run
        if quick:
            break
    lr = first * 2.0 ** tuning.best(found)
    for seed in seeds[1:]:
        if not any(r["seed"] == seed and r["lr"] == lr for r in mine):
            yield run(lr, seed)


def measured_row(*given: Any) -> list[Run]:
    """Return the runs of a row: see `measure`."""
    return list(measure(*given))
