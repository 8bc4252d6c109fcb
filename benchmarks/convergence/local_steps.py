"""Peers that take local steps: alone, DiLoCo as OpenDiLoCo does it, and DeMo."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.convergence.fleet import Fleet
from benchmarks.convergence.method import Method
from benchmarks.convergence.replica import Replica, split
from benchmarks.convergence.setting import Setting


class Alone(Method):
    """One peer by itself, on its own share of the tokens: what a volunteer has without the others."""

    def __init__(self, setting: Setting, lr: float):
        super().__init__(setting)
        self.replica = Replica(setting, lr)

    def step(self, number: int) -> None:
        profile = self.setting.profile
        factor = self.setting.factor((number + 0.5) / profile.steps)
        self.replica.step(self.setting.windows(0, number * profile.batch, profile.batch), factor)

    def state(self) -> Tensor:
        return self.replica.flat

    def finish(self) -> None:
        """Nothing is ever under way."""


class DiLoCo(Method):
    """H steps of AdamW on each peer, then one outer step on the mean pseudo-gradient (arXiv 2311.08105, 2407.07852).

    The outer step is SGD with Nesterov momentum (PyTorch's form), lr 0.7, momentum 0.9. Pseudo-gradients
    travel in fp32. Nothing overlaps. With Muon as `inner`: MuLoCo (arXiv 2505.23725).
    """

    def __init__(self, setting: Setting, lr: float, *, h: int = 30, outer_lr: float = 0.7, momentum: float = 0.9,
                 inner: str = "adamw"):  # fmt: skip
        super().__init__(setting)
        self.h = h
        self.fleet = Fleet(setting, lr, setting.profile.peers, inner)
        self.base = self.fleet.row(0).clone()
        self.outer = torch.optim.SGD([self.base], lr=outer_lr, momentum=momentum, nesterov=momentum > 0)

    def step(self, number: int) -> None:
        profile = self.setting.profile
        factor = self.setting.factor((number + 0.5) / profile.steps)
        self.fleet.step(self.setting.global_batch(number), factor)
        if (number + 1) % self.h == 0 or number + 1 == profile.steps:
            self._average()

    def _average(self) -> None:
        gradients = self.base - self.fleet.flat
        self.base.grad = gradients.mean(0)
        self.outer.step()
        self.fleet.flat.copy_(self.base)
        self.all_reduced(4 * self.base.numel())

    def state(self) -> Tensor:
        return self.base

    def finish(self) -> None:
        """Nothing is ever under way."""


class DeMo(Method):
    """Decoupled momentum (Peng et al. 2024, arXiv 2411.19870): each step, the largest DCT coefficients of momentum.

    The rule is m <- decay * m + gradient; q = the top k of each chunk of DCT(m); m <- m - IDCT(q). All peers' q are
    summed at the same step. The step is the sign of their inverse transform (sign-SGD, as in the authors' code), with
    decoupled weight decay. Chunks are square tiles of at most `tile` a side, as there. A coefficient travels as 4
    bytes of value
    and 2 of index. All peers hold one model.
    """

    def __init__(self, setting: Setting, lr: float, *, k: int = 8, tile: int = 64, decay: float = 0.999,
                 weight_decay: float = 0.1):  # fmt: skip
        super().__init__(setting)
        self.lr, self.k, self.decay, self.weight_decay = lr, k, decay, weight_decay
        self.replica = Replica(setting, lr)
        self.momentum = torch.zeros(setting.profile.peers, self.replica.flat.numel(), device=setting.device)
        self.tiles = {t.name: _tiles(t.shape, tile) for t in setting.layout.tensors}
        self.bases = {n: dct_matrix(n).to(setting.device) for n in {s for tile in self.tiles.values() for s in tile}}
        kept = sum(t.numel // math.prod(self.tiles[t.name]) * min(k, math.prod(self.tiles[t.name]))
                   for t in setting.layout.tensors)  # fmt: skip
        self.size = 6.0 * kept

    def step(self, number: int) -> None:
        profile = self.setting.profile
        factor = self.setting.factor((number + 0.5) / profile.steps)
        sent = torch.zeros_like(self.replica.flat)
        for p in range(profile.peers):
            windows = self.setting.windows(p, number * profile.batch, profile.batch)
            momentum = self.momentum[p]
            momentum.mul_(self.decay).add_(self.replica.gradient(windows))
            if not bool(torch.isfinite(momentum).all()):
                raise FloatingPointError("the momentum is not finite")
            for name, part in split(self.setting.layout, momentum).items():
                chosen = self._largest(name, part)
                part.sub_(chosen)
                split(self.setting.layout, sent)[name].add_(chosen)
        step = self.lr * factor
        decays = torch.cat([torch.full((t.numel,), float(len(t.shape) >= 2)) for t in self.setting.layout.tensors])
        self.replica.flat.mul_(1 - step * self.weight_decay * decays.to(sent.device)).sub_(step * sent.sign())
        self.gathered(self.size)

    def _largest(self, name: str, part: Tensor) -> Tensor:
        """Return the inverse transform of the k largest coefficients of each tile."""
        rows, columns = self.tiles[name]
        matrix = part.reshape(-1, part.shape[-1]) if part.ndim > 1 else part.reshape(1, -1)
        tiles = matrix.reshape(matrix.shape[0] // rows, rows, matrix.shape[1] // columns, columns).transpose(1, 2)
        r, c = self.bases[rows], self.bases[columns]
        coefficients = r @ tiles @ c.T
        flat = coefficients.reshape(*coefficients.shape[:2], -1)
        k = min(self.k, flat.shape[-1])
        at = flat.abs().topk(k, dim=-1).indices
        kept = torch.zeros_like(flat).scatter_(-1, at, flat.gather(-1, at)).view_as(coefficients)
        return (r.T @ kept @ c).transpose(1, 2).reshape(part.shape)

    def state(self) -> Tensor:
        return self.replica.flat

    def finish(self) -> None:
        """Nothing is ever under way."""


def _tiles(shape: tuple[int, ...], most: int) -> tuple[int, int]:
    """Return the sides of a tensor's tiles: each the largest divisor of its dimension that is at most `most`."""
    rows, columns = math.prod(shape[:-1]), shape[-1] if len(shape) else 1
    return _divisor(rows, most), _divisor(columns, most)


def _divisor(n: int, most: int) -> int:
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)


def dct_matrix(n: int) -> Tensor:
    """Return the orthonormal DCT-II: fp32 [n, n], rows are the basis."""
    i = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi / n * (i[None, :] + 0.5) * i[:, None]) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.to(torch.float32)
