"""What was measured of Cairn's settings, as constants for `cairn run plan` and its template.

All figures are from docs/results/convergence.md (data: docs/results/convergence.json), made by
`python -m benchmarks.convergence`; the same model, data, tokens and global batch for every row. Nothing is computed
here: who measures again mends this file, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.spec import CodecSpec

SOURCE = "docs/results/convergence.md"

LARGEST_MEASURED = 131_904
"""Parameters of the largest model that the figures come from."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A codec, with the `beta` that was best with it, and a length of rounds: `inner_steps` between two exchanges (H).

    `loss`: the final validation loss as a multiple of that of data-parallel training with the same inner optimiser
    (1.02: 2% above); `outer_lr` of the plain outer step. All with Muon.
    """

    codec: CodecSpec
    inner_steps: int
    loss: float
    outer_lr: float = 1.0

    def __str__(self) -> str:
        k = f" k {self.codec.k}" if self.codec.kind == "sparse" else ""
        return f"{self.codec.kind}{k}, H {self.inner_steps}"


SIGN = CodecSpec(kind="sign", beta=0.5)
MEASURED: tuple[Measured, ...] = (
    Measured(SIGN, 9, 1.020, outer_lr=1.4),
    Measured(SIGN, 18, 1.033, outer_lr=1.4),
    Measured(SIGN, 36, 1.051, outer_lr=1.4),
    Measured(SIGN, 54, 1.066, outer_lr=1.4),
    Measured(SIGN, 72, 1.081, outer_lr=1.4),
    Measured(CodecSpec(kind="sparse", k=256, beta=0.5), 17, 1.094),
    Measured(CodecSpec(kind="sparse", k=64, beta=0.7), 10, 1.134),
    Measured(CodecSpec(kind="sparse", k=64, beta=0.7), 36, 1.262),
)
"""Each codec and H once. The planner takes no other."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to write for a field whatever the links are, and the figure that says so."""

    value: str | float
    why: str


INNER = Choice("muon", "validation loss 2.709 with signs at H 36; data-parallel 2.576, and 2.867 with AdamW")
BETA_WHY = "of the few that were tried with this codec the best, within noise"
OUTER_LR_WHY = "validation loss 2.704; 2.693 with Nesterov (1.0, 0.5), whose momentum everyone would hold"

LR_AT = (131_904, 1.6e-2)
"""(parameters, peak learning rate) that was best for rounds of Muon's steps, among factors of two."""
LR_POWER = -0.25
"""How the best peak rate is taken to go with the number of parameters; not measured here."""
WARMUP = 0.04
"""Share of the training over which the rate rises."""
MIN_RATIO = 0.1
"""Where the cosine ends."""
