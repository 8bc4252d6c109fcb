"""The process that looks at the devices, and runs a few steps of the model on them: `peer.training.machine_check`.

The node and the command line themselves load no CUDA.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import async_timeout

from peer.channel import MomentForm
from peer.channel.link import trainer_environment
from peer.doctor.measurements import Device, Sample, Trial
from peer.errors import PeerError
from protocol.python_command import python_command

CHECK_SECONDS = 300.0
"""Seconds to import torch, to reach a device and to build a model: a cold disk can take minutes."""

STEP_SECONDS = 20.0
"""Seconds of steps after which a trial begins no other."""

TRIAL_SECONDS = 60.0
"""Maximum seconds of all steps of a trial."""

MAX_LINE = 2**20

Report = Callable[[dict[str, Any]], float | None]
"""Called with each report of the process. It returns the seconds that are left, or None to leave the deadline."""


async def run_check(spec: Path, words: Sequence[str], report: Report, *, threads: int = 1) -> str:
    """Run the process; return "" if it ends well, else how it ended, and its last words.

    Raises PeerError if it cannot start, asyncio.TimeoutError.
    """
    command = python_command("peer.training.machine_check", "--parent", str(os.getpid()), "--spec", str(spec))
    try:
        process = await asyncio.create_subprocess_exec(
            *command, *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, env=trainer_environment(threads), start_new_session=True, limit=MAX_LINE,
        )  # fmt: skip
    except OSError as e:
        raise PeerError(f"cannot start a process: {e}; check the limits on processes and memory") from None
    assert process.stdout is not None
    now = asyncio.get_running_loop().time
    deadline, last_line = now() + CHECK_SECONDS, b""
    try:
        while True:
            async with async_timeout.timeout_at(deadline):
                line = await process.stdout.readline()
            if not line:
                break
            if not line.startswith(b"{"):
                last_line = line.strip() or last_line
            elif (seconds := report(json.loads(line))) is not None:
                deadline = now() + seconds
        async with async_timeout.timeout_at(deadline):
            code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if code == -signal.SIGKILL:
        return "it was killed (out of memory is the usual cause: see the system log)"
    last = "".join(c for c in last_line.decode(errors="replace") if c.isprintable())[:300]
    return f"it ended with code {code}: {last or 'it said nothing'}" if code else ""


async def try_device(
    spec: Path, device: str, parallel: str, threads: int, progress: Callable[[str], None] = lambda text: None,
    gpu_memory: int = 0, moments: MomentForm = "fp32", disk: int = 0,
) -> Trial:  # fmt: skip
    """Look at the device, and if the model fits, train on random tokens for up to TRIAL_SECONDS. Raises PeerError.

    `gpu_memory`: the most bytes of each GPU; 0: all. `moments`, `disk`: as in `peer.channel.Start`. Files lie beside
    the spec's.
    """
    trial = Trial()
    built = False

    def take(report: dict[str, Any]) -> float | None:
        nonlocal built
        match report:
            case {"refused": reason}:
                trial.refused = str(reason)
            case {"device": found}:
                trial.device = Device.of(found)
                progress(f"building the model on {trial.device.name}")
            case {"built": _}:
                built = True
                progress(f"training on random tokens, for up to {TRIAL_SECONDS:.0f} s")
                return TRIAL_SECONDS
            case {"sample": found}:
                trial.samples.append(Sample(**found))
        return None

    progress("looking at the device")
    words = ("--device", device, "--parallel", parallel, "--threads", str(threads), "--steps", str(STEP_SECONDS))
    words += ("--gpu-memory", str(gpu_memory), "--moments", moments, "--disk", str(disk))
    try:
        end = await run_check(spec, words, take, threads=threads)
        if end and not trial.refused:
            trial.refused = f"training failed on the device: {end}"
    except asyncio.TimeoutError:
        if built:
            trial.waited = TRIAL_SECONDS
        else:
            trial.refused = f"no answer from the device in {CHECK_SECONDS:.0f} s"
    return trial
