"""A run's windows are whole sequences, never several packed into one row."""

from __future__ import annotations

import importlib


def expect_none() -> None:
    """Have transformers not look for packed sequences in this process.

    Without this its models read from the device, in every forward pass, whether the positions of each row follow each
    other: the host waits there for all that was issued. Ours always do: no model here is given positions. For all
    models of the process, as often as one likes; a transformers without that search is left as it is.
    """
    try:
        masking_utils = importlib.import_module("transformers.masking_utils")
    except ImportError:
        return  # before 4.53
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = _none  # type: ignore[attr-defined]


def _none(position_ids: object) -> None:
    """What the search gives when nothing is packed."""
