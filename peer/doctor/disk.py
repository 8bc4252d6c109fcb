"""The check of the disk."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from peer.doctor.findings import DoctorFinding
from peer.fetched_data import data_bytes
from protocol.codec import make_codec
from protocol.spec import RunSpec
from protocol.state import state_layout
from protocol.training_memory import SAVED_BYTES
from protocol.units import byte_size

SAVED_TENSORS = "trainer-*.safetensors"
"""The saved state's tensors in the trainer's folder."""


def state_bytes(spec: RunSpec) -> int:
    """Return the bytes of a checkpoint."""
    return state_layout(spec.model.layout, spec.outer).checkpoint_size


def saved_size(trainer: Path) -> int:
    """Return the bytes of the state that a trainer has saved in its folder. A file that is gone counts for nothing."""
    total = 0
    for file in trainer.glob(SAVED_TENSORS):
        with suppress(OSError):
            total += file.stat().st_size
    return total


def files_room(spec: RunSpec, *, limit: int, used: int, free: int, private_data: bool, saved: int = 0) -> int:
    """Return the bytes of files that a trainer may have for its state between rounds, beside a store as below.

    The store comes to hold data and checkpoints, one of them on its way. Half of what --disk allows besides is left for
    updates. `saved`: bytes of the state that the trainer has saved.
    """
    held = data_bytes(spec, private_data=private_data) + (spec.checkpoint.keep + 2) * state_bytes(spec)
    free -= max(0, _saved_twice(spec) - saved) + max(0, held - used)
    return max(0, min((limit - held) // 2, limit - used, free))


def _saved_twice(spec: RunSpec) -> int:
    """Return the bytes of two saved states: the last one stays until the next one is written."""
    return 2 * SAVED_BYTES * spec.model.layout.numel


def disk_finding(spec: RunSpec, folder: Path, *, limit: int, used: int, free: int, private_data: bool) -> DoctorFinding:
    """Judge the disk by what every peer fetches, and what its trainer saves.

    `folder`: of the store, which may use `limit` bytes and uses `used`, beside the trainer's; `free`: bytes of its
    disk.
    """
    data, state, saved = data_bytes(spec, private_data=private_data), state_bytes(spec), _saved_twice(spec)
    needed = data + state + make_codec(spec.codec, spec.model.layout).size
    parts = f"{byte_size(data)} of data, {byte_size(state)} for a state"
    if needed > limit:
        found = f"this run needs {byte_size(needed)} of disk at least ({parts}), and --disk allows {byte_size(limit)}"
        return DoctorFinding("disk", "no", found, "allow more with --disk")
    parts += f", {byte_size(saved)} for what the trainer saves"
    has = f"this run needs {byte_size(needed + saved)} of disk at least ({parts}), and {byte_size(free)} are free where"
    has += f" {folder} is"
    to_save = max(0, saved - saved_size(folder.parent / "trainer"))
    if max(0, needed - used) + to_save > free:
        return DoctorFinding("disk", "no", has, "free some, or name a folder on another disk with --home")
    if limit - used + to_save > free:
        remedy = f"the store may grow to {byte_size(limit)}: say less with --disk, or free some"
        return DoctorFinding("disk", "warning", has, remedy)
    return DoctorFinding("disk", "ok", has)
