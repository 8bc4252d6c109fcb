"""Checks of this machine before its peer is admitted and fetches anything: packages, devices, layout, disk.

They are the quick ones of `peer.doctor`.
"""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

from peer.doctor.device_process import CHECK_SECONDS, run_check
from peer.doctor.disk import disk_finding
from peer.errors import PeerError
from peer.node.options import NodeOptions
from peer.node.trainer_files import write_spec
from peer.store import Store
from peer.store.disk import disk
from peer.training.eight_bit import refusal
from protocol.adapter import missing_package
from protocol.spec import RunSpec


async def check_machine(spec: RunSpec, options: NodeOptions, store: Store) -> None:
    """Raise PeerError, with what to do, if this machine cannot take part in the run."""
    if missing := missing_package(spec.model.adapter):
        raise PeerError(missing)
    if options.moments == "8bit" and (never := refusal(spec)):
        raise PeerError(never)
    check_disk(spec, options, store)
    await check_devices(spec, options)


def check_disk(spec: RunSpec, options: NodeOptions, store: Store) -> None:
    """Raise PeerError if the store may not hold what every peer fetches, or the disk has no room for it."""
    with disk(f"reading the size of the disk of {store.folder}"):
        free = shutil.disk_usage(store.folder).free
    disk_finding(
        spec, store.folder, limit=store.limit_bytes, used=store.used_bytes, free=free, private_data=options.private_data
    ).require()


async def check_devices(spec: RunSpec, options: NodeOptions) -> None:
    """Raise PeerError if the trainer, or an auditor, could not use the devices that the user named.

    There is nothing to check for a CPU, or for what `auto` chooses.
    """
    if options.trainer_command:
        return
    devices = [d for d in (options.device, options.audit_device) if d.startswith("cuda")]
    asked = [word for device in dict.fromkeys(devices) for word in ("--device", device)]
    if options.trains and options.parallel not in ("auto", "dp=1"):
        asked = ["--parallel", options.parallel, "--device", options.device, *asked]
    if not asked:
        return
    refused = ""

    def take(report: dict[str, Any]) -> None:
        nonlocal refused
        refused = str(report.get("refused", refused))

    try:
        end = await run_check(write_spec(spec, options.folder), asked, take)
    except asyncio.TimeoutError:
        raise PeerError(f"{' '.join(asked)}: no answer from the device in {CHECK_SECONDS:.0f} s") from None
    if end:
        raise PeerError(refused or f"{' '.join(asked)}: the check of the device failed: {end}")
