"""The studies: rows of a method with its options. A study changes one thing at a time from BASE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NESTEROV: dict[str, Any] = {"optimizer": "nesterov", "lr": 1.0, "momentum": 0.5}

SIGNS: dict[str, Any] = {"h": 36, "kind": "sign", "beta": 0.5, "inner": "muon", "outer": NESTEROV}
"""The default, to which the studies and the longer runs led: Muon within, signs and a little momentum between."""

STATELESS: dict[str, Any] = {"h": 36, "kind": "sign", "beta": 0.5, "inner": "muon", "outer": {"lr": 1.4}}
"""Without momentum, which everyone would hold: an outer step that goes beyond the mean instead."""

BASE: dict[str, Any] = {
    "h": 36, "k": 4096, "quantiser": "1 mean", "beta": 0.5, "inner": "muon", "outer_lr": 1.4,
}  # fmt: skip
"""STATELESS in the words of `variants`: the point from which the studies depart."""


@dataclass(frozen=True)
class Row:
    """`scale`: bytes of this row for one of the method's (a wire format that does not change the training)."""

    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0


REFERENCE = Row("data-parallel AdamW, bf16", "synchronous")

PLAIN = {"clip": "none"}

# Rounding to fp16 does not show in the loss (a test holds it): those rows are the wider training, at half the bytes.
MAIN = (
    REFERENCE,
    Row("data-parallel Muon, bf16", "synchronous", {"optimizer": "muon"}),
    Row("one peer alone", "alone"),
    Row("hivemind Optimizer, fp32", "synchronous", scale=2.0),
    Row("hivemind Optimizer, fp16", "synchronous"),
    Row("hivemind Optimizer, PowerSGD rank 4", "synchronous", {"wire": "powersgd", "rank": 4}),
    Row("DiLoCo, H 30, fp32", "diloco", {"h": 30}),
    Row("DiLoCo, H 100, fp32", "diloco", {"h": 100}),
    Row("DiLoCo, H 30, fp16 (OpenDiLoCo)", "diloco", {"h": 30}, scale=0.5),
    Row("DiLoCo, H 30, outer 1.0, 0.5, fp32", "diloco", {"h": 30, "outer_lr": 1.0, "momentum": 0.5}),
    Row(
        "DiLoCo with Muon, H 30, outer 1.0, 0.5", "diloco", {"h": 30, "inner": "muon", "outer_lr": 1.0, "momentum": 0.5}
    ),
    Row("DeMo, top 8 of 64 x 64", "demo"),
    Row("Cairn none, AdamW, H 10", "cairn", {"h": 10, "kind": "none", "beta": 0.0}),
    Row("Cairn sparse k 64, AdamW, H 10", "cairn", {"h": 10, "k": 64}),
    Row("Cairn sparse k 256, AdamW, H 17", "cairn", {"h": 17, "k": 256, "beta": 0.5, "outer": PLAIN}),
    Row("Cairn sparse k 256, Muon, H 17", "cairn", {"h": 17, "k": 256, "beta": 0.5, "inner": "muon"}),
    Row("Cairn sign, Muon, H 36, Nesterov 0.5", "cairn", SIGNS),
    Row("Cairn sign, Muon, H 36, outer rate 1.4", "cairn", STATELESS),
    Row("Cairn sign, Muon, H 54, outer rate 1.4", "cairn", {**STATELESS, "h": 54}),
)


NOT_TUNED = {
    row.label for row in MAIN
    if row.method == "demo" or row.options.get("wire") == "powersgd"
    or (row.method == "diloco" and row.options.get("inner") != "muon")
}  # fmt: skip
"""Rows with a search for the learning rate alone, whose losses say nothing about their methods."""


def _from(base: Mapping[str, Any], label: str, **changes: Any) -> Row:
    return Row(label, "variant", {**base, **changes})


SPARSE: dict[str, Any] = {"h": 17, "k": 256, "beta": 0.5, "inner": "muon"}
"""About the bytes of BASE, by the largest coordinates."""

