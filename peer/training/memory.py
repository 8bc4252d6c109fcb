"""Memory in use by this process on its device, and memory available in the machine and in its container."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from peer.channel.messages import Memory

STATM = Path("/proc/self/statm")
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
        pages = int(STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return Memory(pages * page, os.sysconf("SC_PHYS_PAGES") * page)


def available(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes that programs can still allocate without anything being swapped or killed."""
    machine = _number(meminfo, "MemAvailable:")
    free = 1024 * machine if machine is not None else UNKNOWN
    most, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if most is not None and used is not None:
        # Pages of files that were not used lately count as used there, and are freed when memory is needed.
        free = min(free, max(0, most - used + (_number(cgroup / "memory.stat", "inactive_file ") or 0)))
    return free


def _number(path: Path, start: str = "") -> int | None:
    """Return the number at the start of a file, or after the `start` of a line; None when there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = [line.removeprefix(start).split()[0] for line in lines if line.startswith(start)]
    return int(found[0]) if found and found[0].isdigit() else None
