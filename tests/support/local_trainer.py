"""A trainer in the process of the test: made, loaded, trained and compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peer.channel import MakeUpdate, NothingDone, UpdateMade
from peer.training.trainer import Trainer
from tests.support.trainer_world import World


class Heard(list):
    """The reports of a trainer, as (level, kind, text)."""

    def __call__(self, level: str, kind: str, text: str) -> None:
        self.append((level, kind, text))

    def kinds(self) -> list[str]:
        return [kind for _, kind, _ in self]


@pytest.fixture
def world(tmp_path) -> World:
    return World.make(tmp_path)


_born: list[Trainer] = []


@pytest.fixture(autouse=True)
def closed():
    """Close every trainer after its test, which ends its reading thread."""
    yield
    while _born:
        _born.pop().close()


def born(world: World, n: int = 1, **start) -> tuple[Trainer, Heard]:
    heard = Heard()
    trainer = Trainer(replace(world.start(n), **start), heard)
    _born.append(trainer)
    return trainer, heard


def loaded(world: World, n: int = 1) -> Trainer:
    trainer, heard = born(world, n)
    trainer.load(world.load())
    assert not heard
    return trainer


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        assert trainer.steps.may_train
        step = trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))
        assert step is not None and step.is_finite


def make_update(trainer: Trainer, ask: MakeUpdate) -> UpdateMade | NothingDone:
    answer = trainer.base.make_update(ask, trainer.spec.max_update_windows)
    if trainer.base.is_begin_due:
        trainer.begin_again()
    return answer


def update(trainer: Trainer, out: Path) -> UpdateMade:
    assert trainer.base.record is not None
    made = make_update(trainer, MakeUpdate(trainer.base.round, trainer.base.record, out))
    assert isinstance(made, UpdateMade)
    return made


def copied(tensors) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in tensors.items()}


def same(a, b, atol: float = 1e-6) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0)
