"""Linear layers whose weights are cast for each product, and not kept in both types.

Autocast casts an fp32 weight to bf16 in the forward pass and keeps the copy until the backward pass is through: 2 bytes
a parameter. Here the backward pass casts it again, which moves 6 bytes a parameter. On a CPU the bits are the same. In
compiled layers torch.compile does so by an option (peer/training/layers.py). Layers that were to be compiled and could
not be keep the copies.
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
        to_x, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if to_weight else None, weight if to_x else None)
        ctx.weight_dtype = weight.dtype
        ctx.has_bias = bias is not None
        return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight), gradient = ctx.saved_tensors, gradients[0]
        rows = gradient.flatten(0, -2)
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            gradient @ weight.to(gradient.dtype) if to_x else None,
            # In the weight's own layout: the optimizer's gradient is this tensor, not a copy of it.
            (rows.t() @ x.flatten(0, -2)).to(ctx.weight_dtype) if to_weight else None,
            rows.sum(0).to(ctx.weight_dtype) if to_bias and ctx.has_bias else None,
        )


def cast_again(modules: Iterable[nn.Module]) -> None:
    """Make linear modules cast their weights for each product, if these are fp32."""
    for module in modules:
        if _is_fp32(module):
            module.forward = partial(_forward, module)


def _is_fp32(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.dtype == torch.float32


def _forward(module: Any, x: Tensor) -> Tensor:
    kind = x.device.type
    if not (torch.is_autocast_enabled(kind) and torch.is_grad_enabled()):
        return linear(x, module.weight, module.bias)
    with torch.autocast(kind, enabled=False):
        return _Product.apply(x.to(torch.get_autocast_dtype(kind)), module.weight, module.bias)
