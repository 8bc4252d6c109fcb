"""Shared by several tests: outer states."""

from __future__ import annotations

import torch

from protocol.codec import Codec
from protocol.ids import PeerKey
from protocol.outer import Contribution
from protocol.spec import OuterSpec
from protocol.state import state_layout
from tests.support.codec_values import noise, same_bits

OUTERS = [
    OuterSpec(),
    OuterSpec(mean="all", clip="none"),
    OuterSpec(optimiser="nesterov", lr=0.7, momentum=0.9, weight_cap=0.4),
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
    return noise(state_layout(codec.layout, outer), 7)


def same_states(a, b) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[n].cpu(), b[n].cpu()) for n in a)
