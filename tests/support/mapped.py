"""The files that tensors are mapped from, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor


def is_in_a_file_of(folder: Path, tensor: Tensor) -> bool:
    """Return whether a tensor's memory is a shared mapping of a file in a folder which has no name any more."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = line.split(maxsplit=5)
        first, _, last = found[0].partition("-")
        if int(first, 16) <= tensor.data_ptr() < int(last, 16):
            path = found[5] if len(found) == 6 else ""
            return "s" in found[1] and path.startswith(f"{folder}/") and path.endswith(" (deleted)")
    return False
