"""Muon on matrices of which each rank has a shard: the same step as on whole ones.

Momentum stays sharded. Its direction is gathered, one matrix after the other, on each rank of the stage. Each rank
makes it orthogonal by itself and applies its own shard. That costs one gather of the hidden matrices a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from peer.training.inner_optimizer import MUON_MOMENTS, muon
from peer.training.parallel.model import RankModel
from protocol.spec import InnerSpec


class ShardedMuon(torch.optim.Muon):
    """`inner_optimizer.muon` for shards. All ranks of a stage step together."""

    def __init__(self, shards: Mapping[str, nn.Parameter], built: RankModel, spec: InnerSpec):
        """Step `shards`: this rank's shards of the hidden matrices, by name."""
        like = muon(shards.values(), spec).param_groups[0]
        super().__init__(
            shards.values(), lr=like["lr"], weight_decay=like["weight_decay"], momentum=like["momentum"],
            adjust_lr_fn=like["adjust_lr_fn"],
        )  # fmt: skip
        self._shards = shards
        self._built = built

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply Nesterov's momentum to the shards, then torch's own Muon to the gathered result."""
        group = self.param_groups[0]
        rate, momentum = group["lr"], group["momentum"]
        for name, shard in self._shards.items():
            gradient = shard.grad
            if gradient is None:
                continue
            state = self.state[shard]
            if not state:
                state[MUON_MOMENTS[0]] = torch.zeros_like(gradient)
            kept = state[MUON_MOMENTS[0]].lerp_(gradient, 1 - momentum)
            direction = gradient.lerp(kept, momentum)
            change = self._orthogonal(self._built.whole(name, direction), rate)
            shard.mul_(1 - rate * group["weight_decay"]).add_(self._built.shard_of(name, change))

    def _orthogonal(self, direction: Tensor, rate: float) -> Tensor:
        """Return the step itself: how torch's Muon, without momentum, moves a matrix from zero."""
        moved = nn.Parameter(torch.zeros_like(direction))
        moved.grad = direction
        torch.optim.Muon(
            [moved], lr=rate, weight_decay=0.0, momentum=0.0, nesterov=False,
            adjust_lr_fn=self.param_groups[0]["adjust_lr_fn"],
        ).step()  # fmt: skip
        return moved.detach()
