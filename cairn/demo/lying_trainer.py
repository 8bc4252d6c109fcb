"""The trainers of the demo's liars: `python -m cairn.demo.lying_trainer LIE --fd N --parent PID`.

They are for `cairn demo --liars` alone, which shows that audits convict them; `cairn.demo.liar` starts them. A lying
trainer is the honest one with another inner step: what it claims, announces and applies is as the protocol has it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from peer.channel import Start, TrainerEnd
from peer.errors import TrainingError
from peer.training.__main__ import main
from peer.training.inner_optimizer import InnerOptimizer, StepResult
from peer.training.service import TrainerService
from peer.training.trainer import Trainer

CLAIMED_LOSS = 4.0
"""Nats a token that a trainer reports who computes no loss. Nobody checks the number."""


class NoiseSteps:
    """Steps without training: each adds random signs, as large as a step of the optimizer, to the parameters.

    A step takes no time, so the liar claims the largest update that it may as soon as a round begins.
    """

    def __init__(self, inner: InnerOptimizer):
        self._inner = inner

    def forward_backward(self, windows: Tensor, go_on: Callable[[], bool] = lambda: True) -> StepResult | None:
        """Return a result like that of an honest step."""
        return StepResult(CLAIMED_LOSS, True)

    @torch.no_grad()
    def optimizer_step(self, step: StepResult) -> None:
        """Move each parameter up or down by the learning rate, by chance."""
        for parameter in self._inner.parameters.values():
            parameter.add_(torch.randn_like(parameter).sign_(), alpha=self._inner.learning_rate)


class HalfTheSteps:
    """Every second step is honest. The others are counted and not made."""

    def __init__(self, inner: InnerOptimizer):
        self._train, self._move = inner.forward_backward, inner.optimizer_step
        self._honest: StepResult | None = None
        """The result of the newest honest step; None if that was dropped."""
        self._skips = False

    def forward_backward(self, windows: Tensor, go_on: Callable[[], bool] = lambda: True) -> StepResult | None:
        """Compute the gradient, or return the result of the step before."""
        if not self._skips or self._honest is None:
            self._honest = self._train(windows, go_on)
        return self._honest

    def optimizer_step(self, step: StepResult) -> None:
        """Step the optimizers, or do nothing."""
        if not self._skips:
            self._move(step)
        self._skips = not self._skips


LIES: dict[str, type[NoiseSteps] | type[HalfTheSteps]] = {"noise": NoiseSteps, "half": HalfTheSteps}


def deceive(trainer: Trainer, lie: str) -> Trainer:
    """Replace the inner steps of a trainer by those of a lie, and return the trainer. Raises TrainingError."""
    inner = trainer.backend.inner
    if not isinstance(inner, InnerOptimizer):
        raise TrainingError("a lying trainer is one process on one device")
    steps = LIES[lie](inner)
    inner.forward_backward = steps.forward_backward
    inner.optimizer_step = steps.optimizer_step
    return trainer


class LyingService(TrainerService):
    """The service of a trainer that lies."""

    def __init__(self, end: TrainerEnd, lie: str):
        super().__init__(end)
        self._lie = lie

    def make_trainer(self, start: Start) -> Trainer:
        """Return a trainer whose steps are those of the lie."""
        return deceive(super().make_trainer(start), self._lie)


if __name__ == "__main__":
    lie, *arguments = sys.argv[1:]
    code = main(arguments, lambda end: LyingService(end, lie))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as in peer.training.__main__
