"""What fits into one pass, found out by running out of memory: kept on disk, for the next start.

One process makes its pass easier and tries again. Of many ranks, one that runs out of memory leaves the others in the
middle of a collective, which nothing can take back: all end, and the next start tries half as many windows; after one
window all of them once more, with activations that are computed again in the backward pass, and then half of those.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from peer.channel import Choice
from peer.training.durable import write_durably

NAME = "pass.json"


@dataclass(frozen=True, slots=True)
class Pass:
    """How a pass is made: with so many windows at most (None: with all), with `recompute` or without."""

    windows: int | None
    recompute: bool


class Passes:
    """The file in a trainer's folder. It counts only for the layout and the device that it was written for."""

    def __init__(self, folder: Path, layout: str, device: str):
        self._path = folder / NAME
        self._of = {"layout": layout, "device": device}

    def known(self, recompute: Choice) -> Pass:
        """What to try, by what is known and what the user wants."""
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or any(found.get(k) != v for k, v in self._of.items()):
            found = {}
        most, again = found.get("windows"), found.get("recompute") is True
        windows = most if type(most) is int and most > 0 else None
        if recompute == "off" and again:
            return Pass(1, False)  # too much, when it was tried
        if recompute == "on" and not again:
            return Pass(None, True)
        return Pass(windows, again)

    def easier(self, tried: Pass, recompute: Choice) -> str:
        """A pass did not fit: keep what is tried next. What to tell people of that; nothing when there is nothing less.

        `tried.windows` is how many there were. Raises OSError.
        """
        windows = tried.windows or 1
        if windows > 1:
            self._keep(Pass(windows // 2, tried.recompute))
            return f"; after a restart a pass has {windows // 2} windows instead of {windows}"
        if recompute == "auto" and not tried.recompute:
            self._keep(Pass(None, True))
            return "; after a restart activations are computed again in the backward pass (a third more work)"
        return "; --recompute off forbids what would need less" if recompute == "off" else ""

    def _keep(self, following: Pass) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        what = {"windows": following.windows, "recompute": following.recompute}
        write_durably(self._path, [json.dumps(self._of | what).encode()])
