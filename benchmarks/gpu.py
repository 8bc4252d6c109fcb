"""All that only a GPU can show, in nine minutes: on a machine with one CUDA device, Python and no network.

The machine needs a virtual environment with Cairn's packages, and PyTorch for CUDA. Prepare wheels for it on another
machine of the same Python and system, carry the folder, and install from it:

    python3.11 -m pip download --dest wheels '.[test]'           # 4 to 5 GB, of which CUDA's libraries are most
    python3.11 -m venv .venv && .venv/bin/pip install --no-index --find-links wheels --editable '.[test]'
    .venv/bin/python -m benchmarks.gpu --json gpu.json

Each part is a process of its own with a limit, so one that fails or hangs costs no other. Parts for which no time
remains are named as left out. `--pretend` plays all parts on the CPU with small models: it shows that they run.

Parts. `tests`: pytest -m gpu, bit-equality of codecs, sums and states between CPU and CUDA. `trainer`: the trainer
beside a bare loop, eager and compiled; tokens/s, MFU, peak memory, announce and apply. `swarm`: a coordinator and two
peers on the device, three rounds, states compared. `replays`: honest updates trained on the device and on a CPU, each
replayed by the other. `adapters`: what the device holds of a base of 230 million parameters in each dtype, beside what
`cairn run plan` counts. Parts that measure no speed run at once, before the others. Several ranks need several GPUs.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  device: name, memory (bytes), capability, cuda, driver; null with --pretend
  parts: a list, each with part, seconds, outcome ("done", "failed", "left out"), why (of the last two), result (null
    or: the JSON of benchmarks.trainer for `trainer`; passed, failed, skipped, errors for `tests`; rounds,
    applied_seconds, state_round, states of both peers for `swarm`; an entry of `honest` of benchmarks.adversaries for
    `replays`; for `adapters`, by dtype: base_parameters, and in bytes counted, held (beyond the adapter's weights,
    after loading), trained (after two steps))
  goals: a list of goal, value, met
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from protocol.errors import CairnError

MINUTES = 9.0
SHORTEST = 20.0
"""Seconds that a part needs at least: with less left it is not begun."""

ROUNDS = 3
UPDATES = 8
"""Honest updates that are replayed."""
LEAST_RATIO = 0.97


@dataclass(frozen=True)
class Part:
    """One process. `seconds`: its limit; `file`: whether it writes JSON to the path that ends its command.

    `alone`: nothing runs beside it, since it measures speed.
    """

    name: str
    command: Sequence[str]
    seconds: float
    file: bool = True
    alone: bool = True


def parts(pretend: bool) -> list[Part]:
    """Return the parts in order: what matters most comes first, and the default before what is compared with it."""
    device, sizes = ("cpu", ("1M", "5M")) if pretend else ("cuda:0", ("150M", "1B"))
    own = [sys.executable, "-m", "benchmarks.gpu"]

    def own_part(name: str) -> Part:
        return Part(name, [*own, "--part", name, "--device", device, "--json"], 240, alone=False)

    def trainer(size: str, *more: str) -> Part:
        command = [sys.executable, "-m", "benchmarks.trainer", "--quick", "--no-goals", "--device", device]
        told = f"trainer {size}" + (", compiled" if more else "")
        return Part(told, [*command, "--size", size, *more, "--json"], 120)

    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "tests/unit"]
    return [
        Part("tests", tests, 240, file=False, alone=False),
        own_part("swarm"),
        own_part("replays"),
        own_part("adapters"),
        trainer(sizes[1], "--compile"),
        trainer(sizes[0], "--compile"),
        trainer(sizes[1]),
        trainer(sizes[0]),
    ]


class Processes:
    """The processes that were begun, to be killed if this one is interrupted: Ctrl-C does not reach their sessions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: list[subprocess.Popen[str]] = []
        self._ended = False

    def begin(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Begin a process with a session of its own. Raises KeyboardInterrupt once `kill` was called."""
        with self._lock:
            if self._ended:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            self._begun.append(process)
            return process

    def kill(self) -> None:
        """Kill what runs; nothing begins any more."""
        with self._lock:
            self._ended = True
            for process in self._begun:
                if process.poll() is None:  # the number of one that has ended may be another's
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)


def played(part: Part, seconds: float, processes: Processes) -> dict[str, Any]:
    """Run a part for at most `seconds`, and return its entry."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cairn-gpu-") as name:
        file = Path(name) / "part.json"
        command = [*part.command, *([str(file)] if part.file else [])]
        process = processes.begin(command)
        try:
            output, _ = process.communicate(timeout=seconds)
            why = "" if process.returncode == 0 else f"exit status {process.returncode}: {output[-2000:]}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            why = f"not done within {seconds:.0f} s: {output[-2000:]}"
        result = json.loads(file.read_text()) if file.exists() else None if part.file else counted(output)
    entry = {"part": part.name, "seconds": round(time.monotonic() - began, 1), "outcome": "failed" if why else "done"}
    return entry | {"why": why, "result": result}


