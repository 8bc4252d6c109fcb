"""Muon: steps of hidden matrices along their momentum, made orthogonal (Jordan et al. 2024).

Within DiLoCo it is MuLoCo (arXiv 2505.23725). Momentum 0.95 with Nesterov, five Newton-Schulz iterations. A step is
scaled to the root mean square of AdamW's (Moonlight, arXiv 2502.16982), so that one learning rate and weight decay
serve both optimizers.

torch.optim.Muon does the same, always with iterations in bf16. A CPU without instructions for bf16 took 20 to 58 times
as long for their products as in fp32 (AMD EPYC with AVX2, 64 x 172 and 192 x 512). Here `dtype` chooses, and the result
in bf16 is torch's bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from protocol.spec import InnerSpec

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7
RMS_OF_ADAMW = 0.2

MOMENT = "momentum_buffer"


class Muon(torch.optim.Optimizer):
    """Muon on whole matrices. `dtype`: of the iterations, fp32 or bf16. `momentum`: another one for a comparison."""

    def __init__(self, matrices: Iterable[Tensor], spec: InnerSpec):
        """Step these fp32 matrices with the spec's learning rate and weight decay."""
        super().__init__(matrices, {"lr": spec.lr, "weight_decay": spec.weight_decay})
        self.dtype = torch.float32
        self.momentum = MOMENTUM

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # none is used
        """Step each matrix that has a gradient."""
        for group in self.param_groups:
            rate, decay = group["lr"], group["weight_decay"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state[MOMENT] = torch.zeros_like(matrix.grad)
                kept = state[MOMENT].lerp_(matrix.grad, 1 - self.momentum)
                change = self._change(matrix, matrix.grad.lerp(kept, self.momentum), rate)
                matrix.mul_(1 - rate * decay).add_(change)

    def _change(self, matrix: Tensor, direction: Tensor, rate: float) -> Tensor:
        """Return what is added to a matrix, by the direction of its momentum."""
        return step_along(direction, rate, self.dtype)


def step_along(direction: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """Return the step of a whole matrix along a direction, fp32 of its shape."""
    scale = rate * RMS_OF_ADAMW * math.sqrt(max(direction.shape))
    return orthogonal(direction, dtype).to(torch.float32).mul_(-scale)


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix with the same singular vectors, and singular values near 1: about 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype, copy=True)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=LEAST_NORM))
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
