"""Linear layers whose weights are cast for each product, and not kept in both types.

Autocast casts an fp32 weight to bf16 in the forward pass and keeps the copy until the backward pass is through: 2 bytes
a parameter. Here the backward pass casts it again, which moves 6 bytes a parameter and gives the same bits. In compiled
layers torch.compile does so by an option (peer/training/layers.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class _Product(torch.autograd.Function):
    """`linear` in the type of `x`, for fp32 weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight), gradient = ctx.saved_tensors, gradients[0]
        rows = gradient.flatten(0, -2)
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            gradient @ weight.to(gradient.dtype) if to_x else None,
            (x.flatten(0, -2).t() @ rows).t().to(weight.dtype) if to_weight else None,
            rows.sum(0).to(weight.dtype) if to_bias and ctx.has_bias else None,
        )


def cast_again(modules: Iterable[nn.Module]) -> None:
    """Have those of the modules that are linear, with fp32 weights that are trained, cast them for each product."""
    for module in modules:
        if _is_trained_in_fp32(module):
            module.forward = partial(_forward, module)


def _is_trained_in_fp32(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.requires_grad and module.weight.dtype == torch.float32


def _forward(module: Any, x: Tensor) -> Tensor:
    kind = x.device.type
    if not (torch.is_autocast_enabled(kind) and torch.is_grad_enabled()):
        return linear(x, module.weight, module.bias)
    with torch.autocast(kind, enabled=False):
        return _Product.apply(x.to(torch.get_autocast_dtype(kind)), module.weight, module.bias)
