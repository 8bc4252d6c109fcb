"""From what the user asked for and what the machine has to the degrees: the only place that looks at the machine."""

from __future__ import annotations

import re
import subprocess

import torch

from peer.errors import TrainingError
from peer.training.parallel.degrees import Degrees, Link, check, choose
from peer.training.parallel.plans import limits
from protocol.spec import RunSpec

_LINK_SECONDS = 10.0


def resolve(parallel: str, device: str, spec: RunSpec) -> tuple[Degrees, str, str]:
    """(degrees, "cuda" or "cpu", why in one line). `parallel` is "auto" or degrees, `device` as in `choose_device`.

    Raises TrainingError: no such layout, too few GPUs, too little memory.
    """
    allowed = limits(spec.model.config, spec.model.layout, batch=spec.inner.batch)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = "cuda" if device.startswith("cuda") or (device == "auto" and gpus) else "cpu"
    if parallel == "auto":
        if kind == "cpu" or ":" in device or gpus <= 1:
            return Degrees(), kind, "one process"
        free = min(torch.cuda.get_device_properties(n).total_memory for n in range(gpus))
        largest = max(t.numel for t in spec.model.layout.tensors)
        best, why = choose(gpus, free, link(), allowed, largest)
        return best, kind, f"--parallel auto picks {why}"
    degrees = Degrees.parse(parallel)
    if degrees.world == 1:
        return degrees, kind, "one process"
    if ":" in device:
        raise TrainingError(
            f"--device {device} is one GPU and --parallel {degrees} asks for {degrees.world}: leave out --device "
            "(CUDA_VISIBLE_DEVICES=0,1,... chooses among GPUs)"
        )
    if kind == "cuda" and degrees.world > gpus:
        check(degrees, max(1, gpus), allowed)
    return check(degrees, degrees.world, allowed), kind, f"--parallel {degrees}, as asked"


def link() -> Link:
    """How GPUs are joined, as nvidia-smi tells; "pcie" when it does not."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_LINK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "pcie"
    rows = [line for line in done.stdout.splitlines() if re.match(r"^GPU\d+\s", line)]
    others = [cell for row in rows for cell in row.split()[1 : 1 + len(rows)] if cell != "X"]
    return "nvlink" if others and all(re.fullmatch(r"NV\d+", cell) for cell in others) else "pcie"
