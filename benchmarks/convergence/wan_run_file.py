"""A run.toml for a profile of the comparison: what Cairn's own processes are given over the emulated internet."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.convergence.setting import MIN_RATIO, WARMUP, Profile

Tables = dict[str, dict[str, Any]]

TIMERS = {
    "max_seconds": 60,
    "exchange_seconds": 15,
    "propose_seconds": 3,
    "patience_seconds": 30,
    "heartbeat_seconds": 0.5,
    "member_seconds": 10,
}
"""For faults. Heartbeats are frequent because the rounds of so small models are short: they tell when one is full."""


def tables_of(
    profile: Profile,
    *,
    prepared: Path,
    seed: int = 0,
    lr: float | None = None,
    steps: int | None = None,
    h: int = 30,
    codec: Mapping[str, Any] | None = None,
    outer: Mapping[str, Any] | None = None,
    round_: Mapping[str, Any] | None = None,
    points: int = 6,
) -> Tables:
    """Return the tables of a run.toml.

    Args:
        prepared: the folder of `cairn data prepare` with the profile's vocabulary.
        steps: inner steps of each peer in the whole run; the profile's if None. The schedule spans it.
        h: inner steps of each peer in one round.
        codec, outer, round_: fields of these tables, over the defaults.
        points: about how many checkpoints, which become the loss curve.
    """
    steps = steps or profile.steps
    total, target = steps * profile.step_tokens, h * profile.step_tokens
    rounds = math.ceil(total / target)
    return {
        "run": {"name": f"wan {profile.name}", "seed": seed, "total_tokens": total},
        "model": dict(profile.model),
        "data": {"prepared": str(prepared.resolve()), "window": profile.window},
        "inner": {
            "lr": lr or profile.lr,
            "batch": profile.batch,
            "schedule": {"kind": "cosine", "warmup_tokens": int(WARMUP * total), "min_ratio": MIN_RATIO},
        },
        "codec": {"kind": "sparse", **(codec or {})},
        "outer": dict(outer or {}),
        "round": {"target_tokens": target, **TIMERS, **(round_ or {})},
        "checkpoint": {"every": max(1, rounds // points), "keep": 3, "final_depth": 3},
    }


def toml(tables: Mapping[str, Any], name: str = "") -> str:
    """TOML of nested tables of plain values."""
    lines = [f"[{name}]"] if name else []
    lines += [f"{key} = {_value(value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    parts = [toml(v, f"{name}.{key}" if name else key) for key, v in tables.items() if isinstance(v, Mapping)]
    return "\n".join([*lines, *parts])


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool | int | float | str):
        return json.dumps(value, ensure_ascii=False)  # for these, JSON is TOML
    raise TypeError(f"{type(value).__name__} has no TOML form here")
