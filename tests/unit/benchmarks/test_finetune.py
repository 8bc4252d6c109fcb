"""The benchmark of fine-tuning: its rows, its goals, its conversations, and runs that are small."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.finetune.__main__ import best, goals, show, to_alone
from benchmarks.finetune.base import BaseModel, make_base
from benchmarks.finetune.chat import conversations, write_conversations
from benchmarks.finetune.rows import KINDS, LARGER, LARGER_AND_LONGER, LONGER, TUNING, Row, rows
from benchmarks.finetune.world import FineTuning, Tuning
from protocol.spec import TRAINED


def run(way: str, lr: float, seed: int, loss: float | None, size: int = 1000, optimizer: str = "adamw") -> dict:
    row = Row("adapter", way, optimizer, 4)
    return {**asdict(row), "seed": seed, "lr": lr, "loss": loss, "bytes": size, "commit": None}


TOGETHER = Row("adapter", "together", "adamw", 4)
RUNS = [
    run("alone", 0.1, 1, 2.0, 600_000),
    run("alone", 0.2, 1, 2.5, 600_000),
    run("alone", 0.1, 2, 2.0, 600_000),
    run("alone", 0.1, 1, 2.2, 600_000, "muon"),
    run("together", 0.1, 1, None),
    run("together", 0.2, 1, 2.02),
    run("together", 0.2, 2, 2.06),
    run("together", 0.2, 1, 2.03, optimizer="muon"),
]


def test_a_row_is_told_at_its_best_rate_and_a_rate_that_diverged_is_not_it():
    assert [r["lr"] for r in best(RUNS, Row("adapter", "alone", "adamw", 4))] == [0.1, 0.1]
    assert [r["loss"] for r in best(RUNS, TOGETHER)] == [2.02, 2.06]
    assert to_alone(RUNS, TOGETHER) == pytest.approx([0.01, 0.03]), "against the better optimizer"
    longer = replace(TOGETHER, steps=3 * TUNING.steps)
    assert best([asdict(longer) | {"loss": 1.9, "seed": 1, "lr": 0.1}, *RUNS], longer)[0]["loss"] == 1.9
    assert to_alone(RUNS, longer) == [], "only rows of as many steps are compared"


def test_goals_compare_with_one_process_and_without_runs_nothing_is_measured():
    results = {"runs": RUNS, "sizes": [4]}
    assert [g["met"] for g in goals(results)] == [None, None, None, False, None, None, True]
    assert "adapter, together, adamw, 4 peers" in show(results) and "+2.00%" in show(results)


def test_a_row_of_each_kind_and_size_is_measured_once():
    many = len(KINDS) + len(LARGER) + 2 * len(LONGER) + 2 * len(LARGER_AND_LONGER)
    assert len(set(rows([8, 4]))) == len(rows([4, 8])) == many


def test_held_out_conversations_are_of_other_addresses():
    asked = [{row["messages"][0]["content"] for row in conversations(held_out=held_out)} for held_out in (True, False)]
    assert asked[0] and len(asked[0] & asked[1]) < 0.05 * len(asked[0])


@pytest.mark.long
def test_a_small_run_learns_answers_alone_and_together(tmp_path: Path):
    size = BaseModel(32, 64, 1, 2, 320, 256, steps=2, batch=2, every=50)
    make_base(size, tmp_path / "base")
    texts = write_conversations(tmp_path, every=200)
    world = FineTuning(
        tmp_path / "run",
        tmp_path / "base",
        texts,
        size,
        Tuning(6, 2, 3, 256, rank=2),
        adapter=True,
        optimizer="muon",
        seed=1,
    )
    windows = world.train.read(range(4))
    assert 0 < int((windows & TRAINED != 0).sum()) < windows.numel(), "answers are trained, and questions are not"
    before = world.before()
    alone, together, frozen = world.alone(2, 0.05), world.together(2, 0.05), world.together(2, 0.05, freeze_a=True)
    assert max(alone.loss, together.loss, frozen.loss) < before
    assert len({alone.loss, together.loss, frozen.loss}) == 3 and together.bytes < alone.bytes
