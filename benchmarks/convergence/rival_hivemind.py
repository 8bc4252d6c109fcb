"""The rival over the very same emulated internet: `hivemind.Optimizer` as its users run it, in real processes.

    python -m benchmarks.convergence.rival_hivemind [--profile tiny] [--variant fp32] [--steps 30] [--json FILE]

Its rounds cost seconds each, so that a whole training would take hours. A few global steps are measured: seconds and
bytes a step, and whether the peers used the average of their gradients. Values are compared, since the averager's own
report is not trusted. The loss after these steps must be the simulator's (`synchronous`), whose curve then stands for
the rest: time to a loss is its steps times these seconds.

Variants (see VARIANTS): fp32 is the default. fp16 and uint8 compress gradients and parameters. powersgd4 and
powersgd8 send low-rank factors. albert is its largest example, with 5 s of matchmaking (its default for the open
internet was 15 s). delayed averages in the background, one step stale. large has a global batch 32 times as large, as
its guide advises. `--free`: peers train on while they wait for others, so batches are larger than asked for.

JSON: the fields of `benchmarks.report.provenance` and of `RivalResult`. Needs root and iproute2 (see tests/wan).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.convergence.hivemind_job import Job
from benchmarks.convergence.job import CURVE_WINDOWS
from benchmarks.convergence.setting import PROFILES, Profile, Setting
from benchmarks.convergence.wan_hosts import BenchError, Hosts, Wire, hosts
from benchmarks.report import provenance, save
from protocol.errors import CairnError
from tests.wan import star, why_not

PORT = 7000
START_SECONDS, STOP_SECONDS = 120.0, 20.0
CLOSE = 0.1
"""Of the length of the mean sketch: what peers used is the same, or is the mean of what they gave, within this."""


@dataclass(frozen=True)
class Variant:
    """`simulated`: what the simulator's synchronous method calls this wire ("" for none), and the rank of PowerSGD."""

    options: Mapping[str, Any]
    compression: str = "none"
    power_rank: int = 0
    micro: int = 1
    simulated: str = "fp32"


TIMEOUTS = {"averager_opts": {"request_timeout": 1.0}}
"""It warns unless this is less than the matchmaking time, and its default is 3 s."""

LOCAL = {"matchmaking_time": 3.0, "averaging_timeout": 15.0, **TIMEOUTS}
"""As hivemind's quickstart (3 s); "3-5s for small local runs", says its guide, and "10-15s for training over the
internet": 3 is the kindest that it names."""

ALBERT = {"matchmaking_time": 5.0, "averaging_timeout": 60.0}
DELAYED = {"delay_optimizer_step": True, "delay_grad_averaging": True, "offload_optimizer": True}

VARIANTS = {
    "fp32": Variant(LOCAL),
    "fp16": Variant(LOCAL, "fp16", simulated="fp16"),
    "uint8": Variant(LOCAL, "uint8", simulated=""),
    "powersgd4": Variant(LOCAL, power_rank=4, simulated="powersgd"),
    "powersgd8": Variant(LOCAL, power_rank=8, simulated="powersgd"),
    "albert": Variant(ALBERT, "fp16", simulated="fp16"),
    "delayed": Variant({**ALBERT, **DELAYED}, "fp16", simulated=""),
    "defaults": Variant({}, simulated="fp32"),
    "large": Variant(LOCAL, "fp16", micro=32, simulated="fp16"),
}


@dataclass(frozen=True)
class Point:
    """Validation loss after a number of global steps; `simulated` is the simulator's, None if it has no such method."""

    step: int
    loss: float
    simulated: float | None


@dataclass(frozen=True)
class RivalResult:
    """One run. Steps are global; seconds and bytes are of the steps after the first two.

    `averaged` is the share of (step, peer) in which the used gradient was the mean of all peers' gradients. It is
    None if the variant does not average exactly (PowerSGD, delayed, 8 bits). `agreed`: of steps, in which all peers
    used the same.
    `missed`: of (step, peer), in which a peer had no part. `model_difference`: the largest difference of two peers'
    last parameters, relative to the mean's norm. `transport_floor`: 2 (n - 1) / n times the gradient's bytes up the
    line, and two round trips.
    """

    variant: str
    profile: str
    parameters: int
    peers: int
    mbit: float
    rtt_ms: float
    options: dict[str, Any]
    compression: str
    power_rank: int
    free: bool
    target_windows: int
    steps: int
    windows_per_step: float
    seconds_per_step: float
    seconds_per_step_p90: float
    averaging_seconds: float
    compute_seconds: float
    transport_floor: float
    wire_up_per_step: float
    wire_down_per_step: float
    wire_joining: float
    averaged: float | None
    agreed: float
    missed: float
    worst_distance: float
    model_difference: float
    loss: float
    curve: list[Point]
    total_seconds: float
    router_late_ms: float
    load: list[float]
    steps_seconds: list[float] = field(repr=False, default_factory=list)


