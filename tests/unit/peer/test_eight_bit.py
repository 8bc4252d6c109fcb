"""Moments in 8 bits train nearly as well as in fp32, are saved in fp32, and take the memory that is said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from peer.errors import PeerError, TrainingError
from peer.node.machine_check import check_machine
from peer.node.options import NodeOptions
from peer.store import Store
from peer.training import trial
from peer.training.eight_bit import EightBit, rounded
from peer.training.parallel.parallel_dims import ParallelDims
from peer.training.trainer import Trainer
from protocol.training_memory import LEAST, model_bytes
from tests.support.local_trainer import born, closed, same, train
from tests.support.trainer_world import BATCH, WINDOW, World

__all__ = ["closed"]  # a fixture
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


def text_of(seed: int) -> np.ndarray:
    """Return 60 steps of tokens, of which half can be known from the one before."""
    draw = np.random.default_rng(seed)
    counted = np.arange(60 * BATCH * (WINDOW + 1), dtype=np.uint32) * 7 % 64
    return np.where(draw.random(len(counted)) < 0.5, counted, draw.integers(0, 64, len(counted), dtype=np.uint32))


def world_of(folder: Path, optimizer: str) -> World:
    """Return a run whose matrices are large enough."""
    sizes = {"hidden_size": 80, "intermediate_size": 144}
    return World.make(folder, config=sizes, text=text_of(0), optimizer=optimizer)


def trainer_of(world: World, moments: str) -> Trainer:
    trainer, _ = born(world, moments=moments)
    trainer.load(world.load())
    return trainer


def loss_after_training(world: World, moments: str) -> float:
    windows, others = (torch.from_numpy(text_of(n).astype("i4")).view(-1, WINDOW + 1) for n in (0, 1))
    inner = trainer_of(world, moments).backend.inner
    for batch in windows.split(BATCH):
        step = inner.forward_backward(batch)
        assert step is not None
        inner.optimizer_step(step)
    assert inner.moments()[0] == 60
    return float(inner.window_losses(others).mean())


@OPTIMIZERS
def test_after_60_steps_the_loss_is_that_of_fp32_within_a_hundredth(tmp_path, optimizer):
    world = world_of(tmp_path, optimizer)
    exact, nearly, again = (loss_after_training(world, form) for form in ("fp32", "8bit", "8bit"))
    print(f"{optimizer}: fp32 {exact:.5f}, 8bit {nearly:.5f}")
    assert exact < 3.9  # something was learnt: ln 64 is 4.16
    assert nearly == again != exact and abs(nearly / exact - 1) < 0.01


@OPTIMIZERS
def test_a_saved_state_is_fp32_and_serves_both_forms(tmp_path, optimizer):
    world = world_of(tmp_path, optimizer)
    before = trainer_of(world, "8bit")
    train(before, 3)
    before.checkpointer.save_now()
    saved, (steps, moments) = before.folder.read(), before.backend.inner.moments()
    assert saved is not None and saved.moments.keys() == moments.keys() and saved.optimizer_steps == steps == 3
    same(moments, saved.moments, atol=0)
    for form, error in (("fp32", 0), ("8bit", 0.01)):  # the largest value of a block may have moved by 0.7%
        after = trainer_of(world, form)
        taken, restored = after.backend.inner.moments()
        assert taken == 3
        for name, value in saved.moments.items():
            assert (restored[name] - value).abs().max() <= error * value.abs().max()
        train(after, 1)
        assert after.backend.inner.moments()[0] == 4


@OPTIMIZERS
def test_what_moments_take_is_what_was_estimated(tmp_path, optimizer):
    world = world_of(tmp_path, optimizer)
    trainer, spec = trainer_of(world, "8bit"), world.spec
    train(trainer, 1)
    made, held = (trainer.backend.inner.adamw, trainer.backend.inner.muon), 0
    for name, value in (item for o in made if o is not None for state in o.state.values() for item in state.items()):
        parts = (value.codes, value.absmax) if isinstance(value, EightBit) else (value,)
        if not name.startswith("qmap"):  # all tensors share the maps, 1 KiB each
            held += sum(t.nbytes for t in parts if isinstance(t, Tensor))
    plain, small = (model_bytes(spec.model.layout, spec.model.config, spec.inner, eight_bit=e) for e in (False, True))
    weights = 8 * spec.model.layout.numel
    assert held == small - weights < (plain - weights) / 3
    found = [trial.look(spec, "cpu", "cpu", ParallelDims(), moments=form).needed for form in ("fp32", "8bit")]
    assert found[0] - found[1] == plain - small


def test_few_values_stay_as_they_are_and_others_are_rounded():
    many = torch.randn(LEAST + 3, generator=torch.Generator().manual_seed(0))
    few, made = many[:-4], rounded(many)
    assert rounded(few) is few and isinstance(made, EightBit)
    assert 0 < (made.read() - many).abs().max() < 0.02 * many.abs().max()
    made.write(torch.zeros_like(many))
    assert not made.read().any()


async def test_what_cannot_have_them_is_refused(tmp_path, monkeypatch):
    (tmp_path / "replayable").mkdir()
    plain, replayable = World.make(tmp_path), World.make(tmp_path / "replayable", replayable=True)
    options = NodeOptions(tmp_path, moments="8bit")
    with pytest.raises(TrainingError, match="not for a replayable run.*leave it out"):
        born(replayable, moments="8bit")
    with pytest.raises(TrainingError, match="here 2 train: add --parallel dp=1"):
        born(plain, moments="8bit", parallel="dp=2")
    with Store(tmp_path / "store", 2**30) as store:
        await check_machine(plain.spec, options, store)
        with pytest.raises(PeerError, match="not for a replayable run"):
            await check_machine(replayable.spec, options, store)
        monkeypatch.setattr("peer.training.eight_bit.find_spec", lambda name: None)
        with pytest.raises(PeerError, match="needs one more package: .* -m pip install 'bitsandbytes>="):
            await check_machine(plain.spec, options, store)


def test_a_library_that_makes_no_steps_on_the_device_is_refused(tmp_path, monkeypatch):
    unable = SimpleNamespace(AdamW8bit=lambda parameters: torch.empty(1).view(2))  # a RuntimeError
    monkeypatch.setattr("bitsandbytes.optim", unable)
    with pytest.raises(TrainingError, match="makes no steps on cpu .*: install a newer one"):
        born(World.make(tmp_path), moments="8bit")
