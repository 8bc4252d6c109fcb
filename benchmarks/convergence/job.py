"""One training of one method: what it is, how it is run, what comes out. Results are kept in files and used again."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.local_steps import Alone, DeMo, DiLoCo
from benchmarks.convergence.method import Method
from benchmarks.convergence.setting import PROFILES, Profile, Setting
from benchmarks.convergence.swarm import Cairn
from benchmarks.convergence.synchronous import Synchronous
from benchmarks.convergence.variants import Variant
from benchmarks.exchange_wan.job import publish

METHODS: dict[str, Callable[..., Method]] = {
    "synchronous": Synchronous,
    "alone": Alone,
    "diloco": DiLoCo,
    "demo": DeMo,
    "cairn": Cairn,
    "variant": Variant,
}

VERSION = 2
"""Version of a result's meaning; older files are not used."""

EVALUATIONS = 20
FINAL_WINDOWS = 4096
CURVE_WINDOWS = 256


@dataclass(frozen=True)
class Job:
    """A training: `options` are the method's own. `steps`: instead of the profile's, for a look. Equal by `key`."""

    profile: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1e-3
    seed: int = 0
    steps: int | None = None

    @cached_property
    def key(self) -> str:
        text = json.dumps([VERSION, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def __hash__(self) -> int:
        return hash(self.key)

    def size(self) -> Profile:
        profile = PROFILES[self.profile]
        return profile if self.steps is None else Profile(**{**asdict(profile), "steps": self.steps})


@dataclass(frozen=True)
class Result:
    """The result of a job. `curve`: [tokens, validation loss, payload bytes, bytes up, exchanges] at each evaluation.

    `loss` is that of the final state, on more windows than the curve's; infinite when training diverged. `payload` and
    `up` are bytes a peer over the whole training, `seconds` this machine's, all peers one after the other.
    """

    job: Job
    loss: float
    tokens: int
    payload: float
    up: float
    exchanges: int
    seconds: float
    curve: list[list[float]]
    compiled: bool = False


def run(job: Job, *, compiled: bool = False, tell: Callable[[str], None] = lambda text: None) -> Result:
    """Train. Raises ValueError or pydantic's ValidationError for options that the method does not have."""
    profile = job.size()
    setting = Setting.of(profile, job.seed, compiled=compiled)
    began = time.monotonic()
    method = METHODS[job.method](setting, job.lr, **job.options)
    judge = setting.model().eval()
    targets = dict(judge.named_parameters())
    curve: list[list[float]] = []

    @torch.no_grad()
    def loss(most: int) -> float:
        at, state = 0, method.state()
        for t in setting.layout.tensors:
            targets[t.name].copy_(state[at : at + t.numel].view(t.shape))
            at += t.numel
        return setting.loss(judge, most)

    every = max(1, profile.steps // EVALUATIONS)
    final = math.inf
    try:
        for number in range(profile.steps):
            if number % every == 0:
                found = loss(CURVE_WINDOWS)
                curve.append([number * profile.step_tokens, found, method.payload, method.up, method.exchanges])
                tell(f"{job.method} {dict(job.options)} lr {job.lr:g}: step {number}, loss {found:.4f}")
            method.step(number)
        method.finish()
        final = loss(FINAL_WINDOWS)
        curve.append([profile.tokens, loss(CURVE_WINDOWS), method.payload, method.up, method.exchanges])
    except FloatingPointError as e:
        tell(f"{job.method} {dict(job.options)} lr {job.lr:g}: diverged: {e}")
    if not math.isfinite(final):
        final = math.inf
    took = time.monotonic() - began
    return Result(job, final, profile.tokens, method.payload, method.up, method.exchanges, took, curve, compiled)


# -- results on disk -------------------------------------------------------------------------------------------


def keep(folder: Path, result: Result) -> None:
    """Write a result, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    publish(folder / f"{result.job.key}.json", json.dumps(asdict(result)) + "\n")


def kept(folder: Path, job: Job) -> Result | None:
    """Return the result of an equal job; None if there is none."""
    path = folder / f"{job.key}.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    return Result(job=job, **{k: v for k, v in found.items() if k != "job"})
