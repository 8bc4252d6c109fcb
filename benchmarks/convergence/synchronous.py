"""Data-parallel AdamW, the reference; and the same with compressed gradients, which is what hivemind's Optimizer does.

`hivemind.Optimizer` gathers gradients from its peers until the global batch is full and averages them by all-reduce
(fp32, fp16 or 8 bits on the wire, or PowerSGD). Then everyone takes the same step, so its loss is that of data-
parallel training. The seconds of its rounds are measured with real processes in `rival_hivemind`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.convergence.method import Method
from benchmarks.convergence.replica import Replica, split
from benchmarks.convergence.setting import Setting

WIRE = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "powersgd": 0.0}
DEFAULT_RANK = 4
"""Of PowerSGD."""


class Synchronous(Method):
    """One model; the global batch is all peers' windows. `wire`: how a gradient travels; `optimizer`: adamw or muon."""

    def __init__(self, setting: Setting, lr: float, *, wire: str = "bf16", rank: int = DEFAULT_RANK,
                 optimizer: str = "adamw"):  # fmt: skip
        super().__init__(setting)
        if wire not in WIRE:
            raise ValueError(f"wire {wire!r}: want one of {', '.join(WIRE)}")
        self.wire = wire
        self.replica = Replica(setting, lr, setting.profile.batch * setting.profile.peers, optimizer)
        self.numel = setting.layout.numel
        self.power = PowerSGD(setting, rank) if wire == "powersgd" else None

    def step(self, number: int) -> None:
        profile = self.setting.profile
        factor = self.setting.factor((number + 0.5) / profile.steps)
        parts = [self.setting.windows(p, number * profile.batch, profile.batch) for p in range(profile.peers)]
        if self.power is not None:
            gradients = torch.stack([self.replica.gradient(w) for w in parts])
            self.replica.take(self.power.mean(gradients), factor)
            self.all_reduced(self.power.size)
        elif self.wire == "fp16":
            gradients = torch.stack([self.replica.gradient(w) for w in parts])
            self.replica.take(gradients.half().float().mean(0), factor)
            self.all_reduced(2 * self.numel)
        else:
            self.replica.step(torch.cat(parts), factor)
            self.all_reduced(WIRE[self.wire] * self.numel)

    def state(self) -> Tensor:
        return self.replica.flat

    def finish(self) -> None:
        """Nothing is ever under way."""


class PowerSGD:
    """Gradients by low-rank parts with error feedback (Vogels et al. 2019, arXiv 1905.13727), as hivemind does it.

    It follows `hivemind.optim.PowerSGDGradientAverager`: a matrix is sent as low-rank factors if they save half of it
    or more, and all else in fp32. There is one power iteration a step, from the last step's Q.
    """

    def __init__(self, setting: Setting, rank: int, least_saved: float = 0.5):
        self.layout, self.rank = setting.layout, rank
        self.low = {
            t.name for t in self.layout.tensors if len(t.shape) == 2 and 1 - rank * sum(t.shape) / t.numel > least_saved
        }
        numbers = sum(rank * sum(t.shape) if t.name in self.low else t.numel for t in self.layout.tensors)
        self.size = 4.0 * numbers
        generator = torch.Generator().manual_seed(0)
        self.q = {
            t.name: torch.randn(t.shape[1], rank, generator=generator)
            for t in self.layout.tensors
            if t.name in self.low
        }
        self.errors = torch.zeros(setting.profile.peers, self.layout.numel)

    def mean(self, gradients: Tensor) -> Tensor:
        """Return the mean that all peers get of fp32 [peers, parameters]; the remainder stays in the errors."""
        device = gradients.device
        self.errors = self.errors.to(device)
        exact = gradients.mean(0)
        fed = gradients + self.errors
        out = torch.empty_like(exact)
        each = [split(self.layout, row) for row in fed]
        errors = [split(self.layout, row) for row in self.errors]
        plain, into = split(self.layout, exact), split(self.layout, out)
        for t in self.layout.tensors:
            if t.name not in self.low:
                into[t.name].copy_(plain[t.name])
                for e in errors:
                    e[t.name].zero_()
                continue
            q = self.q[t.name].to(device)
            p = torch.stack([g[t.name] @ q for g in each]).mean(0)
            p = torch.linalg.qr(p).Q
            q = torch.stack([g[t.name].T @ p for g in each]).mean(0)
            self.q[t.name] = q
            approximate = p @ q.T
            into[t.name].copy_(approximate)
            for g, e in zip(each, errors, strict=True):
                e[t.name].copy_(g[t.name] - approximate)
        return out
