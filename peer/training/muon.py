"""Muon: steps of hidden matrices along their momentum, made orthogonal (Jordan et al. 2024).

Within DiLoCo it is MuLoCo (arXiv 2505.23725). Momentum 0.95 with Nesterov, five Newton-Schulz iterations. A step is
scaled to the root mean square of AdamW's (Moonlight, arXiv 2502.16982), so that one learning rate and weight decay
serve both optimizers.

torch.optim.Muon does the same, always with iterations in bf16. A CPU without instructions for bf16 took 20 to 58 times
as long for their products as in fp32 (AMD EPYC with AVX2, 64 x 172 and 192 x 512). Here `dtype` chooses, and a single
matrix's result in bf16 is torch's bit by bit. On a GPU matrices of one shape are stepped as a stack. One by
one, the 112 matrices of a model of 116M parameters are 2,700 kernels, too small to keep it busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from peer.training.eight_bit import EightBit, Moment, rounded
from protocol.spec import InnerSpec

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7
RMS_OF_ADAMW = 0.2

STACK = 1 << 24
"""Elements of the matrices that a GPU steps at once: about 0.3 GB with the copies that this makes."""

MOMENT = "momentum_buffer"


class Muon(torch.optim.Optimizer):
    """Muon on whole matrices. Attributes: `dtype` of the iterations (fp32 or bf16), `momentum` for a comparison.

    `stack`: the most elements of matrices of one shape that are stepped at once; 0: each matrix alone. `eight_bit`: the
    form of the momentum.
    """

    def __init__(self, matrices: Iterable[Tensor], spec: InnerSpec, *, eight_bit: bool = False):
        """Step these fp32 matrices with the spec's learning rate and weight decay."""
        super().__init__(matrices, {"lr": spec.lr, "weight_decay": spec.weight_decay})
        self.dtype = torch.float32
        self.momentum = MOMENTUM
        self.eight_bit = eight_bit
        self.stack = STACK if self.param_groups[0]["params"][0].is_cuda else 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # none is used
        """Step each matrix that has a gradient."""
        for group in self.param_groups:
            rate, decay = group["lr"], group["weight_decay"]
            for matrices in stacks((m for m in group["params"] if m.grad is not None), self.stack):
                gradients = [m.grad for m in matrices if m.grad is not None]
                moments = [self._momentum_of(m) for m in matrices]
                kept = [m.read() if isinstance(m, EightBit) else m for m in moments]
                torch._foreach_lerp_(kept, gradients, 1 - self.momentum)  # pyright: ignore[reportPrivateImportUsage]
                for moment, values in zip(moments, kept, strict=True):
                    if isinstance(moment, EightBit):
                        moment.write(values)
                directions = list(torch._foreach_lerp(gradients, kept, self.momentum))  # pyright: ignore[reportPrivateImportUsage]
                changes = self._changes(matrices, directions, rate)
                torch._foreach_mul_(matrices, 1 - rate * decay)  # pyright: ignore[reportPrivateImportUsage]
                torch._foreach_add_(matrices, changes)  # pyright: ignore[reportPrivateImportUsage]

    def _momentum_of(self, matrix: Tensor) -> Moment:
        state = self.state[matrix]
        if not state:
            zeros = torch.zeros_like(matrix)
            state[MOMENT] = rounded(zeros) if self.eight_bit else zeros
        return state[MOMENT]

    def _changes(self, matrices: list[Tensor], directions: list[Tensor], rate: float) -> list[Tensor]:
        """Return what is added to matrices of one shape, by the directions of their momentum."""
        if len(directions) == 1:
            return [step_along(directions[0], rate, self.dtype)]
        return list(step_along(torch.stack(directions), rate, self.dtype).unbind())


def stacks(matrices: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield the matrices in lists of one shape, with at most `most` elements, or a single matrix; 0: each alone."""
    if not most:  # grouped by shape, empty shards would share a list, and each rank would have its own order
        yield from ([matrix] for matrix in matrices)
        return
    begun: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        some = begun.setdefault(matrix.shape, [])
        if some and (len(some) + 1) * matrix.numel() > most:
            yield some
            begun[matrix.shape] = some = []
        some.append(matrix)
    yield from begun.values()


def step_along(direction: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """Return the step of a whole matrix, or of a stack of them, along a direction: fp32 of its shape."""
    scale = rate * RMS_OF_ADAMW * math.sqrt(max(direction.shape[-2:]))
    return orthogonal(direction, dtype).to(torch.float32).mul_(-scale)


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix with the same singular vectors, and singular values near 1: about 0.7 to 1.2.

    Of a stack, [matrices, rows, columns], each matrix.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(dtype, copy=True)
    x = x.mT if is_tall else x
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM))
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
