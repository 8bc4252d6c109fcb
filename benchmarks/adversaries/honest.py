"""Honest updates on other machines: how far replays are from them, and how many a check calls bad.

A swarm of honest peers trains, with 12, 24 or 36 steps an update. Then each update is trained again from its state by
processes that compute floats in other ways: the machines. Each has two precisions, fp32 and bf16 by autocast as on a
GPU. An update as one machine makes it is replayed by each other machine, and judged by the product's rule: first in the
auditor's own precision, then in both. So there are 90 comparisons of each update.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.adversaries.lineup import SMALL, TINY, Profile
from benchmarks.adversaries.world import Judge, State, World, claimed, peer_key, scratch_folder
from peer.auditor.job import ClaimedUpdate
from peer.auditor.replay import Replayed, compare
from peer.errors import AuditError
from peer.training import inner_optimizer
from peer.training.device import choose_device
from protocol.outer import Contribution

PROFILES = {p.name: p for p in (TINY, SMALL)}
STEPS = (12, 24, 36, 36)
"""Inner steps of each peer's updates."""


@dataclass(frozen=True)
class Machine:
    """A way to compute floats. `environment`: variables that libraries read when a process starts."""

    device: str = "cpu"
    threads: int = 1
    piece_tokens: int = inner_optimizer.PIECE_TOKENS
    environment: Mapping[str, str] = field(default_factory=dict)


MACHINES = {
    "usual": Machine(),
    "2 threads": Machine(threads=2, environment={"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}),
    "pieces of a window": Machine(piece_tokens=1),
    "AVX2": Machine(
        environment={"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    ),
    "SSE4": Machine(
        environment={"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    ),
    "CUDA": Machine(device="cuda"),
}
CPUS = tuple(name for name, machine in MACHINES.items() if machine.device == "cpu")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Task:
    """An update to train: the file of its state, the windows accepted until then, and its claim."""

    name: str
    state: Path
    accepted: int
    peer: int
    first: int
    end: int

    @property
    def claim(self) -> ClaimedUpdate:
        return claimed(peer_key(self.peer), self.first, self.end)


def tasks_of(world: World, rounds: int, folder: Path) -> Iterator[Task]:
    """Train a swarm of honest peers. Yield the task of each update; its state is in the folder."""
    judge, state, accepted = Judge(world), world.genesis(), 0
    batch = world.profile.batch
    for round_ in range(rounds):
        path = folder / f"state{round_}.safetensors"
        save_file(state, path)
        made = []
        for peer, steps in enumerate(STEPS):
            first = round_ * steps * batch
            task = Task(f"{round_}-{peer}", path, accepted, peer, first, first + steps * batch)
            yield task
            made.append(Contribution(peer_key(peer), steps * batch, judge.honest(state, task.claim, accepted).blob))
        state = {name: values.clone() for name, values in state.items()}
        world.apply(state, made)
        accepted += sum(c.windows for c in made)


def train_tasks(world: World, machine: Machine, tasks: Sequence[Task], folder: Path) -> None:
    """Train every task in both precisions as a machine does, and write the blobs into the folder."""
    device = choose_device(machine.device, machine.threads)
    inner_optimizer.PIECE_TOKENS = machine.piece_tokens
    judge, loaded = Judge(world, device), (Path(), State())
    for task in tasks:
        if loaded[0] != task.state:
            loaded = task.state, load_file(task.state)
        for precision in PRECISIONS:
            made = judge.honest(loaded[1], task.claim, task.accepted, in_bf16=precision == "bf16")
            (folder / f"{task.name}-{precision}").write_bytes(made.blob)


def comparisons(world: World, tasks: Sequence[Task], folder: Path, machines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what each machine's replay says of each update of each other machine."""
    for task in tasks:
        blobs = {
            (m, p): (folder / m.replace(" ", "_") / f"{task.name}-{p}").read_bytes()
            for m, p in product(machines, PRECISIONS)
        }
        for author, auditor in product(blobs, blobs):
            if author == auditor:
                continue
            replays = [Replayed(blobs[auditor], {})]  # tied embeddings: each row has a gradient
            scores = {s.name: s for s in compare(world.codec, blobs[author], replays)}
            row = {"task": task.name, "steps": (task.end - task.first) // world.profile.batch,
                   "author": " ".join(author), "auditor": " ".join(auditor),
                   "signs": scores["signs"].value, "scale": scores["scale"].value, "verdict": "passed"}  # fmt: skip
            if any(not s.passed for s in scores.values()):
                machine, precision = auditor
                replays.append(Replayed(blobs[machine, "bf16" if precision == "fp32" else "fp32"], {}))
                try:
                    again = compare(world.codec, blobs[author], replays)
                    row["verdict"] = "failed" if any(not s.passed for s in again) else "passed second"
                except AuditError:
                    row["verdict"] = "no report"
            yield row


def measured(profile: Profile, seed: int, updates: int, machines: Sequence[str] = CPUS) -> dict[str, Any]:
    """Return the results of one swarm: counts of verdicts, and the least scores, by pair of machines."""
    world = World(profile, seed)
    rounds = -(-updates // len(STEPS))
    with scratch_folder() as name:
        folder = Path(name)
        tasks = list(tasks_of(world, rounds, folder))
        listing = folder / "tasks.json"
        listing.write_text(json.dumps([[t.name, str(t.state), t.accepted, t.peer, t.first, t.end] for t in tasks]))
        for machine_name in machines:
            machine = MACHINES[machine_name]
            into = folder / machine_name.replace(" ", "_")
            into.mkdir()
            command = [sys.executable, "-m", "benchmarks.adversaries.honest", profile.name, str(seed), machine_name]
            subprocess.run([*command, str(listing), str(into)], check=True, env={**os.environ, **machine.environment})
            print(f"{machine_name}: {len(tasks)} updates trained again", file=sys.stderr, flush=True)
        rows = list(comparisons(world, tasks, folder, machines))
    return {
        "profile": profile.name, "parameters": world.codec.layout.numel, "seed": seed, "updates": len(tasks),
        "comparisons": len(rows), "verdicts": _counts(rows), "pairs": _pairs(rows),
    }  # fmt: skip


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = dict.fromkeys(("passed", "passed second", "no report", "failed"), 0)
    for row in rows:
        found[row["verdict"]] += 1
    return found


def _pairs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each kind of pair and number of steps the least and the mean agreement."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds = sorted((row["author"].rsplit(" ", 1)[1], row["auditor"].rsplit(" ", 1)[1]))
        groups.setdefault((" and ".join(kinds), row["steps"]), []).append(row)
    return [
        {"precisions": kind, "steps": steps, "n": len(some),
         "signs_mean": sum(r["signs"] for r in some) / len(some), "signs_least": min(r["signs"] for r in some),
         "scale_least": min(r["scale"] for r in some), **_counts(some)}
        for (kind, steps), some in sorted(groups.items())
    ]  # fmt: skip


def main() -> int:
    """Train the listed tasks as one machine: the process that `measured` starts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adversaries.honest", description=main.__doc__)
    parser.add_argument("profile", choices=PROFILES)
    parser.add_argument("seed", type=int)
    parser.add_argument("machine", choices=MACHINES)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("into", type=Path)
    options = parser.parse_args()
    tasks = [Task(name, Path(state), *rest) for name, state, *rest in json.loads(options.tasks.read_text())]
    world = World(PROFILES[options.profile], options.seed)
    train_tasks(world, MACHINES[options.machine], tasks, options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
