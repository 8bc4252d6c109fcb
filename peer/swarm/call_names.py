"""The names of the calls and streams between members of a run."""

from __future__ import annotations

from typing import Literal

from protocol.ids import RunId

Call = Literal["packet", "chain", "headers", "coordinator-address", "blob"]


def call_name(run: RunId, call: Call) -> str:
    """Return the name under which members of a run accept this call; "blob" is a stream."""
    return f"cairn/1/{run.hex()[:8]}/{call}"
