"""Checks of this machine before its peer is admitted and fetches anything: packages, devices, layout, disk.

They are the quick ones of `peer.doctor`.
"""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

from peer.doctor.device import memory_finding
from peer.doctor.device_process import CHECK_SECONDS, run_check
from peer.doctor.disk import disk_finding, to_save
from peer.doctor.measurements import Device, Trial
from peer.errors import PeerError
from peer.node.options import NodeOptions
from peer.node.trainer_files import room_for_files, write_spec
from peer.store import Store
from peer.store.disk import disk
from peer.training.eight_bit import refusal
from protocol.adapter import missing_package
from protocol.spec import RunSpec

LARGE = 10**9
"""Bytes of a model's weights, as fetched, from which the GPU's memory is looked at: that takes some seconds."""


async def check_machine(spec: RunSpec, options: NodeOptions, store: Store) -> None:
    """Raise PeerError, with what to do, if this machine cannot take part in the run."""
    if missing := missing_package(spec.model.adapter):
        raise PeerError(missing)
    if options.moments == "8bit" and (never := refusal(spec)):
        raise PeerError(never)
    check_disk(spec, options, store)
    await check_devices(spec, options, room_for_files(spec, store, options))


def check_disk(spec: RunSpec, options: NodeOptions, store: Store) -> None:
    """Raise PeerError if the store may not hold what every peer fetches, or the disk has no room for it."""
    with disk(f"reading the size of the disk of {store.folder}"):
        free = shutil.disk_usage(store.folder).free
    saves = to_save(spec, options.folder / "trainer") if options.trains else 0
    disk_finding(
        spec,
        store.folder,
        limit=store.limit_bytes,
        used=store.used_bytes,
        free=free,
        saves=saves,
        private_data=options.private_data,
    ).require()


async def check_devices(spec: RunSpec, options: NodeOptions, room: int = 0) -> None:
    """Raise PeerError if the trainer, or an auditor, could not use the devices that the user named.

    If the model is large, a GPU must have the memory that training takes of it, named or not: what other programs use
    of it now may be free later. `room`: the most bytes of files that the trainer may write. Otherwise there is nothing
    to check for a CPU, or for what `auto` picks.
    """
    if options.trainer_command:
        return
    devices = [d for d in (options.device, options.audit_device) if d.startswith("cuda")]
    asked = [word for device in dict.fromkeys(devices) for word in ("--device", device)]
    memory = list[str]()
    is_large = weight_bytes(spec) >= LARGE and options.device != "cpu"
    if options.trains and (is_large or options.parallel not in ("auto", "dp=1")):
        asked = ["--parallel", options.parallel, "--device", options.device, *asked]
        share = options.gpu_share(replayable=spec.audit.replayable)
        memory = ["--gpu-memory", str(share), "--moments", options.moments, "--disk", str(room)]
    if not asked:
        return
    refused, found = "", dict[str, Any]()

    def take(report: dict[str, Any]) -> None:
        nonlocal refused, found
        refused, found = str(report.get("refused", refused)), report.get("device", found)

    try:
        end = await run_check(write_spec(spec, options.folder), [*asked, *memory], take)
    except asyncio.TimeoutError:
        raise PeerError(f"{' '.join(asked)}: no answer from the device in {CHECK_SECONDS:.0f} s") from None
    if end:
        raise PeerError(refused or f"{' '.join(asked)}: the check of the device failed: {end}")
    device = Device.of(found) if is_large and found else None
    if device is None or device.kind != "cuda" or device.needed <= min(device.whole, device.limit or device.whole):
        return
    if (finding := memory_finding(Trial(device), 0)) is not None:
        finding.require()


def weight_bytes(spec: RunSpec) -> int:
    """Return the bytes of the weights that a peer of a run fetches: those that it trains, and a frozen base."""
    adapter = spec.model.adapter
    return 4 * spec.model.layout.numel + (0 if adapter is None else adapter.base.size)
