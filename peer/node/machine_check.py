"""Checks of this machine before its peer is admitted and fetches anything: devices, layout, disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys

import async_timeout
from rich.filesize import decimal

from peer.channel.link import trainer_environment
from peer.errors import PeerError
from peer.node.options import NodeOptions
from peer.node.trainer_files import fetched_shards, write_spec
from peer.store import Store
from peer.store.disk import disk
from protocol.codec import make_codec
from protocol.spec import RunSpec
from protocol.state import state_layout

CHECK_SECONDS = 300.0
"""Seconds to import torch and to reach a device: a cold disk can take minutes."""


async def check_machine(spec: RunSpec, options: NodeOptions, store: Store) -> None:
    """Raise PeerError, with what to do, if this machine cannot take part in the run."""
    check_disk(spec, options, store)
    await check_devices(spec, options)


def check_disk(spec: RunSpec, options: NodeOptions, store: Store) -> None:
    """Raise PeerError if the store may not hold what every peer fetches, or the disk has no room for it."""
    shards = fetched_shards(spec, private_data=options.private_data)
    data = spec.tokenizer.size + sum(shard.size for shard in shards)
    checkpoint = state_layout(spec.model.layout, spec.outer).checkpoint_size
    needed = data + checkpoint + make_codec(spec.codec, spec.model.layout).size
    parts = f"{decimal(data)} of data, {decimal(checkpoint)} for a state"
    needs = f"this run needs {decimal(needed)} of disk at least ({parts})"
    if needed > store.limit_bytes:
        raise PeerError(f"{needs}, and --disk allows {decimal(store.limit_bytes)}: allow more with --disk")
    with disk(f"reading the size of the disk of {store.folder}"):
        free = shutil.disk_usage(store.folder).free
    if needed - store.used_bytes > free:
        raise PeerError(
            f"{needs}, and {decimal(free)} are free where {store.folder} is: free some, or name a folder on another "
            "disk with --home"
        )


async def check_devices(spec: RunSpec, options: NodeOptions) -> None:
    """Raise PeerError if the trainer, or an auditor, could not use the devices that the user named.

    Nothing is to be checked of a CPU, nor of what `auto` chooses.
    """
    if options.trainer_command:
        return
    devices = [d for d in (options.device, options.audit_device) if d.startswith("cuda")]
    asked = [word for device in dict.fromkeys(devices) for word in ("--device", device)]
    if options.trains and options.parallel not in ("auto", "dp=1"):
        asked = ["--parallel", options.parallel, "--device", options.device, *asked]
    if not asked:
        return
    command = [sys.executable, "-m", "peer.training.machine_check", "--parent", str(os.getpid())]
    try:
        process = await asyncio.create_subprocess_exec(
            *command, "--spec", str(write_spec(spec, options.folder)), *asked,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env=trainer_environment(1), start_new_session=True,
        )  # fmt: skip
    except OSError as e:
        raise PeerError(f"cannot start a process: {e}; check the limits on processes and memory") from None
    try:
        async with async_timeout.timeout(CHECK_SECONDS):
            said, _ = await process.communicate()
    except asyncio.TimeoutError:
        raise PeerError(f"{' '.join(asked)}: no answer from the device in {CHECK_SECONDS:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        reason = " ".join(said.decode(errors="replace").split())
        raise PeerError(reason or f"{' '.join(asked)}: the check of the device ended with code {process.returncode}")
