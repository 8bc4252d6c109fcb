"""The checks of device and memory. Pure: a trial in, findings out."""

from __future__ import annotations

from peer.doctor.findings import DoctorFinding
from peer.doctor.measurements import Device, Trial
from peer.training.parallel.parallel_dims import USABLE
from protocol.units import byte_size

TIGHT = 0.95
"""The share of the memory that training can have from which it may run out of it."""


def device_finding(trial: Trial) -> DoctorFinding:
    """Judge the device that the trainer would choose, or was to use."""
    device = trial.device
    if device is None:
        return DoctorFinding("device", "no", trial.refused or "the trainer's process did not start")
    many = f"{device.ranks} x " if device.ranks > 1 else ""
    layout = f", laid out as {device.layout}" if device.ranks > 1 else ""
    versions = [f"driver {device.driver}" if device.driver else "", f"CUDA {device.cuda}" if device.cuda else ""]
    found = ", ".join([f"{many}{device.name}{layout}", *filter(None, versions)])
    if device.unused:
        return DoctorFinding(
            "device", "warning", f"{found}. torch {device.torch} does not use {', '.join(device.unused)}",
            "install a torch with CUDA for this driver (https://pytorch.org/get-started), and run this again",
        )  # fmt: skip
    return DoctorFinding("device", "ok", found)


def memory_finding(trial: Trial, base: int) -> DoctorFinding | None:
    """Judge the memory of each device; None without one. `base`: bytes of a state, which the trial does not hold yet.

    Before any step the need is the state's alone. Then it is the most that a step had in use.
    """
    device = trial.device
    if device is None:
        return None
    ranks, of = (1, "a GPU") if device.kind == "cuda" else (device.ranks, "this machine")
    needed = device.needed * ranks
    has = f"{byte_size(device.free)} of {of}'s {byte_size(device.whole)} are free"
    if device.limit:
        has += f", and --gpu-memory lets training take {byte_size(device.limit)}"
    if device.offloaded:
        place = "in files on the disk" if device.note else "in the machine's memory"
        has += f"; {byte_size(device.offloaded)} more lie {place}"
    found = f"training needs {byte_size(needed)} and room for a window ({device.layout}); {has}"
    if needed > min(device.whole, device.limit or device.whole):
        return DoctorFinding("memory", "no", found, _remedy(device, needed))
    if needed > device.free:
        remedy = "stop other programs (nvidia-smi lists those on a GPU), or take a larger one"
        return DoctorFinding("memory", "no", found, _smaller(device, needed) + remedy)
    used = max((s.memory for s in trial.samples), default=0)
    if not used:
        if needed > USABLE * device.usable:
            return DoctorFinding("memory", "warning", found, f"it may not suffice: {_remedy(device, needed)}")
        return DoctorFinding("memory", "ok", found)
    used = used * ranks + (0 if device.offloaded else base // (device.ranks // ranks))
    found = f"training uses {byte_size(used)} ({device.layout}), as measured; {has}"
    if used > device.usable:
        return DoctorFinding("memory", "no", found, _remedy(device, used, TIGHT))
    if used > TIGHT * device.usable:
        remedy = "leave it to this run alone, or training may run out of memory"
        return DoctorFinding("memory", "warning", found, _smaller(device, used, TIGHT) + remedy)
    return DoctorFinding("memory", "ok", found)


def files_finding(trial: Trial) -> DoctorFinding | None:
    """Tell of what each round writes to the disk; None if that is nothing."""
    device = trial.device
    if device is None or not device.note:
        return None
    found, _, remedy = device.note.partition(": ")
    return DoctorFinding("disk", "warning", found, remedy)


def fits(device: Device) -> bool:
    """Return whether the model may be built for a trial."""
    finding = memory_finding(Trial(device), 0)
    return finding is not None and finding.verdict != "no"


def _smaller(device: Device, needed: int, share: float = USABLE) -> str:
    """Return the beginning of a remedy: moments in 8 bits, if training then takes at most a share of what it may."""
    less = needed - device.savable
    if not device.savable or less > share * device.usable:
        return ""
    return f"add --moments 8bit, which needs bitsandbytes and {byte_size(less)}; or "


def _remedy(device: Device, needed: int, share: float = USABLE) -> str:
    less, owner = needed - device.base_savable, ""
    if device.base_savable and less <= share * device.usable:
        owner = f'; or ask the run\'s owner for model.adapter.dtype = "nf4", which needs {byte_size(less)}'
    return _smaller(device, needed, share) + _larger(device) + owner


def _larger(device: Device) -> str:
    # As in `resolve`: a state that fits on the GPUs goes into no files.
    is_full = not device.offloaded and device.needed > USABLE * min(device.whole, device.limit or device.whole)
    files = ", or a larger --disk" if is_full else ""
    if device.usable < device.free:
        more = "" if device.holds_whole else ", or use more GPUs (--parallel)"
        return f"allow more with --gpu-memory{more}{files}"
    if device.kind == "cuda":
        more = "" if device.holds_whole else ", or more of them (--parallel)"
        return f"take a GPU with more memory{more}{files}"
    return "take a machine with more memory, or a GPU"
