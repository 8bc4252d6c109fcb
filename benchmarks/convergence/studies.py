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

NESTEROV = {"optimiser": "nesterov", "lr": 0.7, "momentum": 0.9, "clip": "none"}

MAIN = (
    REFERENCE,
    Row("one peer alone", "alone"),
    Row("hivemind Optimizer, fp32", "synchronous", scale=2.0),
    Row("hivemind Optimizer, fp16", "synchronous", {"wire": "fp16"}),
    Row("hivemind Optimizer, PowerSGD rank 4", "synchronous", {"wire": "powersgd", "rank": 4}),
    Row("DiLoCo, H 30, fp32", "diloco", {"h": 30}),
    Row("DiLoCo, H 100, fp32", "diloco", {"h": 100}),
    Row("DiLoCo, H 30, fp16 (OpenDiLoCo)", "diloco", {"h": 30, "bits": 16}),
    Row("DeMo, top 8 of 64 x 64", "demo"),
    Row("Cairn none (fp32), H 10", "cairn", {"h": 10, "kind": "none", "beta": 0.0}),
    Row("Cairn int8, H 30, Nesterov", "cairn", {"h": 30, "kind": "int8", "outer": NESTEROV}),
    Row("Cairn sparse k 64, H 10", "cairn", {"h": 10, "k": 64}),
    Row("Cairn sparse k 256, H 10", "cairn", {"h": 10, "k": 256}),
    Row("Cairn sparse k 256, H 30", "cairn", {"h": 30, "k": 256}),
)


def _vary(name: str, values, **also) -> tuple[Row, ...]:
    return tuple(Row(f"{name} {v}", "variant", {**BASE, **also, name: v}) for v in values)


STUDIES: dict[str, tuple[Row, ...]] = {
    "base": (Row("base: k 64, H 10", "variant", BASE),),
    # How a coordinate is averaged, and what is done with the mean.
    "power": _vary("power", (0.0, 0.25, 0.5, 0.75)),
    "outer": (
        *_vary("outer_lr", (0.5, 0.7, 1.4)),
        Row("Nesterov 0.7, 0.9", "variant", {**BASE, "outer_lr": 0.7, "momentum": 0.9}),
        Row("Nesterov 0.5, 0.5", "variant", {**BASE, "outer_lr": 0.5, "momentum": 0.5}),
        Row("Nesterov 0.2, 0.9, over all", "variant", {**BASE, "outer_lr": 0.2, "momentum": 0.9, "power": 0.0}),
        Row("no norm clip", "variant", {**BASE, "clip": False}),
    ),
    "feedback": _vary("beta", (0.0, 0.8, 0.9, 0.98, 1.0)),
    # Where the bytes go: how many, how often, when.
    "rounds": (
        Row("k 64, H 5", "variant", {"k": 64, "h": 5}),
        Row("k 64, H 30", "variant", {"k": 64, "h": 30}),
        Row("k 128, H 10", "variant", {"k": 128, "h": 10}),
        Row("k 128, H 20", "variant", {"k": 128, "h": 20}),
        Row("k 256, H 10", "variant", {"k": 256, "h": 10}),
        Row("k 256, H 20", "variant", {"k": 256, "h": 20}),
        Row("k 256, H 30", "variant", {"k": 256, "h": 30}),
        Row("k 512, H 30", "variant", {"k": 512, "h": 30}),
        Row("k 4096, H 30", "variant", {"k": 4096, "h": 30}),
        Row("k 4096, H 10", "variant", {"k": 4096, "h": 10}),
    ),
    "density": (
        Row("k 256, then 32 after 20%", "variant", {"h": 10, "k": 256, "density": ((0.2, 32),)}),
        Row("k 32, then 256 after 80%", "variant", {"h": 10, "k": 32, "density": ((0.8, 256),)}),
        Row("k 64, dense for the last 3%", "variant", {**BASE, "density": ((0.97, 4096),)}),
        Row("H 20, then 5 after 75%", "variant", {"h": 20, "k": 64, "h_late": ((0.75, 5),)}),
        Row("H 5, then 20 after 25%", "variant", {"h": 5, "k": 64, "h_late": ((0.25, 20),)}),
    ),
    # What is sent of a chunk.
    "bits": _vary("quantiser", ("1 mean", "2 max", "2 dithered", "3 levels", "4 levels", "fp32")),
    "transform": _vary("transform", ("dct", "hadamard")),
    "score": _vary("score", ("moment",)),
    # The inner side.
    "inner": (
        Row("inner moments start anew each round", "variant", {**BASE, "forget": True}),
        Row("Muon", "variant", {**BASE, "inner": "muon"}),
    ),
    "overlap": (
        Row("overlap of 2 steps", "variant", {**BASE, "overlap": 2}),
        Row("overlap of 5 steps", "variant", {**BASE, "overlap": 5}),
        Row("overlap of 5 steps, progress halved", "variant", {**BASE, "overlap": 5, "keep": 0.5}),
        Row("overlap of 5 steps, progress dropped", "variant", {**BASE, "overlap": 5, "keep": 0.0}),
        Row("streaming, 2 fragments", "variant", {**BASE, "fragments": 2}),
        Row("streaming, 5 fragments", "variant", {**BASE, "fragments": 5}),
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
