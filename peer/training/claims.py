"""Which of its windows a peer has trained on, announced, and had accepted: plain counting, no tensors.

Windows are counted for ever. The chain has accepted those below `claimed_from`; those from there to `counter` are
trained: what was learnt on them is in the model, in the error feedback or in the announced update. An update claims all
of them that it may, so each window is claimed in one piece, once, whatever rounds were missed.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import Digest


@dataclass(frozen=True, slots=True)
class Announced:
    """An update that was made and is not decided: after which record, what it claims, and its blob."""

    parent: Digest
    blob: Digest
    size: int
    first: int
    end: int
    steps: int
    loss: float


@dataclass(slots=True)
class Claims:
    """The count. `steps`: inner steps on the windows from `claimed_from` on."""

    counter: int = 0
    claimed_from: int = 0
    steps: int = 0
    announced: Announced | None = None

    @property
    def uncovered(self) -> int:
        """Windows that no update covers yet."""
        return self.counter - self._covered_to

    @property
    def _covered_to(self) -> int:
        return min(self.counter, self.announced.end) if self.announced else self.claimed_from

    def room(self, most: int) -> int:
        """How many windows may be trained now, when an update may claim `most`.

        While one is undecided the next one has its own room: should the round be missed after all, the surplus is
        claimed by the update after the next.
        """
        return max(0, self._covered_to + most - self.counter)

    def trained(self, windows: int) -> None:
        """One inner step on the next `windows` windows."""
        self.counter += windows
        self.steps += 1

    def claim(self, most: int) -> tuple[int, int, int] | None:
        """(first, end, inner steps) for an update made now; None when there is nothing to claim."""
        end = min(self.counter, self.claimed_from + most)
        return (self.claimed_from, end, max(1, self.steps)) if end > self.claimed_from else None

    def lost(self) -> None:
        """The announced update is gone from the disk: its windows are never claimed again."""
        gone = self.announced
        if gone is not None:
            self.announced = None
            self.claimed_from = gone.end
            self.steps = max(0, self.steps - gone.steps)

    def decided(self, next_window: int, *, kept: bool, undecided: bool = False) -> None:
        """The chain now accepts the own windows below `next_window`. `undecided`: the announced update is still open.

        `kept`: where that is less than before (another branch of the chain won), what was learnt on the windows
        between is in the error feedback again. Else it is gone, and they are never claimed again.
        """
        taken = self.announced
        if taken is not None and next_window >= taken.end:
            self.steps = max(0, self.steps - taken.steps)
        if not undecided:
            self.announced = None
        if next_window < self.claimed_from and not kept:
            return
        self.claimed_from = next_window
        if self.counter <= next_window:
            self.counter = next_window
            self.steps = 0