def run(
    variant: str = "fp32",
    profile: Profile = PROFILES["tiny"],
    *,
    seed: int = 0,
    lr: float | None = None,
    steps: int = 30,
    free: bool = False,
    micro: int | None = None,
    mbit: float = 100.0,
    rtt_ms: float = 100.0,
    seconds: float = 300.0,
    simulate: bool = True,
    keep: Path | None = None,
) -> RivalResult:
    """Run a number of global steps of a variant. Raises BenchError."""
    v = VARIANTS[variant]
    setting = Setting.of(profile, seed)
    names = [f"p{i + 1}" for i in range(profile.peers)]
    micro, lr = micro or v.micro, lr or profile.lr
    simulated = _simulated(v, setting, lr, steps) if simulate and v.simulated and micro == 1 and not free else {}
    before = set(Path("/tmp").glob("hivemind-*.sock"))
    try:
        with hosts(star(names, mbit=mbit, rtt_ms=rtt_ms), ttl=seconds + START_SECONDS + 120, keep=keep) as world:
            return _Run(world, variant, setting, names, lr, steps, free, micro, mbit, rtt_ms, seconds).result(simulated)
    finally:
        for left in set(Path("/tmp").glob("hivemind-*.sock")) - before:
            _remove_if_dead(left)


class _Run:
    """The parts of `run`, in the order in which they happen."""

    def __init__(
        self, world: Hosts, variant: str, setting: Setting, names: list[str], lr: float, steps: int, free: bool,
        micro: int, mbit: float, rtt_ms: float, seconds: float,
    ):  # fmt: skip
        self.world, self.variant, self.setting, self.names = world, variant, setting, names
        self.lr, self.steps, self.free, self.micro = lr, steps, free, micro
        self.mbit, self.rtt_ms, self.seconds = mbit, rtt_ms, seconds
        self.marks: list[tuple[int, dict[str, Wire]]] = []
        """(the least step that every peer has done, bytes so far)."""

    def result(self, simulated: dict[int, float]) -> RivalResult:
        v, folder = VARIANTS[self.variant], self.world.folder
        job = Job(
            profile=asdict(self.setting.profile), seed=self.setting.seed, lr=self.lr, steps=self.steps,
            folder=str(folder), prepared=str(self.setting.corpus.prepared.folder),
            addresses=[f"/ip4/{self.world.ip(n)}/tcp/{PORT}" for n in self.names], options=dict(v.options),
            compression=v.compression, power_rank=v.power_rank, free=self.free, micro=self.micro,
            save_every=_every(self.steps),
        )  # fmt: skip
        job.write(folder / "job.json")
        began = time.monotonic()
        for i, name in enumerate(self.names):
            command = ["-m", "benchmarks.convergence.hivemind_peer", str(folder / "job.json"), str(i)]
            self.world.start(name, [sys.executable, *command])
        numbers = range(len(self.names))
        self.world.until(
            "every peer is ready", lambda: all((folder / f"ready-{i}").exists() for i in numbers), START_SECONDS
        )
        joining = self.world.wire()
        (folder / "go").touch()
        self.world.until("the steps are done", self._done, self.seconds, every=0.25)
        total, late = time.monotonic() - began, self.world.wan.counters().late_ms
        (folder / "stop").touch()
        end = time.monotonic() + STOP_SECONDS
        for process in self.world.running:
            process.wait(max(0.1, end - time.monotonic()))
        return self._judge(simulated, joining, total, late)

    def _lines(self, number: int) -> list[dict[str, Any]]:
        file = self.world.folder / f"steps-{number}.jsonl"
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]

    def _done(self) -> bool:
        least = min((lines[-1]["to"] if (lines := self._lines(i)) else 0) for i in range(len(self.names)))
        if least > (self.marks[-1][0] if self.marks else 0):
            self.marks.append((least, self.world.wire()))
        return all((self.world.folder / f"done-{i}").exists() for i in range(len(self.names)))

    def _judge(self, simulated: dict[int, float], joining: dict[str, Wire], total: float, late: float) -> RivalResult:
        v, profile, numel = VARIANTS[self.variant], self.setting.profile, self.setting.layout.numel
        lines = [self._lines(i) for i in range(len(self.names))]
        settled = [m for m in self.marks if m[0] >= 2]
        if len(settled) < 2:
            raise BenchError("too few global steps to measure: ask for more with --steps")
        (first, at_first), (last, at_last) = settled[0], settled[-1]
        wire = [at_last[n] - at_first[n] for n in self.names]
        gaps = [b["at"] - a["at"] for peer in lines for a, b in zip(peer[1:], peer[2:], strict=False)]
        exact = not (v.power_rank or v.options.get("delay_grad_averaging") or v.compression not in ("none", "fp16"))
        averaged, agreed, missed, worst = judge_sketches(lines, self.steps, exact=exact)
        windows = [
            sum(line["windows"] for peer in lines for line in peer if line["step"] == s) for s in range(self.steps)
        ]
        curve = self._curve(simulated)
        size = _gradient_bytes(v, self.setting)
        return RivalResult(
            variant=self.variant, profile=profile.name, parameters=numel, peers=profile.peers, mbit=self.mbit,
            rtt_ms=self.rtt_ms, options=dict(v.options), compression=v.compression, power_rank=v.power_rank,
            free=self.free, target_windows=self.micro * profile.batch * profile.peers, steps=self.steps,
            windows_per_step=mean(windows), seconds_per_step=median(gaps),
            seconds_per_step_p90=float(np.quantile(gaps, 0.9)),
            averaging_seconds=median(line["averaging"] for peer in lines for line in peer[2:]),
            compute_seconds=median(line["compute"] for peer in lines for line in peer[2:]),
            transport_floor=2 * (profile.peers - 1) / profile.peers * size * 8 / (self.mbit * 1e6)
            + 2 * self.rtt_ms / 1e3,
            wire_up_per_step=median(w.up for w in wire) / (last - first),
            wire_down_per_step=median(w.down for w in wire) / (last - first),
            wire_joining=median(joining[n].down for n in self.names),
            averaged=averaged if exact else None, agreed=agreed, missed=missed, worst_distance=worst,
            model_difference=self._model_difference(), loss=curve[-1].loss, curve=curve, total_seconds=total,
            router_late_ms=late, load=[round(x, 2) for x in os.getloadavg()],
            steps_seconds=[round(g, 3) for g in gaps],
        )  # fmt: skip

    def _curve(self, simulated: dict[int, float]) -> list[Point]:
        """Losses of the first peer's saved models, beside the simulator's of the same steps."""
        saved = {int(p.stem.split("-")[1]): p for p in sorted(self.world.folder.glob("model-*.safetensors"))}
        saved[self.steps] = self.world.folder / "last-0.safetensors"
        model = self.setting.model()
        points = [Point(0, self.setting.loss(model, CURVE_WINDOWS), simulated.get(0))]
        for step, file in sorted(saved.items()):
            model.load_state_dict(load_file(file), strict=False)
            points.append(Point(step, self.setting.loss(model, CURVE_WINDOWS), simulated.get(step)))
        return points

    def _model_difference(self) -> float:
        flat = []
        for i in range(len(self.names)):
            tensors = load_file(self.world.folder / f"last-{i}.safetensors")
            flat.append(torch.cat([tensors[n].reshape(-1) for n in sorted(tensors)]))
        middle = torch.stack(flat).mean(0)
        return max(float((a - b).norm() / middle.norm()) for a in flat for b in flat)


