"""Packed sequences: whether the model looks for several documents in a window.

Windows of plain text are whole sequences. Windows of marked tokens may hold several documents, with positions that
begin at 0 with each: there the models of transformers let no token see another document.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from protocol.errors import SpecError
from protocol.extras import pip_install

_SEARCH = "find_packed_sequence_indices"
_apart = False
"""True during a forward pass over windows whose documents are kept apart."""


def control_detection() -> bool:
    """Replace transformers' search for packed sequences, for all models of this process. Idempotent.

    Its own search reads from the device, in every forward pass, whether the positions of each row are consecutive. The
    host waits there for all kernels that were issued. Here the caller says so (`documents_apart`). Return False for a
    transformers without that search (before 4.53), which is left as it is.
    """
    try:
        masking_utils = importlib.import_module("transformers.masking_utils")
    except ImportError:
        return False
    if not hasattr(masking_utils, _SEARCH):
        return False
    setattr(masking_utils, _SEARCH, _documents)
    return True


def check_apart(apart: bool) -> None:
    """Raise SpecError if documents are to be kept apart, and the installed transformers cannot."""
    if apart and not control_detection():
        raise SpecError(
            "this run keeps the documents of a window apart, and the installed transformers cannot: install a newer "
            f"one ({pip_install('transformers', upgrade=True)})"
        )


@contextmanager
def documents_apart(apart: bool) -> Iterator[None]:
    """Keep documents apart, or not, in the forward passes within the block. Raises SpecError if that cannot be."""
    global _apart
    check_apart(apart)
    before, _apart = _apart, apart
    try:
        yield
    finally:
        _apart = before


def _documents(position_ids: Tensor) -> Tensor | None:
    """Return the number of each token's document in its window, as transformers' own search does; None for one."""
    if not _apart:
        return None
    before = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1)
