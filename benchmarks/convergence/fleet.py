"""All peers' replicas as one batch: one forward and backward pass for everyone, for small models that are all overhead.

A step does what `Replica.step` does on each peer, up to rounding; a test holds that.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from benchmarks.convergence.replica import split
from benchmarks.convergence.setting import Setting
from peer.training.inner_optimizer import hidden_matrices
from peer.training.muon import Muon
from protocol.spec import InnerSpec


class Fleet:
    """`flat`: fp32 [peers, parameters], every row in layout order. All peers step together."""

    def __init__(self, setting: Setting, lr: float, peers: int, optimizer: str = "adamw"):
        self.setting, self.lr = setting, lr
        model = setting.model(compiled=False)
        model.set_attn_implementation("eager")  # type: ignore[operator]  # what vmap has rules for
        named = dict(model.named_parameters())
        start = torch.cat([named[t.name].detach().reshape(-1) for t in setting.layout.tensors])
        self.flat = start.repeat(peers, 1)
        self.spec = setting.inner(lr, optimizer=optimizer)
        self.optimizer = torch.optim.AdamW(
            [self.flat], lr=lr, betas=self.spec.betas, eps=self.spec.eps, weight_decay=0.0, fused=True
        )
        self.muon = FleetMuon(setting, self.flat, self.spec, hidden_matrices(model)) if optimizer == "muon" else None
        decayed = [torch.full((t.numel,), float(len(t.shape) >= 2)) for t in setting.layout.tensors]
        self.decayed = torch.cat(decayed).to(setting.device)

        def loss(parameters: dict[str, Tensor], windows: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=setting.device.type == "cuda"):
                logits: Any = functional_call(
                    model, parameters, (), {"input_ids": windows[:, :-1], "use_cache": False}
                ).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

        each = vmap(grad_and_value(loss))
        self._each = torch.compile(each) if setting.compiled else each

    def row(self, peer: int) -> Tensor:
        """One peer's parameters: fp32 [parameters], the memory itself."""
        return self.flat[peer]

    def tensors(self, peer: int) -> dict[str, Tensor]:
        """Return the same by the layout's names."""
        return split(self.setting.layout, self.flat[peer])

    def step(self, windows: Tensor, factor: float) -> None:
        """One inner step of every peer on int64 [peers, batch, window + 1]. Raises FloatingPointError."""
        peers, layout = len(self.flat), self.setting.layout
        parts = self.flat.split([t.numel for t in layout.tensors], dim=1)
        stacked = {t.name: p.view(peers, *t.shape) for t, p in zip(layout.tensors, parts, strict=True)}
        with torch.no_grad():
            gradients, losses = self._each(stacked, windows.to(self.flat.device))
            gradient = torch.cat([gradients[t.name].reshape(peers, -1) for t in layout.tensors], dim=1)
            norms = gradient.norm(dim=1, keepdim=True)
            if not bool(torch.isfinite(losses).all() and torch.isfinite(norms).all()):
                raise FloatingPointError("the loss or the gradient is not finite")
            gradient.mul_((self.spec.clip_norm / (norms + 1e-6)).clamp(max=1.0))
            rate = self.lr * factor
            self.flat.mul_(1 - rate * self.spec.weight_decay * self.decayed)
            self.optimizer.param_groups[0]["lr"] = rate
            if self.muon is not None:
                self.muon.step(gradient, factor)  # takes its part of the gradient away
            self.flat.grad = gradient
            self.optimizer.step()

    def second_moments(self) -> Tensor:
        """AdamW's second moments, fp32 [peers, parameters]; after the first step."""
        return self.optimizer.state[self.flat]["exp_avg_sq"]

    def forget_moments(self) -> None:
        """Reset every peer's inner optimizer."""
        self.optimizer.state.clear()
        if self.muon is not None:
            self.muon.optimizer.state.clear()


class FleetMuon:
    """The trainer's Muon on every peer's hidden matrices; all else is left to AdamW, weight decay to the fleet."""

    def __init__(self, setting: Setting, flat: Tensor, spec: InnerSpec, hidden: Set[str]):
        self.lr = spec.lr
        self.hidden: list[tuple[slice, Tensor]] = []
        """Of each matrix: its place in a row of the fleet, and the parameters of all, [peers, rows, columns]."""
        at = 0
        for t in setting.layout.tensors:
            here = slice(at, at := at + t.numel)
            if t.name in hidden:
                self.hidden.append((here, flat[:, here].unflatten(1, t.shape)))
        self.optimizer = Muon([m for _, m in self.hidden], spec.model_copy(update={"weight_decay": 0.0}))
        self.optimizer.stack = 0  # a peer's matrices are stacked already
        self.optimizer.dtype = torch.bfloat16 if setting.device.type == "cuda" else torch.float32

    def step(self, gradient: Tensor, factor: float) -> None:
        """One step of the hidden matrices by fp32 [peers, parameters], whose part for them becomes 0."""
        for here, matrices in self.hidden:
            matrices.grad = gradient[:, here].unflatten(1, matrices.shape[1:])
        self.optimizer.param_groups[0]["lr"] = self.lr * factor
        self.optimizer.step()
        for here, _ in self.hidden:
            gradient[:, here] = 0.0
