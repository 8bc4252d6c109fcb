"""The values that reducers average, and whether what came out is their mean: values are compared, not return codes.

Peer i of n gives base + STEP * i * i, where base is the same noise for all. So any mean is the base plus a constant.
The constant shows which peers were averaged, however coarse the wire.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 2.0
CLOSE = 0.5
"""Less than half of what a mean, another and any peer's own differ by; more than 8 bits lose."""
PIECE = 2**22


def given(number: int) -> float:
    """Return the constant that peer `number` adds to the common base."""
    return STEP * number * number


def fill(values: Tensor, number: int, seed: int = 0) -> None:
    """Write peer `number`'s values into fp32 [n]."""
    generator = torch.Generator().manual_seed(seed)
    for piece in values.split(PIECE):
        piece.normal_(generator=generator).add_(given(number))


def shares(values: Tensor, peers: int, seed: int = 0) -> dict[str, float]:
    """Return the shares of values in fp32 [n] that are a mean of all peers (`all`) or of the `survivors`.

    The survivors are all but the last peer, which is the one that dies.
    """
    generator = torch.Generator().manual_seed(seed)
    means = {
        "all": sum(map(given, range(peers))) / peers,
        "survivors": sum(map(given, range(peers - 1))) / (peers - 1),
    }
    found = dict.fromkeys(means, 0)
    for piece in values.split(PIECE):
        rest = piece - torch.empty_like(piece).normal_(generator=generator)
        for name, mean in means.items():
            found[name] += int(((rest - mean).abs() < CLOSE).sum())
    return {name: count / values.numel() for name, count in found.items()}


def is_right(of_peers: list[dict[str, float]], least: float = 0.999) -> bool:
    """Return whether everybody holds one and the same mean: of all, or of the survivors."""
    return bool(of_peers) and any(all(s[which] >= least for s in of_peers) for which in ("all", "survivors"))
