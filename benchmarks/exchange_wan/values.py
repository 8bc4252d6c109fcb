"""The values that reducers average, and whether what came out is their mean: values are compared, not return codes.

Peer i of n gives base + STEP * i, where base is the same noise for all. So any mean is base and a constant, and what
was not averaged, or not with everybody, is told by that constant, however coarse the wire.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 4.0
CLOSE = 0.5
"""Less than half of what two means can differ by (STEP over 8 peers), more than 8 bits lose."""
PIECE = 2**22


def fill(values: Tensor, number: int, seed: int = 0) -> None:
    """What peer `number` gives, into fp32 [n]."""
    generator = torch.Generator().manual_seed(seed)
    for piece in values.split(PIECE):
        piece.normal_(generator=generator).add_(STEP * number)


def shares(values: Tensor, peers: int, seed: int = 0) -> dict[str, float]:
    """Of fp32 [n] after averaging: the share of values that are the mean of all peers' (`all`), or of all but the
    last's, which is the one that dies (`survivors`)."""
    generator = torch.Generator().manual_seed(seed)
    means = {"all": STEP * (peers - 1) / 2, "survivors": STEP * (peers - 2) / 2}
    found = dict.fromkeys(means, 0)
    close = min(CLOSE, STEP / 4)
    for piece in values.split(PIECE):
        rest = piece - torch.empty_like(piece).normal_(generator=generator)
        for name, mean in means.items():
            found[name] += int(((rest - mean).abs() < close).sum())
    return {name: count / values.numel() for name, count in found.items()}


def is_right(of_peers: list[dict[str, float]], least: float = 0.999) -> bool:
    """Whether everybody holds one and the same mean: of all, or of the survivors."""
    return bool(of_peers) and any(all(s[which] >= least for s in of_peers) for which in ("all", "survivors"))