def begun(part: Part, end: float, processes: Processes) -> dict[str, Any]:
    """Run a part if there is time for it until `end`, and return its entry."""
    left = end - time.monotonic()
    if left >= SHORTEST:
        return played(part, min(left, part.seconds), processes)
    return {"part": part.name, "seconds": 0.0, "outcome": "left out", "why": "no time was left", "result": None}


def groups(every: Sequence[Part]) -> list[list[Part]]:
    """Return the parts that run at once: all that measure no speed, then each of the others alone."""
    beside = [p for p in every if not p.alone]
    return [*([beside] if beside else []), *([p] for p in every if p.alone)]


def counted(output: str) -> dict[str, int]:
    """Return pytest's counts, from its last line."""
    words = {"passed": 0, "failed": 0, "skipped": 0, "errors": 0}
    for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", output[-500:]):
        words["errors" if word == "error" else word] = int(number)
    return words


def swarm(device: str) -> dict[str, Any]:
    """Return the rounds of two peers on one device, and the state that each holds. Raises CairnError."""
    from benchmarks.exchange import PEERS, Swarm

    with Swarm(PEERS[:2], device) as world:
        samples = world.measure(ROUNDS)
        shown = world.states()
    return {
        "rounds": len({s.round for s in samples}),
        "applied_seconds": sorted(s.applied for s in samples),
        "state_round": shown[0].state_round,
        "states": [s.state for s in shown],
    }


