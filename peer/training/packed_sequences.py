"""Packed sequences: a run's windows are whole sequences, never several packed into one row."""

from __future__ import annotations

import importlib


def disable_packed_sequence_detection() -> None:
    """Make transformers skip its search for packed sequences, for all models of this process. Idempotent.

    Without this its models read from the device, in every forward pass, whether the positions of each row are
    consecutive. The host waits there for all kernels that were issued. Here positions are always consecutive, since no
    model is given any. A transformers without that search is left as it is.
    """
    try:
        masking_utils = importlib.import_module("transformers.masking_utils")
    except ImportError:
        return  # before 4.53
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = _none  # type: ignore[attr-defined]


def _none(position_ids: object) -> None:
    """Return what the search returns when nothing is packed."""
