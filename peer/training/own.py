"""What of a peer's own updates lies in the error feedback: all of one that missed its round; of one that was accepted
in a round that was reduced, what the reduced parts left out (see `protocol.untransmitted`).

Whoever tells of an update's fate, and how often (another branch may win, and win again): the feedback then holds of it
what it should, once, less what decay has taken since it was put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from peer.errors import SavedStateError
from peer.training.layers import Report
from peer.training.saved import Back, SavedFolder
from protocol.codec.interface import Blob
from protocol.errors import CodecError
from protocol.ids import Digest
from protocol.merkle import blob_digest
from protocol.reduce import Reduction
from protocol.untransmitted import dropped

BACK_MOST = 64
"""So many updates' feedback is kept in mind, and none of which less than FORGOTTEN is left."""
FORGOTTEN = 1e-3


class Outer(Protocol):
    """`OuterSide`, or that of many ranks."""

    def restore(self, blob: bytes, only: bytes | None = None) -> None: ...
    def withdraw(self, blob: bytes, factor: float, only: bytes | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Accepted:
    """An own update that the state holds. `sums` gives its round's reduced parts: none, when that was not reduced."""

    blob: bytes
    sums: Callable[[], Sequence[Blob]] = tuple


class OwnUpdates:
    """Used by the thread that trains; `decay` by the one that makes an update."""

    def __init__(self, outer: Outer, reduction: Reduction, folder: SavedFolder, device: torch.device, report: Report):
        self._outer = outer
        self._reduction = reduction
        self._folder = folder
        self._device = device
        self._report = report
        self.back: dict[Digest, Back] = {}
        """What was put back."""

    def take_up(self, back: Mapping[Digest, Back]) -> None:
        """What the feedback holds that was saved."""
        self.back = dict(back)

    def decay(self, beta: float) -> None:
        """The feedback decays: an update is being made."""
        self.back = {b: Back(f.factor * beta, f.only) for b, f in self.back.items() if f.factor > FORGOTTEN}

    def is_back(self, name: Digest) -> bool:
        """All of it was put back, as one that missed its round."""
        return name in self.back and self.back[name].only is None

    def missed(self, blob: bytes) -> bool:
        """This update does not count: all of it goes back. False when that cannot be, which is reported."""
        name = blob_digest(blob)
        try:
            if not self.is_back(name):
                self._take_out(name, blob)
                self._put_back(name, blob, None)
        except (CodecError, OSError) as e:
            self.lost(e)
            return False
        return True

    def accepted(self, name: Digest, update: Accepted) -> None:
        """This update counts: what lies in the feedback is what its round dropped."""
        try:
            sums = update.sums()
            found = dropped(update.blob, sums, self._reduction, self._device) if sums else None
            only = found and found.packed()
            if name in self.back and only is not None and self.back[name].only == blob_digest(only):
                return
            self._take_out(name, update.blob)
            if only is not None:
                self._put_back(name, update.blob, only)
        except (CodecError, OSError) as e:
            self.not_put_back(e)

    def lost(self, why: Exception) -> None:
        """Report that an update which does not count is in nothing that is sent."""
        self._report("warning", "lost-update", f"an own update that missed its round cannot be put back: {why}")

    def not_put_back(self, why: Exception) -> None:
        """Report that what a round dropped of an own update is lost."""
        self._report("warning", "lost-update", f"what a round dropped of an own update cannot be put back: {why}")

    def _put_back(self, name: Digest, blob: bytes, only: bytes | None) -> None:
        self._outer.restore(blob, only)
        kept = None
        if only is not None:
            try:
                kept = self._folder.keep_selection(only)
            except OSError as e:
                text = f"what was put back of an own update cannot be kept ({e}): should its round be undone, it counts"
                self._report("warning", "saved-state", f"{text} twice")
                return
        self.back[name] = Back(1.0, kept)
        while len(self.back) > BACK_MOST:
            self.back.pop(next(iter(self.back)))

    def _take_out(self, name: Digest, blob: bytes) -> None:
        if (was := self.back.pop(name, None)) is None:
            return
        only = None
        if was.only is not None:
            try:
                only = self._folder.selection(was.only)
            except (OSError, SavedStateError) as e:
                text = f"what was put back of an own update cannot be told any more ({e}): it may count twice"
                self._report("warning", "lost-update", text)
                return
        self._outer.withdraw(blob, was.factor, only)
