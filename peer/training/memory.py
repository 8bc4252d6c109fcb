"""Memory in use by this process on its device, and memory available in the machine and in its container."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from peer.channel.messages import Memory

_STATM = Path("/proc/self/statm")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
UNKNOWN = 2**29
"""Bytes that are assumed to be available where there is no /proc."""


def memory_of(device: torch.device) -> Memory | None:
    """Return the memory in use, without a wait for the device; None when it is unknown.

    On CUDA that is the peak of torch's tensors since the start. On a CPU it is the process's resident size, which Linux
    reports.
    """
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        return Memory(torch.cuda.max_memory_allocated(device), whole)
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return Memory(pages * page, os.sysconf("SC_PHYS_PAGES") * page)


def available(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes that programs can still allocate without anything being swapped or killed."""
    machine = _fields(meminfo, "MemAvailable:")
    free = 1024 * machine if machine is not None else UNKNOWN
    most, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if most is not None and used is not None:
        # Pages of files that were not used lately count as used there, and are freed when memory is needed.
        free = min(free, max(0, most - used + (_fields(cgroup / "memory.stat", "inactive_file") or 0)))
    return free


def _fields(path: Path, name: str) -> int | None:
    """Return the number after a name at the start of a line; None when there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.split()[:1] == [name]]
    return int(found[0]) if found and found[0].isdigit() else None


def _number(path: Path) -> int | None:
    """Return a file's one number; None for "max", and when there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
