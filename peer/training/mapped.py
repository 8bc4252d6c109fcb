"""Files that are looked at where they lie, not read into memory: a round's reduced parts can be as large as a model."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path


def mapped(paths: Iterable[Path]) -> tuple[memoryview, ...]:
    """Each file's bytes, for as long as they are held, whoever removes the file meanwhile. Raises OSError."""
    return tuple(map(_mapped, paths))


def _mapped(path: Path) -> memoryview:
    with open(path, "rb") as file:
        if not file.seek(0, 2):
            return memoryview(b"")  # nothing cannot be mapped
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
