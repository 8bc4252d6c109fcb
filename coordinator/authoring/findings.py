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

LARGEST_MEASURED = 5_400_000
"""Parameters of the largest model that the figures come from."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A density and a length of rounds: `k` coordinates of each 4096, `inner_steps` between two exchanges (H), and the
    final validation loss as a multiple of data-parallel AdamW's (1.02: 2% above)."""

    k: int
    inner_steps: int
    loss: float


MEASURED: tuple[Measured, ...] = (
    Measured(64, 5, 1.03),
    Measured(64, 10, 1.045),
    Measured(64, 30, 1.10),
    Measured(128, 10, 1.035),
    Measured(128, 20, 1.05),
    Measured(256, 10, 1.02),
    Measured(256, 20, 1.035),
    Measured(256, 30, 1.05),
    Measured(512, 30, 1.04),
    Measured(4096, 30, 1.035),
)
"""Each (k, H) once. The planner takes no other."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to write for a field whatever the links are, and the figure that says so."""

    value: str | float
    why: str


KIND = Choice("sparse", "validation loss 2.184 at k 64, H 30; all coordinates in 2 bits 2.186, for 12 times the bytes")
BETA = Choice(0.95, "validation loss 1.990; at 0.8 1.99, at 0.99 2.01: it hardly matters")
MEAN = Choice("senders", "validation loss 2.184; with the mean over all 2.340")
OUTER = Choice("plain", "Nesterov (0.7, 0.9) on top of error feedback: 2.40 against 2.184")
OUTER_LR = Choice(1.0, "the mean change as it is, with the plain outer step")

LR_AT = (1_100_000, 2e-3)
"""(parameters, peak learning rate) of the tuned reference."""
LR_POWER = -0.25
"""How the best peak rate goes with the number of parameters: 1e-3 at 20 million, 6e-4 at 150 million."""
WARMUP = 0.04
"""Share of the training over which the rate rises."""
MIN_RATIO = 0.1
"""Where the cosine ends."""
