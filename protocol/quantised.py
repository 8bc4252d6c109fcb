"""Linear layers of a frozen base in 8 or 4 bits a value, by bitsandbytes, which is imported for such runs only.

The run's owner quantises a weight once, on the CPU. The base's file holds its codes and a fp32 scale of each BLOCK
values (`absmax`), under the names that bitsandbytes gives them. Peers compute with the codes, and never quantise again.

The modules of bitsandbytes are not used: its 8-bit one also rounds what the layer reads, and its 4-bit one changes
codes on some CPUs. Here only weights are rounded, in both forms, so that all devices compute the same function.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from protocol.errors import SpecError
from protocol.extras import install
from protocol.layout import TensorShape
from protocol.model import one_line

BITSANDBYTES_MISSING = f"this run's frozen base is quantised, which needs one more package: {install('qlora')}"
BLOCK = 64
"""Values that share a scale, over the flattened weight."""
ABSMAX = ".absmax"
"""The addition to a weight's name that names its scales."""


@dataclass(frozen=True)
class QuantisedForm:
    """The form of a weight of this shape.

    A code c of "int8" is (c - 127) / 127 of its scale. Of "nf4" two codes share a byte, the first in its upper half,
    and are the 16 values of QLoRA (Dettmers et al. 2023).
    """

    dtype: str
    shape: torch.Size

    def stored(self, name: str) -> tuple[TensorShape, TensorShape]:
        """Return what a file holds of the weight with this name: its codes, and its scales."""
        values = self.shape.numel()
        codes = -(-values // 2) if self.dtype == "nf4" else values
        return TensorShape(name, (codes,), "U8"), TensorShape(name + ABSMAX, (-(-values // BLOCK),))

    def quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of a weight on the CPU. Raises SpecError."""
        functional = imported()
        if self.dtype == "nf4":
            codes, state = functional.quantize_4bit(weight.float(), blocksize=BLOCK, quant_type="nf4")
        else:
            steps = _even_steps(weight.device)
            codes, state = functional.quantize_blockwise(weight.float(), code=steps, blocksize=BLOCK)
        return codes.flatten(), state.absmax

    def values(self, codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in this dtype. Raises SpecError."""
        functional, numel = imported(), self.shape.numel()
        # With AVX-512 the library takes a new scale at the start of each row: so each row is a block, or there is one.
        # A row with an odd number of values would make the library compile C++. The last one is left out again.
        rows = torch.Size([1, numel + numel % 2] if numel % BLOCK else [numel // BLOCK, BLOCK])
        state = functional.QuantState(absmax, rows, blocksize=BLOCK, dtype=dtype)
        if self.dtype == "nf4":
            state.quant_type = "nf4"
            return functional.dequantize_4bit(codes.unsqueeze(1), state).flatten()[:numel].reshape(self.shape)
        state.code = _even_steps(codes.device)
        return functional.dequantize_blockwise(codes.view(self.shape), state)


class QuantisedLinear(nn.Module):
    """A frozen linear layer whose weight is codes and scales. They are zeros until a base is loaded."""

    codes: Tensor
    absmax: Tensor

    def __init__(self, layer: nn.Linear, dtype: str, device: torch.device):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.form = QuantisedForm(dtype, layer.weight.shape)
        self.bias = layer.bias
        codes, absmax = self.form.stored("")
        self.register_buffer("codes", torch.zeros(codes.shape, dtype=torch.uint8, device=device), persistent=False)
        self.register_buffer("absmax", torch.zeros(absmax.shape, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        product = _Product.apply(x, self.codes, self.absmax, self.form)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    @property
    def weight(self) -> Tensor:
        """The weight in fp32, for models that read it themselves."""
        return self.form.values(self.codes, self.absmax, torch.float32)


class _Product(torch.autograd.Function):
    """`linear` in the type of `x`. The codes alone are kept for the gradient, and make the weight again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, absmax: Tensor, form: QuantisedForm) -> Tensor:
        ctx.save_for_backward(codes, absmax)
        ctx.form = form
        return linear(x, form.values(codes, absmax, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return gradient @ ctx.form.values(*ctx.saved_tensors, gradient.dtype), None, None, None


def check_kernels(dtype: str, device: torch.device) -> None:
    """Raise SpecError unless bitsandbytes is installed and computes with such weights on this device."""
    form = QuantisedForm(dtype, torch.Size([BLOCK, 1]))
    codes, absmax = (torch.zeros(t.shape, device=device) for t in form.stored(""))
    try:
        form.values(codes.to(torch.uint8), absmax, torch.float32)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError) as e:  # AttributeError: a function that its library does not have
        import bitsandbytes

        raise SpecError(
            f"this run's base is quantised, and bitsandbytes {bitsandbytes.__version__} has no kernels for {device} "
            f"({one_line(e)}): install another version of it (`python -m bitsandbytes` tells what it found), or use "
            "another device"
        ) from None


def _even_steps(device: torch.device) -> Tensor:
    """Return the values of int8 codes, in units of a scale: 255 even steps from -1 to 1. The last code is unused."""
    steps = torch.arange(-127, 129, dtype=torch.float64, device=device).clamp(max=127)
    return (steps / 127).float()  # in fp64 first, since a GPU divides fp32 by a number inexactly


def imported() -> Any:
    """Return the functions of bitsandbytes. Raises SpecError if it is not installed."""
    first = not torch.compiler.is_compiling() and "bitsandbytes" not in sys.modules
    with without_kernel_hub() if first else nullcontext():
        try:
            from bitsandbytes import functional
        except ImportError:
            raise SpecError(BITSANDBYTES_MISSING) from None
    return functional


@contextmanager
def without_kernel_hub() -> Iterator[None]:
    """Import bitsandbytes, or peft, which imports it, without a download.

    On some CPUs it would load a kernel from a model hub by the package `kernels`, or warn that this package is not
    installed. No function that is used here needs that kernel.
    """
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    hub, level = sys.modules.get("kernels"), log.level
    sys.modules["kernels"] = None  # type: ignore[assignment] - its import fails
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        del sys.modules["kernels"]
        if hub is not None:
            sys.modules["kernels"] = hub
