"""What is compared: rows of a method with its options, in studies. A study changes one thing at a time from BASE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASE: dict[str, Any] = {"h": 10, "k": 64}
"""The sparse method's point from which the studies depart: the cheapest of its family."""


@dataclass(frozen=True)
class Row:
    """`scale`: bytes of this row for one of the method's (a wire format that does not change the training)."""

    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0


REFERENCE = Row("data-parallel AdamW, bf16", "synchronous")

PLAIN = {"clip": "none"}
NESTEROV = {"optimiser": "nesterov", "lr": 0.7, "momentum": 0.9, "clip": "none"}

# Rounding to fp16 does not show in the loss (a test holds it): those rows are the wider training, at half the bytes.
MAIN = (
    REFERENCE,
    Row("one peer alone", "alone"),
    Row("hivemind Optimizer, fp32", "synchronous", scale=2.0),
    Row("hivemind Optimizer, fp16", "synchronous"),
    Row("hivemind Optimizer, PowerSGD rank 4", "synchronous", {"wire": "powersgd", "rank": 4}),
    Row("DiLoCo, H 30, fp32", "diloco", {"h": 30}),
    Row("DiLoCo, H 100, fp32", "diloco", {"h": 100}),
    Row("DiLoCo, H 30, fp16 (OpenDiLoCo)", "diloco", {"h": 30}, scale=0.5),
    Row("DeMo, top 8 of 64 x 64", "demo"),
    Row("Cairn none (fp32), H 10", "cairn", {"h": 10, "kind": "none", "beta": 0.0}),
    Row("Cairn int8, H 30, Nesterov", "cairn", {"h": 30, "kind": "int8", "outer": NESTEROV}),
    Row("Cairn sparse k 64, H 10", "cairn", {"h": 10, "k": 64}),
    Row("Cairn sparse k 256, H 10", "cairn", {"h": 10, "k": 256}),
    Row("Cairn sparse k 256, H 10, beta 0.5, no clip", "cairn", {"h": 10, "k": 256, "beta": 0.5, "outer": PLAIN}),
    Row("Cairn sparse k 256, H 16, beta 0.5, no clip", "cairn", {"h": 16, "k": 256, "beta": 0.5, "outer": PLAIN}),
)


def _from(base: Mapping[str, Any], label: str, **changes: Any) -> Row:
    return Row(label, "variant", {**base, **changes})


DENSER: dict[str, Any] = {"h": 10, "k": 256}
CALM: dict[str, Any] = {**DENSER, "beta": 0.5, "clip": False}
"""What the studies below led to: little feedback is kept, and no norm is clipped."""

