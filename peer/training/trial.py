"""A trial of training for the doctor: the device and its memory, and the time of a few steps on random tokens.

The trainer itself is built, with the layout that it would have, but without a state and data. So nothing is downloaded.
Layers are not compiled, which can take minutes: a GPU trains faster than here.
"""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from peer.channel import MomentForm, Start
from peer.doctor.measurements import Device, Sample
from peer.training.device import choose_device, device_name
from peer.training.memory import available, memory_of
from peer.training.offload import Home, note_of
from peer.training.parallel import parallel_dims
from peer.training.parallel.parallel_dims import ParallelDims
from peer.training.parallel.plans import limits
from peer.training.trainer import Trainer
from protocol.adapter import held_bytes
from protocol.ids import PeerKey
from protocol.spec import TRAINED, RunSpec
from protocol.training_memory import round_bytes

SMI_SECONDS = 10.0
STEPS = 3
"""Steps with the same number of windows, after the first."""


def look(
    spec: RunSpec, name: str, kind: str, dims: ParallelDims, gpu_memory: int = 0, moments: MomentForm = "fp32",
    home: Home = "device",
) -> Device:  # fmt: skip
    """Return the device that the trainer would use; `gpu_memory` as in `choose_device`. Raises TrainingError."""
    device = choose_device(name if dims.world == 1 else kind, 1)
    layout = spec.model.layout
    largest = max(tensor.numel for tensor in layout.tensors) if dims.world > 1 else 0
    allowed = limits(spec, device.type, offloads=home != "device", eight_bit=moments == "8bit")
    needed, savable = parallel_dims.memory(dims, allowed, largest), 0
    if moments == "fp32" and dims.world == 1 and not spec.audit.replayable:
        rounded = limits(spec, device.type, offloads=home != "device", eight_bit=True)
        savable = needed - parallel_dims.memory(dims, rounded, largest)
    adapter, base_savable = spec.model.adapter, 0
    if adapter is not None and dims.world == 1:
        smallest = held_bytes(spec.model.config, adapter.model_copy(update={"dtype": "nf4"}), device.type)
        base_savable = max(0, allowed.frozen_bytes - smallest)
    driver, gpus = _smi()
    if device.type == "cuda":
        # All of them: training is as fast as the slowest, and fits if it fits on the fullest.
        memories = [torch.cuda.mem_get_info(n if dims.world > 1 else device) for n in range(dims.world)]
        free, whole = min(memories)
    else:
        memory = memory_of(device)
        free, whole = available(), memory.whole if memory else available()
    return Device(
        name=device_name(device),
        kind=device.type,
        layout=str(dims),
        ranks=dims.world,
        needed=needed,
        offloaded=round_bytes(layout, spec.outer) if home != "device" else 0,
        note=note_of(home, spec) if home == "files" else "",
        savable=savable,
        base_savable=base_savable,
        holds_whole=adapter is not None and adapter.quantised,
        free=free,
        whole=whole,
        limit=gpu_memory if device.type == "cuda" else 0,
        torch=torch.__version__,
        cuda=(torch.version.cuda or "") if device.type == "cuda" else "",
        driver=driver if device.type == "cuda" else "",
        unused=() if torch.cuda.is_available() else gpus,
    )


def _smi() -> tuple[str, tuple[str, ...]]:
    """Return the driver and the GPUs that nvidia-smi lists; nothing without it."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return "", ()
    rows = [line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    return (rows[0][0][:40] if rows else ""), tuple(name[:80] for _, name in rows)


def build(
    spec_path: Path, device: str, dims: ParallelDims, threads: int, gpu_memory: int = 0, moments: MomentForm = "fp32",
    disk: int = 0,
) -> Trainer:  # fmt: skip
    """Return a trainer of the run, in a folder beside the spec's file. Raises TrainingError."""
    folder = spec_path.resolve().parent / "trial"
    me = PeerKey(secrets.token_bytes(32))
    start = Start(
        spec_path, me, folder, device, threads, shards={}, parallel=str(dims), compile="off",
        gpu_memory=gpu_memory, moments=moments, disk=disk,
    )  # fmt: skip
    return Trainer(start, lambda level, kind, text: None, trial=True)


def steps(trainer: Trainer, dims: ParallelDims, seconds: float) -> Iterator[Sample]:
    """Yield each step: of few windows first, then of as many as there is time for.

    `seconds`: no step begins after these; the first step, which warms the device up, is not in them. The trainer is
    closed at the end. Raises TrainingError.
    """
    backend, spec = trainer.backend, trainer.spec
    vocabulary = spec.model.config.get("vocab_size")
    chance = torch.Generator().manual_seed(0)
    batch, until, made = spec.inner.batch, None, 0
    windows = min(batch, dims.shares)
    try:
        while True:
            size = (windows, spec.data.window + 1)
            tokens = torch.randint(vocabulary if isinstance(vocabulary, int) else 2, size, generator=chance)
            if spec.data.conversations is not None:
                tokens |= TRAINED
            first = time.monotonic()
            step = backend.inner.forward_backward(tokens)  # it ends with a wait for the device
            middle = time.monotonic()
            if step is not None:
                backend.inner.optimizer_step(step)
            if backend.device.type == "cuda":
                torch.cuda.synchronize(backend.device)
            now, memory = time.monotonic(), backend.memory()
            yield Sample(windows, middle - first, now - middle, memory.used if memory else 0)
            if until is None:
                until = now + seconds
            elif windows < batch and now + 8 * (middle - first) + 2 * (now - middle) < until:
                windows, made = min(batch, 4 * windows), -1
            else:
                made += 1
            if made >= STEPS or now >= until:
                return
    finally:
        trainer.close()
