"""A round's reduced parts, which can be as large as a model together: looked at where they lie."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from peer.mapped import mapped_file


def mapped(paths: Iterable[Path]) -> tuple[memoryview, ...]:
    """Each file's bytes, for as long as they are held, whoever removes the file meanwhile. Raises OSError."""
    return tuple(map(mapped_file, paths))
