"""The micro-batch that fits into memory, found by running out of it, and kept on disk for the next start.

One process makes its pass smaller and tries again. With several ranks, one that runs out of memory leaves the others in
the middle of a collective, which cannot be undone. All of them end, and the next start tries half the windows. After
one window it tries all of them with activations that are computed again in the backward pass, and then half of those.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from peer.channel import Choice
from peer.durable import write_durably

NAME = "pass.json"


@dataclass(frozen=True, slots=True)
class MicroBatchProfile:
    """A pass over a micro-batch: at most `windows` (None: all of the rank's), with `recompute` or without."""

    windows: int | None
    recompute: bool


class MicroBatchStore:
    """The file in a trainer's folder. It counts only for the layout, device and limit that it was written for."""

    def __init__(self, folder: Path, layout: str, device: str, gpu_memory: int = 0):
        """`gpu_memory`: the most bytes of a device; 0: all."""
        self._path = folder / NAME
        self._key = {"layout": layout, "device": device, "gpu_memory": gpu_memory}

    def profile(self, recompute: Choice) -> MicroBatchProfile:
        """Return what to try, by what was found before and by the user's choice."""
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or any(found.get(k) != v for k, v in self._key.items()):
            found = {}
        most, again = found.get("windows"), found.get("recompute") is True
        windows = most if type(most) is int and most > 0 else None
        if recompute == "off" and again:
            return MicroBatchProfile(1, False)  # too much, when it was tried
        if recompute == "on" and not again:
            return MicroBatchProfile(None, True)
        return MicroBatchProfile(windows, again)

    def make_easier(self, tried: MicroBatchProfile, recompute: Choice) -> str:
        """Keep the profile to try after `tried` did not fit. Return an addition to the error, which may be empty.

        `tried.windows`: the number that the pass had. Raises OSError.
        """
        windows = tried.windows or 1
        if windows > 1:
            self._keep(MicroBatchProfile(windows // 2, tried.recompute))
            return f"; after a restart a pass has {windows // 2} windows instead of {windows}"
        if recompute == "auto" and not tried.recompute:
            self._keep(MicroBatchProfile(None, True))
            return "; after a restart activations are computed again in the backward pass (a third more work)"
        return "; --recompute off forbids what would need less" if recompute == "off" else ""

    def _keep(self, following: MicroBatchProfile) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        values = {"windows": following.windows, "recompute": following.recompute}
        write_durably(self._path, [json.dumps(self._key | values).encode()])