STUDIES: dict[str, tuple[Row, ...]] = {
    "base": (Row("k 64, H 10", "variant", BASE),),
    # How a coordinate is averaged.
    "mean": (
        _from(BASE, "k 64, over all", power=0.0),
        _from(BASE, "k 64, between", power=0.5),
        _from(DENSER, "k 256, over senders"),
        _from(DENSER, "k 256, over all", power=0.0),
        _from(DENSER, "k 256, between", power=0.5),
        _from(BASE, "k 64, over all, all feedback kept", power=0.0, beta=1.0),
    ),
    # What becomes of what was not sent.
    "feedback": (
        _from(BASE, "k 64, beta 0.7", beta=0.7),
        _from(BASE, "k 64, beta 0.5", beta=0.5),
        _from(BASE, "k 64, absorbs what others did", absorb="same"),
        _from(BASE, "k 64, drops what others moved", absorb="drop"),
        _from(BASE, "k 64, absorbs, beta 0.8", absorb="same", beta=0.8),
        _from(BASE, "k 64, absorbs, beta 1", absorb="same", beta=1.0),
        _from(BASE, "k 64, absorbs, between", absorb="same", power=0.5),
        _from(BASE, "k 64, absorbs, no clip", absorb="same", clip=False),
        _from(DENSER, "k 256, beta 0.5", beta=0.5),
        _from(DENSER, "k 256, absorbs", absorb="same"),
        _from(DENSER, "k 256, drops", absorb="drop"),
        _from(DENSER, "k 256, absorbs, beta 0.5", absorb="same", beta=0.5),
        _from(DENSER, "k 256, no clip", clip=False),
        _from(DENSER, "k 256, beta 0.5, no clip", beta=0.5, clip=False),
        _from(BASE, "k 64, the own model keeps what was not sent", carry=1.0),
        _from(BASE, "the same, over all", carry=1.0, power=0.0),
        _from(BASE, "the same, over senders, absorbs", carry=1.0, absorb="same"),
    ),
    # Where the bytes go: how many, how often, when.
    "rounds": (
        _from(DENSER, "k 256, H 5, beta 0.5", beta=0.5, h=5),
        _from(DENSER, "k 256, H 16, beta 0.5", beta=0.5, h=16),
        _from(DENSER, "k 256, H 30, beta 0.5", beta=0.5, h=30),
        _from(BASE, "k 64, H 5, beta 0.7", beta=0.7, h=5),
        _from(BASE, "k 64, H 30, beta 0.7", beta=0.7, h=30),
        _from(BASE, "k 64, H 6, absorbs", h=6, absorb="same"),
        _from(CALM, "k 256, H 16, beta 0.5, no clip", h=16),
        _from(BASE, "k 4096, H 10", k=4096),
        _from(CALM, "k 512, H 30, beta 0.5, no clip", k=512, h=30),
        _from(CALM, "k 128, H 10, beta 0.5, no clip", k=128),
    ),
    "density": (
        _from(CALM, "k 256, then 64 after 20%", density=((0.2, 64),)),
        _from(CALM, "k 64, then 256 after 80%", k=64, density=((0.8, 256),)),
        _from(CALM, "k 256, dense for the last 3%", density=((0.97, 4096),)),
        _from(CALM, "H 20, then 5 after 75%", h=20, h_late=((0.75, 5),)),
        _from(CALM, "H 5, then 20 after 25%", h=5, h_late=((0.25, 20),)),
    ),
    "outer": (
        _from(CALM, "H 16, Nesterov 0.7, 0.5", h=16, outer_lr=0.7, momentum=0.5),
        _from(CALM, "H 16, Nesterov 0.4, 0.8", h=16, outer_lr=0.4, momentum=0.8),
        _from(CALM, "H 16, rate 1.4", h=16, outer_lr=1.4),
        _from(CALM, "H 16, rate 0.7", h=16, outer_lr=0.7),
    ),
    # What is sent of a chunk.
    "bits": (
        _from(DENSER, "k 256, values in fp32", quantiser="fp32"),
        *(_from(CALM, f"{kind}", quantiser=kind) for kind in ("1 mean", "2 max", "2 dithered", "3 levels", "4 levels")),
    ),
    "transform": (_from(CALM, "DCT", transform="dct"), _from(CALM, "Hadamard", transform="hadamard")),
    "score": (_from(CALM, "magnitude over the root of the second moment", score="moment"),),
    # The inner side.
    "inner": (
        _from(CALM, "inner moments start anew each round", forget=True),
        _from(CALM, "Muon", inner="muon"),
    ),
    "overlap": (
        _from(CALM, "overlap of 2 steps", overlap=2),
        _from(CALM, "overlap of 5 steps", overlap=5),
        _from(CALM, "overlap of 5 steps, progress halved", overlap=5, keep=0.5),
        _from(CALM, "overlap of 5 steps, progress dropped", overlap=5, keep=0.0),
        _from(CALM, "streaming, 2 fragments", fragments=2),
        _from(CALM, "streaming, 5 fragments", fragments=5),
    ),
}

SPEEDS = (1.0, 0.5, 0.25, 0.125)
PEOPLE = (
    ("clean", {}),
    ("speeds 1, 1/2, 1/4, 1/8", {"speeds": SPEEDS}),
    ("one president a peer", {"own_data": True}),
    ("25% of peers die each hour", {"churn": 0.25 / 60}),
    ("a peer dies every 5 rounds of the swarm", {"churn": 0.05, "away": 2}),
    ("2 of 4 come at half time", {"late": 2}),
    ("speeds, churn and late joiners together", {"speeds": SPEEDS, "churn": 0.05, "away": 2, "late": 1}),
)
"""Conditions of the `people` study. A round is taken as a minute."""

PEOPLE_ROWS = tuple(Row(label, "cairn", {**BASE, "conditions": there}) for label, there in PEOPLE)

QUICK = (
    REFERENCE,
    Row("one peer alone", "alone"),
    Row("DiLoCo, H 30, fp32", "diloco", {"h": 30}),
    Row("Cairn sparse k 64, H 10", "cairn", {"h": 10, "k": 64}),
)