STUDIES: dict[str, tuple[Row, ...]] = {
    "base": (Row("signs, H 36, beta 0.5, outer rate 1.4, Muon", "variant", BASE),),
    # Different encodings of a block, of about the same bytes in all.
    "bits": (
        _from(BASE, "2 bits, H 72", quantiser="2 levels", h=72),
        _from(BASE, "2 bits by the chunk's maximum, H 72", quantiser="2 max", h=72),
        _from(BASE, "2 bits dithered, H 72", quantiser="2 dithered", h=72),
        _from(BASE, "3 bits, H 108", quantiser="3 levels", h=108),
        _from(BASE, "4 bits, H 144", quantiser="4 levels", h=144),
        _from(BASE, "fp32, H 36 (32 times the bytes)", quantiser="fp32", beta=0.0),
        _from(BASE, "the embedding's 256 largest, 2 bits", embedding_k=256),
        _from(BASE, "the 512 largest, 2 bits, H 32", quantiser="2 levels", k=512, h=32),
    ),
    # How a coordinate is averaged, and what becomes of what was not sent: of the largest 256.
    "sparse": (
        _from(SPARSE, "the 256 largest, H 17, mean over senders"),
        _from(SPARSE, "between", power=0.5),
        _from(SPARSE, "mean over all, beta 0.95", power=0.0, beta=0.95),
        _from(SPARSE, "beta 0.95", beta=0.95),
        _from(SPARSE, "absorbs what others did, beta 0.95", beta=0.95, absorb="same"),
        _from(SPARSE, "the 512 largest, 64 after half of the run", k=512, density=((0.5, 64),)),
        _from(SPARSE, "DCT", transform="dct"),
        _from(SPARSE, "Hadamard", transform="hadamard"),
        _from(SPARSE, "the 64 largest, H 10, beta 0.7", k=64, h=10, beta=0.7),
        _from(SPARSE, "the 64 largest, H 36, beta 0.7", k=64, h=36, beta=0.7),
    ),
    "feedback": (
        _from(BASE, "beta 0 (nothing is kept)", beta=0.0),
        _from(BASE, "beta 0.8", beta=0.8),
        _from(BASE, "beta 1", beta=1.0),
        _from(BASE, "the own model keeps what was not sent", carry=1.0),
        _from(BASE, "no clip", clip=False),
        _from(BASE, "AdamW's moments start at 0 each round", forget=True),
    ),
    "outer": (
        _from(BASE, "rate 1", outer_lr=1.0),
        _from(BASE, "rate 1.8", outer_lr=1.8),
        _from(BASE, "Nesterov (1.0, 0.3)", outer_lr=1.0, momentum=0.3),
        _from(BASE, "Nesterov (1.0, 0.5)", outer_lr=1.0, momentum=0.5),
        _from(BASE, "Nesterov (1.0, 0.7)", outer_lr=1.0, momentum=0.7),
    ),
    # Different lengths of rounds, and changes of length during a run.
    "rounds": (
        _from(BASE, "H 9", h=9),
        _from(BASE, "H 18", h=18),
        _from(BASE, "H 72", h=72),
        _from(BASE, "H 54, then 18 after 75%", h=54, h_late=((0.75, 18),)),
    ),
    # The inner side.
    "inner": (
        _from(BASE, "AdamW", inner="adamw"),
        _from(SPARSE, "AdamW, by magnitude over the root of the second moment", inner="adamw", score="moment"),
    ),
    "overlap": (
        _from(BASE, "overlap of 4 steps", overlap=4),
        _from(BASE, "overlap of 12 steps", overlap=12),
        _from(BASE, "overlap of 12 steps, progress dropped", overlap=12, keep=0.0),
        _from(BASE, "streaming, 2 fragments", fragments=2),
    ),
}

SPARSE_ROUNDS: dict[str, Any] = {"h": 17, "k": 256, "beta": 0.5, "inner": "muon"}
REDUCED_ROWS = (
    Row("signs, H 36", "cairn", SIGNS),
    Row("signs, H 36, reduced", "cairn", {**SIGNS, "reduce": True}),
    Row("the 256 largest, H 17", "cairn", SPARSE_ROUNDS),
    Row("the 256 largest, H 17, reduced", "cairn", {**SPARSE_ROUNDS, "reduce": True}),
)
"""The cost of rounding a round's sums, and of sending the remainder one round later."""

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

PEOPLE_ROWS = tuple(Row(label, "cairn", {**STATELESS, "conditions": there}) for label, there in PEOPLE)

MOMENTUM_BASE: dict[str, Any] = {**BASE, "outer_lr": 1.0, "momentum": 0.5}
"""SIGNS in the words of `variants`."""

RESTORED = _from(MOMENTUM_BASE, "the norm restored", restore=True, outer_lr=1.0, momentum=0.0)
METHOD_ROWS = (
    _from(MOMENTUM_BASE, "the default"),
    _from(MOMENTUM_BASE, "H 9, then 54 after 10%", h=9, h_late=((0.1, 54),)),
    _from(MOMENTUM_BASE, "H 18, then 60 after 30%", h=18, h_late=((0.3, 60),)),
    _from(MOMENTUM_BASE, "H 12, 24, 48 and 96, from 15%, 40%, 70%", h=12, h_late=((0.15, 24), (0.4, 48), (0.7, 96))),
    _from(MOMENTUM_BASE, "Muon's momentum 0.98", muon_momentum=0.98),
    _from(MOMENTUM_BASE, "one peer's update alone in the first 3 rounds", lead=3),
    RESTORED,
    _from(MOMENTUM_BASE, "outer rate 0.65 in the last fifth", outer_late=((0.8, 0.65),)),
)
"""Changes that might learn better than the default."""

