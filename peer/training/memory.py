"""The memory that this process uses of its device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from peer.channel.messages import Memory

_STATM = Path("/proc/self/statm")


def memory_of(device: torch.device) -> Memory | None:
    """On CUDA: what torch's tensors took of the device at most since the start. On a CPU: what of the process is in
    memory now, of the machine's; None where that cannot be told (Linux tells). Does not wait for the device."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        return Memory(torch.cuda.max_memory_allocated(device), whole)
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return Memory(pages * page, os.sysconf("SC_PHYS_PAGES") * page)