def _gradient_bytes(variant: Variant, setting: Setting) -> float:
    """Return the number of values to reduce in a step: all, or PowerSGD's low-rank factors where they save half."""
    width, rank = {"none": 4.0, "fp16": 2.0}.get(variant.compression, 1.0), variant.power_rank
    values = 0
    for tensor in setting.layout.tensors:
        low = rank * sum(tensor.shape)
        values += low if rank and len(tensor.shape) == 2 and low < tensor.numel / 2 else tensor.numel
    return width * values


def _every(steps: int) -> int:
    """Return the number of steps between two points of the curve."""
    return max(1, steps // 6)


def _simulated(variant: Variant, setting: Setting, lr: float, steps: int) -> dict[int, float]:
    """Return the simulator's losses after these steps: synchronous training with the same wire, batch and schedule."""
    from benchmarks.convergence.synchronous import DEFAULT_RANK, Synchronous

    rank = variant.power_rank or DEFAULT_RANK
    method = Synchronous(setting, lr, wire=variant.simulated, rank=rank)
    found = {}
    for step in range(steps + 1):
        if step % _every(steps) == 0 or step == steps:
            found[step] = setting.loss(method.replica.model, CURVE_WINDOWS)
        if step < steps:
            method.step(step)
    return found


def judge_sketches(
    lines: list[list[dict[str, Any]]], steps: int, *, exact: bool = True
) -> tuple[float, float, float, float]:
    """(averaged, agreed, missed, worst): see `RivalResult`. `lines`: of each peer, as `hivemind_peer` writes them.

    With `exact` False the gradient used is not meant to be the mean of this step's, and only agreement is judged.
    """
    averaged = agreed = missed = 0
    worst = 0.0
    for step in range(steps):
        here = [next((line for line in peer if line["step"] == step), None) for peer in lines]
        found = [line for line in here if line is not None and line["used"] is not None]
        missed += len(here) - len(found)
        given = sum(line["windows"] for line in found)
        if not given:
            continue
        mean_given = np.array([line["windows"] * np.array(line["own"]) for line in found]).sum(axis=0) / given
        used = [np.array(line["used"]) for line in found]
        agreed += len(found) == len(here) and all(_distance(a, b) <= CLOSE for a in used for b in used)
        if exact:
            distances = [_distance(u, mean_given) for u in used]
            averaged += sum(d <= CLOSE for d in distances)
            worst = max(worst, *distances)
    peers = len(lines)
    return averaged / (steps * peers), agreed / steps, missed / (steps * peers), worst


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / max(1e-12, float(np.linalg.norm(b))))


