"""A flat vector as rows of the codecs' blocks, and what can be done to rows: transforms, selection, quantisers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.convergence.local_steps import dct_matrix
from protocol.codec.positions import Positions
from protocol.codec.sparse import two_levels
from protocol.layout import BLOCK, Layout


@dataclass(frozen=True)
class Group:
    """All blocks of one width: `at` (int64 [blocks, width]) says where their coordinates lie in the flat vector."""

    width: int
    at: Tensor
    tensor: Tensor
    """The index of each block's tensor, int64 [blocks]."""

    def only(self, there: Tensor) -> Group:
        """Return the blocks that a mask, bool [blocks], selects."""
        return Group(self.width, self.at[there], self.tensor[there])


def groups(layout: Layout, device: torch.device) -> list[Group]:
    """Return every coordinate of the layout once, in the blocks of the codecs."""
    rows: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for index, t in enumerate(layout.tensors):
        for at in range(0, t.numel, BLOCK):
            rows.setdefault(min(BLOCK, t.numel - at), []).append((start + at, index))
        start += t.numel
    return [
        Group(
            width,
            (torch.tensor([s for s, _ in found])[:, None] + torch.arange(width)[None, :]).to(device),
            torch.tensor([i for _, i in found]).to(device),
        )
        for width, found in rows.items()
    ]


# -- transforms: orthonormal, of full blocks; a shorter last block stays as it is --------------------------------


def transformed(rows: Tensor, kind: str, *, back: bool = False) -> Tensor:
    """fp32 [..., width] to the coefficients of each row, or back."""
    if kind == "none" or rows.shape[-1] != BLOCK:
        return rows
    if kind == "hadamard":
        return _hadamard(rows)
    if kind != "dct":
        raise ValueError(f"transform {kind!r}: want none, dct or hadamard")
    basis = dct_matrix(64).to(rows.device)
    tiles = rows.reshape(*rows.shape[:-1], 64, 64)
    out = basis.T @ tiles @ basis if back else basis @ tiles @ basis.T
    return out.reshape(rows.shape)


def _hadamard(rows: Tensor) -> Tensor:
    """Fast Walsh-Hadamard transform of each row; its own inverse."""
    width, h, x = rows.shape[-1], 1, rows
    while h < width:
        x = x.reshape(*rows.shape[:-1], width // (2 * h), 2, h)
        x = torch.stack([x[..., 0, :] + x[..., 1, :], x[..., 0, :] - x[..., 1, :]], dim=-2)
        h *= 2
    return x.reshape(rows.shape) / math.sqrt(width)


# -- quantisers of the values that are kept ------------------------------------------------------------------


def quantised(values: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """fp32 [rows, k] as a decoder sees them. See QUANTISERS."""
    size, sign = values.abs(), values.sign()
    if kind == "fp32":
        return values
    if kind == "1 mean":
        return sign * size.mean(1, keepdim=True)
    if kind == "2 levels":
        lo, hi = two_levels(size)
        return sign * torch.where(size - lo > hi - size, hi, lo)
    if kind == "2 max":
        top = size.amax(1, keepdim=True)
        return sign * torch.where(size > 2 / 3 * top, top, top / 3)
    if kind == "2 dithered":
        lo, hi = two_levels(size)
        share = ((size - lo) / (hi - lo).clamp(min=1e-30)).clamp(0, 1)
        draw = torch.rand(size.shape, generator=generator).to(size.device)
        return sign * torch.where(draw < share, hi, lo)
    if kind in ("3 levels", "4 levels"):
        return sign * _lloyd(size, 4 if kind[0] == "3" else 8)
    raise ValueError(f"quantiser {kind!r}: want one of {', '.join(QUANTISERS)}")


QUANTISERS = {"fp32": 32, "1 mean": 1, "2 levels": 2, "2 max": 2, "2 dithered": 2, "3 levels": 3, "4 levels": 4}
"""Bits per value, its sign included. `levels`: learned for each block by least squares; `mean`, `max`: one scale."""

SCALES = {"fp32": 0, "1 mean": 1, "2 levels": 2, "2 max": 1, "2 dithered": 2, "3 levels": 4, "4 levels": 8}
"""Scales of 2 bytes in an encoded block."""


def _lloyd(size: Tensor, levels: int, turns: int = 8) -> Tensor:
    """Quantize to the nearest of `levels` levels, found by Lloyd's iteration from the quantiles (IEEE Trans.

    Inf. Theory 28(2)).
    """
    at = (torch.arange(levels, device=size.device) + 0.5) / levels
    centre = torch.quantile(size, at, dim=1).T.contiguous()
    for _ in range(turns):
        nearest = (size[:, :, None] - centre[:, None, :]).abs().argmin(2)
        hits = torch.zeros_like(centre).scatter_add_(1, nearest, torch.ones_like(size))
        summed = torch.zeros_like(centre).scatter_add_(1, nearest, size)
        centre = torch.where(hits > 0, summed / hits.clamp(min=1), centre)
    nearest = (size[:, :, None] - centre[:, None, :]).abs().argmin(2)
    return centre.gather(1, nearest)


def block_bytes(width: int, k: int, quantiser: str) -> int:
    """Return the bytes of an encoded block with the codec's own coding of positions."""
    kept = -(-width * k // BLOCK)
    positions = 0 if kept == width else Positions(width, kept).size
    return 2 * SCALES[quantiser] + positions + -(-kept * QUANTISERS[quantiser] // 8)
