"""How many windows fit into one pass, found out by running out of memory: kept on disk, for the next start.

One process halves its pass and tries again. Of many ranks, one that runs out of memory leaves the others in the middle
of a collective, which nothing can take back: all end, and the next start tries half.
"""

from __future__ import annotations

import json
from pathlib import Path

from peer.training.durable import write_durably

NAME = "pass.json"


class Passes:
    """The file in a trainer's folder. It counts only for the layout and the device that it was written for."""

    def __init__(self, folder: Path, layout: str, device: str):
        self._path = folder / NAME
        self._of = {"layout": layout, "device": device}

    def most(self) -> int | None:
        """Windows that a pass may have; None when nothing is known against more."""
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or any(found.get(k) != v for k, v in self._of.items()):
            return None
        most = found.get("windows")
        return most if type(most) is int and most > 0 else None

    def halve(self, windows: int) -> int:
        """A pass of so many did not fit. Returns what is tried next; 0 when there is nothing less. Raises OSError."""
        if windows > 1:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self._path, [json.dumps(self._of | {"windows": windows // 2}).encode()])
        return windows // 2
