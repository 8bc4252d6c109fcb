"""Order within rows: the k largest, sorting, and where bits are set.

On a CPU by NumPy, whose vectorised selection and sorting are 10 to 30 times as fast as torch's; elsewhere by torch.
Results are the same, to the choice among equals: committees compare what they encode.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MAGNITUDE = 0x7FFFFFFF
"""All bits of a fp32 but the sign. As integers, magnitudes are ordered as they are as numbers, NaNs above infinity."""


def topk(x: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest magnitudes in each row of fp32 [n, m], k < m: int64 [n, k], increasing.

    Of equal ones the first. NaN counts as larger than every number.
    """
    if x.device.type != "cpu":
        return topk_by_torch(x, k)
    n, m = x.shape
    magnitudes = np.bitwise_and(x.numpy().view(np.int32), _MAGNITUDE)
    least = np.partition(magnitudes, m - k, axis=1)[:, m - k, None]
    chosen = np.flatnonzero(magnitudes >= least)
    if len(chosen) != n * k:
        # Some rows have more than one coordinate as large as the least that is kept: the first of these are.
        more, equal = magnitudes > least, magnitudes == least
        left = k - np.count_nonzero(more, axis=1)
        chosen = np.flatnonzero(more | (equal & (np.cumsum(equal, axis=1) <= left[:, None])))
    chosen = chosen.reshape(n, k)
    chosen -= np.arange(0, n * m, m)[:, None]
    return torch.from_numpy(chosen)


def topk_by_torch(x: Tensor, k: int) -> Tensor:
    """Return the same as `topk`, on any device."""
    n, m = x.shape
    magnitudes = x.contiguous().view(torch.int32) & _MAGNITUDE
    # topk may take any of several equal values; only the value of the last one is defined.
    least = torch.topk(magnitudes, k, dim=1, sorted=False).values.amin(1, keepdim=True)
    chosen = (magnitudes >= least).view(-1).nonzero().view(-1)
    if len(chosen) != n * k:
        more, equal = magnitudes > least, magnitudes == least
        left = k - more.sum(1, keepdim=True, dtype=torch.int32)
        chosen = (more | (equal & (equal.cumsum(1, dtype=torch.int32) <= left))).view(-1).nonzero().view(-1)
    return chosen.view(n, k) - torch.arange(0, n * m, m, device=x.device).unsqueeze(1)


def sort_descending(x: Tensor) -> Tensor:
    """Return each row of fp32 [n, m], without NaN, from its largest to its smallest."""
    if x.device.type != "cpu":
        return torch.sort(x, dim=1, descending=True).values
    return torch.from_numpy(np.sort(x.numpy(), axis=1)).flip(1)


def nonzero(bits: Tensor) -> Tensor:
    """Return the positions of the ones in uint8 [n] of zeros and ones: int64, increasing."""
    if bits.device.type != "cpu":
        return bits.nonzero().view(-1)
    return torch.from_numpy(np.flatnonzero(bits.numpy().view(np.bool_)))
