"""Shared by several tests: reduced means."""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.outer import Contribution
from protocol.reduce import Reduction, apply_reduced
from protocol.spec import OuterSpec


def reduced(reduction: Reduction, updates: list[Contribution], outer: OuterSpec, count: int) -> list[bytes]:
    return [reduction.reduce(updates, outer, count, part) for part in range(count)]


def sum_means(reduction: Reduction, sums: list[bytes]) -> dict[str, Tensor]:
    state = {t.name: torch.zeros(t.shape) for t in reduction.codec.layout.tensors}
    apply_reduced(state, sums, reduction, OuterSpec())
    return {name: -value.view(-1) for name, value in state.items()}
