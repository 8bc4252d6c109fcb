"""Products of bf16 matrices on a CPU, for replays of updates that a GPU trained.

On a CPU without AVX-512 torch takes 10 to 30 times as long for them as in fp32: a replay of 2 s took 38 s. A GPU's
product of bf16 values is summed in fp32 and rounded once, so this makes the same from an fp32 product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", f"{_ATTENTION}_backward"})


class Bf16Products(TorchDispatchMode):
    """A mode of torch in which products of bf16 tensors are summed in fp32. Their results are bf16 tensors as ever."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch: in fp32 if it multiplies bf16 tensors."""
        kwargs = kwargs or {}
        operation = func.name()
        is_product = operation == _ATTENTION or operation in _PRODUCTS
        if not is_product or not any(isinstance(a, Tensor) and a.dtype == torch.bfloat16 for a in args):
            return func(*args, **kwargs)
        made = func(*map(_in_fp32, args), **{name: _in_fp32(value) for name, value in kwargs.items()})
        if operation == _ATTENTION:  # its second result, for the backward pass, is fp32 in any case
            return _in_bf16(made[0]), made[1]
        return tuple(map(_in_bf16, made)) if isinstance(made, tuple) else _in_bf16(made)


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _in_bf16(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16)
