"""The choice of the dims from the user's request and the machine: the only place that inspects the machine."""

from __future__ import annotations

import re
import subprocess

import torch

from peer.errors import TrainingError
from peer.training.offload import Home, home_of
from peer.training.parallel.parallel_dims import USABLE, Interconnect, ParallelDims, check, choose, layouts, memory
from peer.training.parallel.plans import limits
from protocol.spec import RunSpec

_LINK_SECONDS = 10.0


def resolve(
    parallel: str, device: str, spec: RunSpec, gpu_memory: int = 0, disk: int = 0, *, eight_bit: bool = False
) -> tuple[ParallelDims, str, str, Home]:
    """Return (dims, "cuda" or "cpu", the reason in one line; "" for one process that needs none; `home_of`).

    `parallel` is "auto" or dims, `device` and `gpu_memory` as in `device.choose_device`, `disk` as in
    `peer.channel.Start`, `eight_bit` as in `limits`. The state between rounds fits on the GPUs if all that the ranks
    hold then takes at most 80% of their memory in some layout. Raises TrainingError: no such layout, too few GPUs,
    too little memory; and SpecError.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = "cuda" if device.startswith("cuda") or (device == "auto" and gpus) else "cpu"
    allowed = limits(spec, kind, offloads=False, eight_bit=eight_bit)
    works = [ParallelDims() if parallel == "auto" else ParallelDims.parse(parallel)]
    chooses = parallel == "auto" and kind == "cuda" and ":" not in device and gpus > 1
    if chooses:
        works = layouts(next(n for n in range(gpus, 0, -1) if layouts(n, allowed)), allowed)
    world = works[0].world
    usable = _usable(device, world, gpus, gpu_memory) if kind == "cuda" else 0
    largest = max(t.numel for t in spec.model.layout.tensors) if world > 1 else 0
    fits = any(memory(d, allowed, largest) <= USABLE * usable for d in works)
    home = home_of(kind, spec, fits=fits, room=disk)
    allowed = limits(spec, kind, offloads=home != "device", eight_bit=eight_bit)
    if chooses:
        few = f"{world} of {gpus} GPUs used, since inner.batch is {allowed.batch}"
        if world == 1:
            return works[0], kind, few, home
        best, why = choose(world, usable, link(), allowed, largest)
        return best, kind, f"--parallel auto picks {why}" + (f"; {few}" if world < gpus else ""), home
    if world == 1:
        return works[0], kind, "", home
    if ":" in device:
        raise TrainingError(
            f"--device {device} is one GPU and --parallel {works[0]} asks for {world}: leave out --device "
            "(CUDA_VISIBLE_DEVICES=0,1,... chooses among GPUs)"
        )
    if kind == "cuda" and world > gpus:
        check(works[0], max(1, gpus), allowed)
    return check(works[0], world, allowed), kind, f"--parallel {works[0]}, as asked", home


def _usable(device: str, world: int, gpus: int, gpu_memory: int) -> int:
    """Return the bytes that training may take of each GPU: rank n has cuda:n, one rank the GPU that `device` names."""
    number = device.partition(":")[2]
    first = int(number) if number.isdigit() else 0
    numbers = range(first, min(gpus, first + world))
    sizes = [torch.cuda.get_device_properties(n).total_memory for n in numbers]
    return min([*sizes, gpu_memory] if gpu_memory else sizes, default=0)


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
