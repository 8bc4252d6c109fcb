"""The contents of the error feedback: our updates whose values lie in it.

All values of an update that missed its round are in it. Of one that a reduced round accepted, only those are in it that
the reduced shards left out (see `protocol.untransmitted`). An update's fate may be reported several times, as
branches win and lose. The feedback then contains each of these values once, decayed since they were added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from peer.errors import SavedStateError
from peer.training.backend import OuterSide
from peer.training.layers import Report
from peer.training.saved_state import FeedbackEntry, SavedFolder
from protocol.codec.interface import Blob
from protocol.errors import CodecError
from protocol.ids import Digest
from protocol.merkle import blob_digest
from protocol.reduce import Reduction
from protocol.untransmitted import untransmitted

MAX_ENTRIES = 64
"""Maximum number of updates in the feedback."""

FORGOTTEN = 1e-3
"""An entry whose values have decayed to this factor is forgotten."""


@dataclass(frozen=True, slots=True)
class AcceptedUpdate:
    """An own update that the state holds. `shards` returns its round's reduced shards: none if it was not reduced."""

    blob: bytes
    shards: Callable[[], Sequence[Blob]] = tuple


@dataclass
class FeedbackContents:
    """Part of the base state, and changed under the exchange point's lock, as the feedback itself."""

    outer: OuterSide
    reduction: Reduction
    beta: float
    folder: SavedFolder
    device: torch.device
    report: Report
    entries: dict[Digest, FeedbackEntry] = field(default_factory=dict)
    """The feedback's content by update; replaced or changed under the lock."""

    def decay(self) -> None:
        """Multiply every entry by `beta`, as an announcement does with the feedback."""
        self.entries = {
            name: FeedbackEntry(e.factor * self.beta, e.only)
            for name, e in self.entries.items()
            if e.factor > FORGOTTEN
        }

    def holds_all_of(self, name: Digest) -> bool:
        """Return whether all values of an update are in the feedback, since it missed its round."""
        return name in self.entries and self.entries[name].only is None

    def missed(self, blob: bytes) -> bool:
        """Add all values of an update that does not count. Return False when that failed, which is reported."""
        name = blob_digest(blob)
        try:
            if not self.holds_all_of(name):
                self._remove(name, blob)
                self._add(name, blob, None)
        except (CodecError, OSError) as e:
            self.report_lost(e)
            return False
        return True

    def accepted(self, name: Digest, update: AcceptedUpdate) -> None:
        """Keep of an update that counts only the values that its round did not transmit."""
        try:
            shards = update.shards()
            mask = untransmitted(update.blob, shards, self.reduction, self.device) if shards else None
            only = mask and mask.to_bytes()
            if name in self.entries and only is not None and self.entries[name].only == blob_digest(only):
                return
            self._remove(name, update.blob)
            if only is not None:
                self._add(name, update.blob, only)
        except (CodecError, OSError) as e:
            self.report_untransmitted_lost(e)

    def report_lost(self, why: Exception) -> None:
        """Report that no update will carry the work of one that does not count."""
        self.report("warning", "lost-update", f"an update of ours that missed its round cannot be put back: {why}")

    def report_untransmitted_lost(self, why: Exception) -> None:
        """Report that the values which a round did not transmit are lost."""
        self.report("warning", "lost-update", f"what a round left out of our update cannot be put back: {why}")

    def _add(self, name: Digest, blob: bytes, only: bytes | None) -> None:
        self.outer.add_back(blob, only)
        kept = None
        if only is not None:
            try:
                kept = self.folder.keep_mask(only)
            except OSError as e:
                text = (
                    f"what was put back of our update cannot be recorded ({e}): should its round be undone, it counts"
                )
                self.report("warning", "saved-state", f"{text} twice")
                return
        self.entries[name] = FeedbackEntry(1.0, kept)
        while len(self.entries) > MAX_ENTRIES:
            self.entries.pop(next(iter(self.entries)))

    def _remove(self, name: Digest, blob: bytes) -> None:
        if (entry := self.entries.pop(name, None)) is None:
            return
        only = None
        if entry.only is not None:
            try:
                only = self.folder.mask(entry.only)
            except (OSError, SavedStateError) as e:
                text = f"what was put back of our update is not known any more ({e}): it may count twice"
                self.report("warning", "lost-update", text)
                return
        self.outer.subtract(blob, entry.factor, only)
