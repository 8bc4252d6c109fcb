"""What was measured of Cairn's settings, as constants for `cairn run plan` and its template.

All figures are from docs/results/convergence.md (data: docs/results/convergence.json), made by
`python -m benchmarks.convergence`; the same model, data, tokens and global batch for every row. Nothing is computed
here: who measures again mends this file, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "docs/results/convergence.md"
PROVISIONAL = True
"""First measurements: the plan says so. False as soon as the figures below are those of SOURCE."""

LARGEST_MEASURED = 131_904
"""Parameters of the largest model that the figures come from."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A density and a length of rounds: `k` coordinates of each 4096, `inner_steps` between two exchanges (H), the
    final validation loss as a multiple of data-parallel AdamW's (1.02: 2% above), and the `beta` that was best with it.
    """

    k: int
    inner_steps: int
    loss: float
    beta: float = 0.95


MEASURED: tuple[Measured, ...] = (
    Measured(64, 10, 1.084, beta=0.7),
    Measured(64, 30, 1.133, beta=0.7),
    Measured(256, 10, 1.042, beta=0.5),
    Measured(256, 16, 1.037, beta=0.5),
    Measured(256, 30, 1.052, beta=0.5),
    Measured(4096, 10, 1.049, beta=0.95),
)
"""Each (k, H) once. The planner takes no other."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to write for a field whatever the links are, and the figure that says so."""

    value: str | float
    why: str


KIND = Choice("sparse", "validation loss 2.936 at k 256, H 10; every coordinate in 2 bits 2.955, in fp32 2.919")
BETA_WHY = "the best of few that were tried with this k at 0.13M parameters; at 1.1M, k 256, 0.95 beat 0.5 in one run"
MEAN = Choice("senders", "validation loss 3.075 at k 64; with the mean over all 3.184")
OUTER = Choice("plain", "Nesterov (0.7, 0.5) 2.922 against 2.912, at k 256, H 16")
OUTER_LR = Choice(1.0, "the mean change as it is, with the plain outer step")

LR_AT = (131_904, 4e-3)
"""(parameters, peak learning rate) that was best for local steps; for data-parallel steps it was half of that."""
LR_POWER = -0.25
"""How the best peak rate is taken to go with the number of parameters; not measured here."""
WARMUP = 0.04
"""Share of the training over which the rate rises."""
MIN_RATIO = 0.1
"""Where the cosine ends."""
