"""The trainer's benchmark compares like with like, and measures all that it prints."""

from __future__ import annotations

import pytest
import torch

from benchmarks.trainer import Size, bare_loop, measured, trainer_of
from peer.training.outer_state import OuterState

plain_compile = torch.nn.Module.compile
TINY = Size("tiny", hidden=32, intermediate=64, layers=1, heads=2, vocabulary=512, window=64, batch=4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.long
def test_the_bare_loop_learns_what_the_trainer_learns(compiled, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # the trainer sets it: restored after the test
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr("peer.training.layers.BACKEND", "aot_eager")
    in_place: list[torch.nn.Module] = []

    def compile_eagerly(module: torch.nn.Module) -> None:
        in_place.append(module)
        plain_compile(module, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_eagerly)
    with trainer_of(TINY, "cpu", 1, "adamw", "dp=1", compiled) as (trainer, _):
        model, step = bare_loop(trainer.spec, trainer.backend.device, compiled)
        layer = next(m for n, m in model.named_modules() if n.endswith("layers.0"))
        assert any(module is layer for module in in_place) == compiled
        assert isinstance(trainer.backend.outer, OuterState)
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        for _ in range(3):
            windows = trainer.steps.batches.take(trainer.windows.counter)
            step(windows)
            trainer.steps.step(windows)
        for name, parameter in model.named_parameters():
            moved = (parameter.detach() - start[name]).norm()
            assert moved > 0 and (parameter.detach() - trainer.backend.outer.local[name]).norm() < 0.01 * moved


@pytest.mark.long
def test_a_size_is_measured_whole():
    threads = torch.get_num_threads()
    try:
        found = measured(TINY, "cpu", 1, "muon", turns=1, steps=1)
    finally:
        torch.set_num_threads(threads)
    assert found["ratio"] > 0 and 0 < found["mfu"] < 1.5
    assert found["announce_seconds"] > 0 and found["apply_seconds"] > 0 and found["round_share"] > 0
