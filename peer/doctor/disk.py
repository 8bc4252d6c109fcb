"""The check of the disk."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from peer.doctor.findings import DoctorFinding
from peer.fetched_data import data_bytes
from protocol.codec import make_codec
from protocol.spec import RunSpec
from protocol.state import state_layout
from protocol.training_memory import saved_bytes
from protocol.units import byte_size

SAVED_TENSORS = "trainer-*.safetensors"
"""The saved state's tensors in the trainer's folder."""


def state_bytes(spec: RunSpec) -> int:
    """Return the bytes of a checkpoint."""
    return state_layout(spec.model.layout, spec.outer).checkpoint_size


def to_save(spec: RunSpec, trainer: Path) -> int:
    """Return the bytes of disk that a trainer's saved states need beside those in its folder, outside the store.

    The last one stays until the next one is written. A file that is gone meanwhile counts for nothing.
    """
    model = spec.model
    needed = 2 * saved_bytes(model.layout, model.config, spec.inner, replayable=spec.audit.replayable)
    for file in trainer.glob(SAVED_TENSORS):
        with suppress(OSError):
            needed -= file.stat().st_size
    return max(0, needed)


def files_room(spec: RunSpec, *, limit: int, used: int, free: int, saves: int, private_data: bool) -> int:
    """Return the bytes of files that a trainer may have for its state between rounds, beside a store as below.

    The store comes to hold data and checkpoints, one of them on its way. Half of what --disk allows besides is left for
    updates. Arguments as of `disk_finding`.
    """
    held = data_bytes(spec, private_data=private_data) + (spec.checkpoint.keep + 2) * state_bytes(spec)
    return max(0, min((limit - held) // 2, limit - used, free - saves - max(0, held - used)))


def disk_finding(
    spec: RunSpec, folder: Path, *, limit: int, used: int, free: int, saves: int, private_data: bool
) -> DoctorFinding:
    """Judge the disk by what every peer fetches, and what its trainer saves.

    `folder`: of the store, which may use `limit` bytes and uses `used`; `free`: bytes of its disk; `saves`: as of
    `to_save`, 0 for an auditor, which saves nothing.
    """
    data, state = data_bytes(spec, private_data=private_data), state_bytes(spec)
    needed = data + state + make_codec(spec.codec, spec.model.layout).size
    parts = f"{byte_size(data)} of data, {byte_size(state)} for a state"
    if needed > limit:
        found = f"this run needs {byte_size(needed)} of disk at least ({parts}), and --disk allows {byte_size(limit)}"
        return DoctorFinding("disk", "no", found, "allow more with --disk")
    parts += f", {byte_size(saves)} for what the trainer saves" if saves else ""
    has = f"this run needs {byte_size(needed + saves)} of disk at least ({parts}), and {byte_size(free)} are free where"
    has += f" {folder} is"
    if max(0, needed - used) + saves > free:
        return DoctorFinding("disk", "no", has, "free some, or name a folder on another disk with --home")
    if limit - used + saves > free:
        remedy = f"the store may grow to {byte_size(limit)}: say less with --disk, or free some"
        return DoctorFinding("disk", "warning", has, remedy)
    return DoctorFinding("disk", "ok", has)
