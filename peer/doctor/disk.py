"""The check of the disk. Pure."""

from __future__ import annotations

from pathlib import Path

from peer.doctor.findings import DoctorFinding
from peer.fetched_data import data_bytes
from protocol.codec import make_codec
from protocol.spec import RunSpec
from protocol.state import state_layout
from protocol.units import byte_size


def state_bytes(spec: RunSpec) -> int:
    """Return the bytes of a checkpoint."""
    return state_layout(spec.model.layout, spec.outer).checkpoint_size


def files_room(spec: RunSpec, *, limit: int, used: int, free: int, private_data: bool) -> int:
    """Return the bytes of files that a trainer may have for its state between rounds, beside a store as below.

    The store comes to hold data and checkpoints, one of them on its way. Half of what --disk allows besides is left for
    updates.
    """
    held = data_bytes(spec, private_data=private_data) + (spec.checkpoint.keep + 2) * state_bytes(spec)
    return max(0, min((limit - held) // 2, limit - used, free - max(0, held - used)))


def disk_finding(spec: RunSpec, folder: Path, *, limit: int, used: int, free: int, private_data: bool) -> DoctorFinding:
    """Judge the disk by what every peer fetches.

    `folder`: of the store, which may use `limit` bytes and uses `used`; `free`: bytes of its disk.
    """
    data, state = data_bytes(spec, private_data=private_data), state_bytes(spec)
    needed = data + state + make_codec(spec.codec, spec.model.layout).size
    parts = f"{byte_size(data)} of data, {byte_size(state)} for a state"
    needs = f"this run needs {byte_size(needed)} of disk at least ({parts})"
    if needed > limit:
        return DoctorFinding("disk", "no", f"{needs}, and --disk allows {byte_size(limit)}", "allow more with --disk")
    has = f"{needs}, and {byte_size(free)} are free where {folder} is"
    if needed - used > free:
        return DoctorFinding("disk", "no", has, "free some, or name a folder on another disk with --home")
    if limit - used > free:
        remedy = f"the store may grow to {byte_size(limit)}: say less with --disk, or free some"
        return DoctorFinding("disk", "warning", has, remedy)
    return DoctorFinding("disk", "ok", has)
