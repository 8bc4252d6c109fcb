"""The frozen base model of a run that trains an adapter: a blob of the peer's store, which every rank reads."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from peer.training.saved_state import file_digest
from protocol.adapter import load_base
from protocol.errors import MalformedError
from protocol.spec import AdapterSpec


def check_base(adapter: AdapterSpec, file: Path) -> None:
    """Raise MalformedError if the base's file is damaged or another one, and OSError."""
    if not file.is_file():
        raise MalformedError(f"the run's base model, {file}, is gone: start the peer again, which fetches it")
    if (size := file.stat().st_size) != adapter.base.size:
        raise _wrong(file, adapter, f"{size:,} bytes, not {adapter.base.size:,}")
    if (found := file_digest(file)) != adapter.base.name:
        raise _wrong(file, adapter, f"the digest {found.short}")


def read_base(
    model: nn.Module, adapter: AdapterSpec, file: Path, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> None:
    """Read the base's file, which was checked, into a model. Raises MalformedError or OSError.

    `copy`: as in `load_base`.
    """
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        load_base(model, adapter, data, copy)


def _wrong(file: Path, adapter: AdapterSpec, has: str) -> MalformedError:
    return MalformedError(
        f"{file} is damaged, or not the base model that the run names ({adapter.base.name.short}): it has {has}; "
        "delete it, and the next start fetches it again"
    )
