"""One copy of the model with the trainer's own inner loop, its parameters also as one flat vector in layout order."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.convergence.setting import Setting
from peer.training.inner_optimizer import InnerOptimizer, StepResult
from protocol.layout import Layout
from protocol.model import parameters_of


class Replica:
    """`flat` (fp32 [parameters]) is the memory of the model's parameters: to change one is to change the other."""

    def __init__(self, setting: Setting, lr: float, batch: int | None = None, optimizer: str = "adamw"):
        model = setting.model()
        named = dict(model.named_parameters())
        self.flat = torch.cat([named[t.name].detach().reshape(-1) for t in setting.layout.tensors])
        at = 0
        for t in setting.layout.tensors:
            named[t.name].data = self.flat[at : at + t.numel].view(t.shape)
            at += t.numel
        self.model = model
        self.layout = setting.layout
        self.inner = InnerOptimizer(setting.inner(lr, batch, optimizer), model, setting.device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by their layout names: the tensors themselves."""
        return parameters_of(self.model)

    def step(self, windows: Tensor, factor: float) -> StepResult:
        """One inner step. Raises FloatingPointError when it is not finite: this learning rate diverges."""
        self.inner.set_rate(factor)
        step = self.inner.forward_backward(windows)
        if step is None or not step.is_finite:
            raise FloatingPointError("the loss or the gradient is not finite")
        self.inner.optimizer_step(step)
        return step

    def gradient(self, windows: Tensor) -> Tensor:
        """Return the gradient of the mean loss, unclipped: fp32 [parameters]. The model stays."""
        self.model.zero_grad(set_to_none=True)
        windows = windows.to(self.flat.device)
        logits = self.model(input_ids=windows[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten()).backward()
        named = dict(self.model.named_parameters())
        out = torch.cat([_gradient(named[t.name]).reshape(-1) for t in self.layout.tensors])
        self.model.zero_grad(set_to_none=True)
        return out

    def take(self, gradient: Tensor, factor: float, clip: float = 1.0) -> None:
        """One step of the inner optimizer with this gradient, clipped as the trainer clips."""
        named = dict(self.model.named_parameters())
        for name, part in split(self.layout, gradient).items():
            named[name].grad = part.clone()
        torch.nn.utils.clip_grad_norm_(named.values(), clip)
        self.inner.set_rate(factor)
        self.inner.optimizer_step(StepResult(0.0, is_finite=True))


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise ValueError("a parameter has no gradient")
    return parameter.grad


def split(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    """Return views of a flat vector by the layout's names and shapes."""
    parts = flat.split([t.numel for t in layout.tensors])
    return {t.name: part.view(t.shape) for t, part in zip(layout.tensors, parts, strict=True)}
