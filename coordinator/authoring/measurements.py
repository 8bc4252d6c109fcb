"""Measured settings as constants for `cairn run plan` and its template.

The figures are of docs/results/convergence.json, with the same model, data, tokens and global batch in every row; those
of fine-tuning are of docs/results/finetune.json. With signs, momentum between the peers is recorded at H 36 alone.
Nothing is computed here: a new measurement changes this file, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.spec import CodecSpec, OuterSpec

SOURCE = "docs/results/convergence.md"
FINE_TUNING = "docs/results/finetune.md"

LARGEST_MEASURED = 131_904
"""Parameters of the largest model behind the figures."""
MEASURED_PEERS = 4
"""Peers in each comparison behind the figures."""
MORE_PEERS = (
    "after 21 rounds 16 that shared the batch of 4 ended 17% above data-parallel Muon, and 4 ended 5% above; after 84 "
    f"rounds 5% and 2% ({SOURCE})"
)


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """A codec with its best `beta`, and a length of rounds: `inner_steps` between two exchanges (H), with Muon.

    `loss` is the final validation loss as a multiple of that of data-parallel training with the same inner optimizer:
    1.02 is 2% above. `outer` is the outer step that it was measured with.
    """

    codec: CodecSpec
    inner_steps: int
    loss: float
    outer: OuterSpec = OuterSpec()

    def __str__(self) -> str:
        k = f" k {self.codec.k}" if self.codec.kind == "sparse" else ""
        return f"{self.codec.kind}{k}, H {self.inner_steps}"


SIGN = CodecSpec(kind="sign", beta=0.5)
NESTEROV = OuterSpec(optimizer="nesterov", lr=1.0, momentum=0.5)
"""The outer step to write with signs (docs/results/convergence.md)."""
PLAIN = OuterSpec(optimizer="plain", lr=1.8)
"""The outer step to write with signs for fine-tuning, which was measured with it in 4 to 36 rounds.

Its rate is the best without momentum: the mean of signs is too short a step."""
STUDIED = OuterSpec(optimizer="plain", lr=1.4)
"""The outer step with which other lengths of rounds than H 36 were measured."""
MEASURED: tuple[MeasuredSetting, ...] = (
    MeasuredSetting(SIGN, 9, 1.020, STUDIED),
    MeasuredSetting(SIGN, 18, 1.033, STUDIED),
    MeasuredSetting(SIGN, 36, 1.047, NESTEROV),
    MeasuredSetting(SIGN, 54, 1.066, STUDIED),
    MeasuredSetting(SIGN, 72, 1.081, STUDIED),
    MeasuredSetting(CodecSpec(kind="sparse", k=256, beta=0.5), 17, 1.094),
    MeasuredSetting(CodecSpec(kind="sparse", k=64, beta=0.7), 10, 1.134),
    MeasuredSetting(CodecSpec(kind="sparse", k=64, beta=0.7), 36, 1.262),
)
"""The settings that the planner chooses from: each codec and H once. All are of one comparison by an earlier method."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The value of a field that does not depend on the links, and the figure behind it."""

    value: str | float
    why: str


INNER = Choice("muon", "validation loss 2.697 with signs at H 36; data-parallel 2.576, and 2.867 with AdamW")
ADAPTER_INNER = Choice("adamw", "loss of an adapter 3.124 with signs in 4 rounds, 3.137 with Muon")
BETA_WHY = "of the few that were tried with this codec the best, within noise"
OUTER_WHY = "at H 36 the same loss in 21 rounds as with the best plain rate"
PLAIN_WHY = "in 4 rounds of fine-tuning momentum made the loss 2.2% higher, 1.7% with an adapter"

OVERLAP_LOSS = 0.07
"""Relative increase of the final loss if the exchange takes as long as the round's training, which continues on an old
state. 4 of 36 steps cost 0.75%, 12 of 36 2.4%; other lengths are interpolated linearly."""
OVERLAP_MEASURED = 12 / 36
"""The longest exchange that was measured so, as a share of the round's training."""

LR_AT = (131_904, 1.6e-2)
"""Parameters, and the best peak learning rate among factors of two for rounds of Muon's steps."""
ADAPTER_LR_AT = (1_094_240, 8e-3)
"""Parameters of a frozen base, and the best peak rate of AdamW for an adapter on it among factors of two."""
LR_POWER = -0.25
"""Assumed power of the parameter count in the best peak rate; not measured here."""
WARMUP = 0.04
"""Share of the training during which the rate rises."""
MIN_RATIO = 0.1
"""Factor of the rate at the end of the cosine."""