def _remove_if_dead(path: Path) -> None:
    """Remove a daemon's socket file that nobody listens on any more."""
    import socket

    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            pass


def show(r: RivalResult) -> str:
    """Return a few lines for a terminal."""
    simulated = "" if r.curve[-1].simulated is None else f" (simulator: {r.curve[-1].simulated:.4f})"
    return f"""\
hivemind.Optimizer, {r.variant}: {r.parameters:,} parameters, {r.peers} peers, {r.mbit:g} Mbit/s, {r.rtt_ms:g} ms
options     {r.options}, compression {r.compression}, PowerSGD rank {r.power_rank or "-"}, free {r.free}
seconds     {r.seconds_per_step:.2f} a global step, p90 {r.seconds_per_step_p90:.2f} (compute {r.compute_seconds:.2f}, \
averaging {r.averaging_seconds:.2f}, floor {r.transport_floor:.2f})
batch       {r.windows_per_step:.0f} windows a step of {r.target_windows} asked
wire        {r.wire_up_per_step:,.0f} bytes up and {r.wire_down_per_step:,.0f} down a step and peer
averaged    {"-" if r.averaged is None else f"{r.averaged:.1%}"} right, {r.agreed:.1%} of steps alike, \
{r.missed:.1%} missed; worst distance {r.worst_distance:.3f}
models      differ by {r.model_difference:.2e}
loss        {r.curve[0].loss:.4f} -> {r.loss:.4f} after {r.steps} steps{simulated}
load        {r.load}, router late by {r.router_late_ms:.1f} ms"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence.rival_hivemind", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--variant", choices=VARIANTS, default="fp32")
    parser.add_argument("--profile", choices=PROFILES, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30, help="global steps")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--micro", type=int, help="times the profile's batch that are a peer's share of a global batch")
    parser.add_argument("--free", action="store_true", help="train on while others are waited for")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long the steps may take")
    parser.add_argument("--no-simulator", action="store_true", help="do not simulate the same steps beside it")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and models")
    parser.add_argument("--json", type=Path, metavar="FILE")
    o = parser.parse_args()
    if reason := why_not():
        print(f"no emulated internet: {reason}", file=sys.stderr)
        return 2
    about = provenance("convergence.rival_hivemind", seeds=[o.seed])
    try:
        result = run(
            o.variant, PROFILES[o.profile], seed=o.seed, lr=o.lr, steps=o.steps, free=o.free, micro=o.micro,
            mbit=o.mbit, rtt_ms=o.rtt_ms, seconds=o.seconds, simulate=not o.no_simulator, keep=o.keep,
        )  # fmt: skip
    except CairnError as e:
        print(f"failed: {e}", file=sys.stderr)
        return 1
    print(show(result))
    if o.json:
        save(o.json, about | asdict(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
