"""The choice of the dims from the user's request and the machine: the only place that inspects the machine."""

from __future__ import annotations

import re
import subprocess

import torch

from peer.errors import TrainingError
from peer.training.offload import can_offload
from peer.training.parallel.parallel_dims import Interconnect, ParallelDims, check, choose, layouts
from peer.training.parallel.plans import limits
from protocol.spec import RunSpec

_LINK_SECONDS = 10.0


def resolve(parallel: str, device: str, spec: RunSpec, gpu_memory: int = 0) -> tuple[ParallelDims, str, str]:
    """Return (dims, "cuda" or "cpu", the reason in one line; "" for one process that needs none).

    `parallel` is "auto" or dims, `device` and `gpu_memory` as in `device.choose_device`. Raises TrainingError: no such
    layout, too few GPUs, too little memory; and SpecError.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = "cuda" if device.startswith("cuda") or (device == "auto" and gpus) else "cpu"
    allowed = limits(spec, kind, offloads=can_offload(kind, spec))
    if parallel == "auto":
        if kind == "cpu" or ":" in device or gpus <= 1:
            return ParallelDims(), kind, ""
        usable = min(torch.cuda.get_device_properties(n).total_memory for n in range(gpus))
        if gpu_memory:
            usable = min(usable, gpu_memory)
        largest = max(t.numel for t in spec.model.layout.tensors)
        used = next(n for n in range(gpus, 0, -1) if layouts(n, allowed))
        few = f"of {gpus} GPUs used, since inner.batch is {allowed.batch}"
        if used == 1:
            return ParallelDims(), kind, f"1 {few}"
        best, why = choose(used, usable, link(), allowed, largest)
        if used < gpus:
            why += f"; {used} {few}"
        return best, kind, f"--parallel auto picks {why}"
    dims = ParallelDims.parse(parallel)
    if dims.world == 1:
        return dims, kind, ""
    if ":" in device:
        raise TrainingError(
            f"--device {device} is one GPU and --parallel {dims} asks for {dims.world}: leave out --device "
            "(CUDA_VISIBLE_DEVICES=0,1,... chooses among GPUs)"
        )
    if kind == "cuda" and dims.world > gpus:
        check(dims, max(1, gpus), allowed)
    return check(dims, dims.world, allowed), kind, f"--parallel {dims}, as asked"


def link() -> Interconnect:
    """Return how nvidia-smi says that the GPUs are connected; "pcie" when it does not."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_LINK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "pcie"
    rows = [line for line in done.stdout.splitlines() if re.match(r"^GPU\d+\s", line)]
    others = [cell for row in rows for cell in row.split()[1 : 1 + len(rows)] if cell != "X"]
    return "nvlink" if others and all(re.fullmatch(r"NV\d+", cell) for cell in others) else "pcie"
