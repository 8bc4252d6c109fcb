"""Muon on matrices of which each rank has a part: the same step as on whole ones.

Momentum is kept in parts; its direction is whole for a moment, one matrix after the other, on each rank of the stage,
which makes it orthogonal by itself and takes its own part. That costs a gather of the hidden matrices a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from peer.training.inner import MUON_MOMENTS, muon
from peer.training.parallel.model import RankModel
from protocol.spec import InnerSpec


class SplitMuon(torch.optim.Muon):
    """`peer.training.inner.muon` for parts. All ranks of a stage step together."""

    def __init__(self, parts: Mapping[str, nn.Parameter], built: RankModel, spec: InnerSpec):
        """`parts`: this rank's of the hidden matrices, by name."""
        like = muon(parts.values(), spec).param_groups[0]
        super().__init__(
            parts.values(), lr=like["lr"], weight_decay=like["weight_decay"], momentum=like["momentum"],
            adjust_lr_fn=like["adjust_lr_fn"],
        )  # fmt: skip
        self._parts = parts
        self._built = built

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Nesterov's momentum on the parts, then torch's own Muon on the whole of what that gives."""
        group = self.param_groups[0]
        rate, momentum = group["lr"], group["momentum"]
        for name, part in self._parts.items():
            gradient = part.grad
            if gradient is None:
                continue
            state = self.state[part]
            if not state:
                state[MUON_MOMENTS[0]] = torch.zeros_like(gradient)
            kept = state[MUON_MOMENTS[0]].lerp_(gradient, 1 - momentum)
            direction = gradient.lerp(kept, momentum)
            change = self._orthogonal(self._built.whole(name, direction), rate)
            part.mul_(1 - rate * group["weight_decay"]).add_(self._built.part_of(name, change))

    def _orthogonal(self, direction: Tensor, rate: float) -> Tensor:
        """How torch's Muon, without momentum, moves a matrix from zero: the step itself."""
        moved = nn.Parameter(torch.zeros_like(direction))
        moved.grad = direction
        torch.optim.Muon(
            [moved], lr=rate, weight_decay=0.0, momentum=0.0, nesterov=False,
            adjust_lr_fn=self.param_groups[0]["adjust_lr_fn"],
        ).step()  # fmt: skip
        return moved.detach()