STREAM_ROWS = (
    METHOD_ROWS[0],
    _from(MOMENTUM_BASE, "overlap of 12 steps", overlap=12),
    _from(MOMENTUM_BASE, "6 fragments, 2 steps", fragments=6, overlap=2),
    _from(MOMENTUM_BASE, "9 fragments, 2 steps", fragments=9, overlap=2),
    _from(MOMENTUM_BASE, "12 fragments, 1 step", fragments=12, overlap=1),
    _from(MOMENTUM_BASE, "12 fragments, 2 steps", fragments=12, overlap=2),
    _from(MOMENTUM_BASE, "18 fragments, 1 step", fragments=18, overlap=1),
)
"""Fragments that are exchanged one after the other during a round, each of them that many steps late."""

MISSED = 0.25
MISSED_ROWS = (
    METHOD_ROWS[0],
    *(
        _from(MOMENTUM_BASE, f"a quarter of updates missed, put back {how}", misses=MISSED, returns=how)
        for how in ("never", "decayed", "whole")
    ),
)
"""Updates that missed their round, and return to the error feedback."""

ROBUST_ROWS = tuple(
    _from(MOMENTUM_BASE, label + told, hostile=hostile, **how)
    for told, hostile in (("", 0.0), (", a quarter hostile", 0.25))
    for label, how in (
        ("the default", {}),
        ("the sign of the majority, rate 1", {"aggregation": "majority", "momentum": 0.0}),
        ("the trimmed mean", {"aggregation": "trimmed"}),
        ("centred clipping", {"aggregation": "centred"}),
    )
)
"""Ways to aggregate that are to stand hostile updates, and their cost where nobody is hostile."""

FEWEST_ROWS = (
    METHOD_ROWS[0],
    _from(MOMENTUM_BASE, "signs, H 144", h=144),
    _from(BASE, "the 128 largest, 1 bit, H 36, beta 0.95", k=128, beta=0.95),
    _from(BASE, "the 128 largest, 1 bit, H 36, beta 0.95, mean over all", k=128, beta=0.95, power=0.0),
    _from(BASE, "the 128 largest of a DCT, 1 bit, H 36, beta 0.95", k=128, beta=0.95, transform="dct"),
    _from(BASE, "the 64 largest, 1 bit, H 20, beta 0.95", k=64, h=20, beta=0.95),
)
"""At least 2,000 times fewer bytes than bf16 gradients."""

DEMO_ROWS = tuple(
    Row(f"DeMo, top {k} of 64 x 64, decay {decay}", "demo", {"k": k, "decay": decay})
    for decay in (0.999, 0.99, 0.9)
    for k in (8, 32)
)
"""DeMo with decays that suit a run of 750 steps, and as published."""

DILOCO_ROWS = (
    REFERENCE,
    MAIN[1],
    *(
        Row(f"DiLoCo{name}, H 15, outer {lr}, {momentum}", "diloco",
            {"h": 15, "inner": inner, "outer_lr": lr, "momentum": momentum})
        for name, inner in (("", "adamw"), (" with Muon", "muon"))
        for lr, momentum in ((0.7, 0.9), (0.4, 0.9), (1.0, 0.5), (1.0, 0.0))
    ),
    Row("the default, H 15", "cairn", {**SIGNS, "h": 15}),
)  # fmt: skip
"""DiLoCo with its outer step searched: of 100 rounds in the profile `tiny`."""

GAP_ROWS = (
    MAIN[1],
    Row("the default", "cairn", SIGNS),
    RESTORED,
)
"""The default beside data-parallel Muon, for longer runs and more peers: each row with its own learning rate."""

MOMENTUM_ROWS = (
    GAP_ROWS[1],
    Row("momentum 0.7", "cairn", {**SIGNS, "outer": {**NESTEROV, "momentum": 0.7}}),
    Row("momentum 0.9, rate 0.3", "cairn", {**SIGNS, "outer": {**NESTEROV, "momentum": 0.9, "lr": 0.3}}),
    Row("no momentum, rate 1.4", "cairn", STATELESS),
)
"""More and less memory between the peers, for longer runs."""

OWN_ROWS = {"people": PEOPLE_ROWS, "reduced": REDUCED_ROWS, "method": METHOD_ROWS, "streaming": STREAM_ROWS,
            "missed": MISSED_ROWS, "gap": GAP_ROWS, "robust": ROBUST_ROWS, "fewest": FEWEST_ROWS, "demo": DEMO_ROWS,
            "diloco": DILOCO_ROWS, "momentum": MOMENTUM_ROWS}  # fmt: skip
"""Studies with a base of their own: each is set beside its first row."""

SEARCHED = ("inner", "gap", "demo", "diloco")
"""Studies whose rows have a search each for their learning rate."""

QUICK = (
    REFERENCE,
    Row("one peer alone", "alone"),
    Row("DiLoCo, H 30, fp32", "diloco", {"h": 30}),
    Row("Cairn sparse k 64, H 10", "cairn", {"h": 10, "k": 64}),
    Row("Cairn sign, Muon, H 30", "cairn", {**SIGNS, "h": 30}),
)
