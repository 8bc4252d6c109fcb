"""Contributions, states and reduced means for the tests of the outer step."""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.codec import Codec
from protocol.ids import PeerKey
from protocol.layout import REFERENCE_NORMS
from protocol.outer import Contribution
from protocol.reduce import Reduction, apply_reduced
from protocol.spec import OuterSpec
from protocol.state import state_layout
from tests.support.codec_cases import noise, same_bits

OUTERS = [
    OuterSpec(),
    OuterSpec(mean="all", clip="none"),
    OuterSpec(optimizer="nesterov", lr=0.7, momentum=0.9, weight_cap=0.4),
]


def key(i: int) -> PeerKey:
    return PeerKey(bytes([i]) * 32)


def contributions(codec: Codec, n: int, sizes=None) -> list[Contribution]:
    sizes = sizes or [1.0 + i for i in range(n)]
    return [
        Contribution(key(i), 3 + 5 * i, bytes(codec.encode(noise(codec.layout, 100 + i, size))))
        for i, size in enumerate(sizes)
    ]


def state_of(codec: Codec, outer: OuterSpec) -> dict[str, torch.Tensor]:
    state = noise(state_layout(codec.layout, outer), 7)
    if outer.clip == "median":  # a norm is not negative, and 0 is none
        state[REFERENCE_NORMS] = state[REFERENCE_NORMS].abs() * 100
    return state


def same_states(a, b) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[n].cpu(), b[n].cpu()) for n in a)


def reduced(reduction: Reduction, updates: list[Contribution], outer: OuterSpec, count: int) -> list[bytes]:
    return [reduction.reduce(updates, outer, count, part) for part in range(count)]


def sum_means(reduction: Reduction, sums: list[bytes]) -> dict[str, Tensor]:
    outer = OuterSpec(clip="none")
    state = {t.name: torch.zeros(t.shape) for t in reduction.codec.layout.tensors}
    apply_reduced(state, sums, reduction, outer)
    return {name: -value.view(-1) for name, value in state.items()}