def replays(device: str) -> dict[str, Any]:
    """Return how honest updates of a CPU and of the device fare in each other's replays."""
    import torch

    from benchmarks.adversaries.honest import CPUS, measured
    from benchmarks.adversaries.lineup import TINY

    torch.set_num_threads(1)  # many threads on so small a model wait for each other, and the more beside other parts
    if device == "cpu":
        return measured(TINY, 1, UPDATES // 2, CPUS[:2])
    return measured(TINY, 1, UPDATES, (CPUS[0], "CUDA"))


def adapters(device: str) -> dict[str, Any]:
    """Return by dtype what the device holds of an adapter's base. Only a CUDA device counts what it holds."""
    import torch

    from benchmarks.finetune.base import BaseModel, make_base
    from benchmarks.finetune.chat import write_conversations
    from benchmarks.finetune.world import FineTuning, Tuning
    from protocol.adapter import held_bytes

    where = torch.device(device)
    sizes = (96, 256, 2, 4) if where.type == "cpu" else (1024, 2816, 18, 16)
    size, out = BaseModel(*sizes, 1024, 128, steps=0, batch=1), {}
    with tempfile.TemporaryDirectory(prefix="cairn-gpu-") as name:
        folder = Path(name)
        make_base(size, folder / "base")
        texts = write_conversations(folder, every=24)
        for dtype in ("bfloat16", "int8", "nf4"):
            world = FineTuning(
                folder / dtype, folder / "base", texts, size, Tuning(steps=2, batch=4, h=2, window=128),
                adapter=True, optimizer="adamw", seed=1, dtype=dtype, device=where,
            )  # fmt: skip
            model = world.spec.model
            if model.adapter is None:
                raise CairnError("the run has no adapter")
            before = _held(where)
            backend = world.backend()
            held = _held(where) - before
            for step in range(2):
                world.train_step(backend, step)
            out[dtype] = {
                "base_parameters": model.adapter.parameters,
                "counted": held_bytes(model.config, model.adapter, where.type),
                "held": held - 4 * model.layout.numel,
                "trained": _held(where) - before,
            }
            del backend
    return out


def _held(device: Any) -> int:
    """Return the bytes of all tensors on a CUDA device. Its allocator may give each up to 1 MB more."""
    import gc

    import torch

    gc.collect()
    return torch.cuda.memory_stats(device).get("requested_bytes.all.current", 0) if device.type == "cuda" else 0


OWN = {"swarm": swarm, "replays": replays, "adapters": adapters}
"""Parts that are functions of the device."""


def described() -> dict[str, Any]:
    """Return the CUDA device. Raises CairnError if there is none."""
    import torch

    if not torch.cuda.is_available():
        raise CairnError("no CUDA device is here; --pretend plays all parts on the CPU")
    about = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {
        "name": about.name, "memory": about.total_memory, "capability": f"{about.major}.{about.minor}",
        "cuda": torch.version.cuda, "driver": driver.stdout.strip(),
    }  # fmt: skip


def goals(entries: Sequence[Mapping[str, Any]], pretend: bool) -> list[dict[str, Any]]:
    """Return the goals with what was measured."""
    done = {e["part"]: e["result"] for e in entries if e["outcome"] == "done"}
    tests, states = done.get("tests"), (done.get("swarm") or {}).get("states")
    found = [report.goal("two peers hold one state after three rounds", states, states and len(set(states)) == 1)]
    if not pretend:
        same = tests and tests["passed"] > 0 and tests["failed"] == tests["skipped"] == tests["errors"] == 0
        found.insert(0, report.goal("CPU and CUDA compute the same bits: all tests of them pass", tests, same))
        verdicts = (done.get("replays") or {}).get("verdicts")
        text = "no honest update fails in a replay by the other device, or in the other precision"
        found.append(report.goal(text, verdicts, verdicts and not verdicts["failed"]))
        for dtype, memory in (done.get("adapters") or {}).items():
            share = memory["held"] / memory["counted"]
            text = f"the device holds of a base in {dtype} what is counted, within 2%"
            found.append(report.goal(text, round(share, 4), abs(share - 1) <= 0.02))
        for name in ("trainer 150M", "trainer 1B", "trainer 1B, compiled", "trainer 150M, compiled"):
            ratio = done[name]["sizes"][0]["ratio"] if name in done else None
            text = f"{name}: at least {LEAST_RATIO} of the bare loop"
            found.append(report.goal(text, ratio, None if ratio is None else ratio >= LEAST_RATIO))
    failed = [e["part"] for e in entries if e["outcome"] == "failed"]
    told = f"failed: {', '.join(failed)}" if failed else "all"
    return [*found, report.goal("each part that was begun ends in order", told, not failed)]


def show(results: Mapping[str, Any]) -> str:
    """Return the tables."""
    about = results["device"]
    title = "pretended, on the CPU" if about is None else f"{about['name']}, {about['memory'] / 2**30:.0f} GiB"
    rows = [[e["part"], e["seconds"], e["outcome"], e["why"][:60].replace("\n", " ")] for e in results["parts"]]
    out = [title, report.table(["part", "seconds", "outcome", "why"], rows)]
    sizes = [(e["part"], s) for e in results["parts"] if e["part"].startswith("trainer") and e["result"]
             for s in e["result"]["sizes"]]  # fmt: skip
    rows = [
        [name, f"{s['trainer_tokens_per_second']:,.0f}", s["ratio"], f"{s['mfu']:.1%}",
         None if s["peak_bytes"] is None else s["peak_bytes"] / s["parameters"],
         s["announce_seconds"], s["apply_seconds"]]
        for name, s in sizes
    ]  # fmt: skip
    columns = ["", "tokens/s", "of bare loop", "MFU", "peak bytes a parameter", "announce s", "apply 4 s"]
    out += [report.table(columns, rows)] if rows else []
    rows = [
        [dtype, m["counted"], m["held"], m["held"] / m["counted"]]
        for e in results["parts"] if e["part"] == "adapters" and e["result"] and results["device"]
        for dtype, m in e["result"].items()
    ]  # fmt: skip
    out += [report.table(["base", "bytes counted", "bytes held", "held of counted"], rows)] if rows else []
    return "\n\n".join(out)


def add(results: dict[str, Any], entry: dict[str, Any], options: argparse.Namespace) -> None:
    """Tell the end of a part, and save what is known."""
    print(f"{entry['part']}: {entry['outcome']} after {entry['seconds']} s", file=sys.stderr, flush=True)
    results["parts"].append(entry)
    results["goals"] = goals(results["parts"], options.pretend)
    if options.json:
        report.save(options.json, results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the parts, save after each, print. Return 1 when a goal is missed, 2 without a device."""
    parser = report.command_line(__doc__ or "", "gpu")
    parser.add_argument("--pretend", action="store_true", help="play all parts on the CPU, with small models")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of it (default {MINUTES:g})")
    parser.add_argument("--part", choices=tuple(OWN), help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda:0", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.part:
            report.save(options.json, OWN[options.part](options.device))
            return 0
        device = None if options.pretend else described()
    except CairnError as e:
        print(f"benchmarks.gpu: {e}", file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * options.minutes
    results: dict[str, Any] = report.provenance("gpu", arguments) | {"device": device, "parts": [], "goals": []}
    every = parts(options.pretend)
    processes = Processes()
    try:
        for some in groups(every[:2] if options.quick else every):
            with ThreadPoolExecutor(len(some)) as pool:
                try:
                    for job in as_completed([pool.submit(begun, part, end, processes) for part in some]):
                        add(results, job.result(), options)
                except BaseException:
                    processes.kill()
                    raise
    except KeyboardInterrupt:
        return 130
    return report.ended(results, options, show(results))


if __name__ == "__main__":
    sys.exit(main())
