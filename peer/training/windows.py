"""The count of a peer's windows: which are trained, announced and accepted. Plain numbers, no tensors.

The count never restarts. The windows below `claimed_from` are accepted by the chain, or skipped. Those from there up to
`counter` are trained: the model, the error feedback or the announced update holds their progress. An update claims as
many of them as it may, from `claimed_from` on, so each window is claimed once however many rounds were missed.

In a replayable run no update ends before an earlier one, on whichever branch that was: the fork choice counts a key
where its windows end last (`protocol.chain`). So windows that were announced are never trained again: those of a missed
update are skipped. Others whose work was given up are trained again, and `rebase_window` says which were trained on the
held state (see `replayable_state`). Only a peer whose saved state is lost may end lower.

With error feedback an update may end before an earlier one in two more cases. After a split the peer claims again what
the other branch has not accepted, and one update may not suffice. Or it restarts from a state that is older than its
last update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import ConfigDict

from peer.channel.messages import Count, DigestField

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""How pydantic reads what is kept on disk."""


@dataclass(frozen=True, slots=True)
class UndecidedUpdate:
    """An update that was made and is undecided: its parent record, its blob, its size in bytes, the windows it claims.

    `loss`: mean training loss in nats per token over its `steps` inner steps. `rebase_window`: as in its header.
    """

    parent: DigestField
    blob: DigestField
    size: Count
    first: Count
    rebase_window: Count
    end: Count
    steps: Count
    loss: float
    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True)
class WindowAccounting:
    """The count at one time; each change makes another one. `steps`: inner steps since `claimed_from`.

    In a replayable run, `rebase_window` is the first window of the next update that was trained on the held state, and
    `skipped` the steps of that update that changed nothing.
    """

    counter: Count = 0
    claimed_from: Count = 0
    steps: Count = 0
    announced: UndecidedUpdate | None = None
    rebase_window: Count = 0
    skipped: Count = 0
    __pydantic_config__ = STRICT

    @property
    def uncovered(self) -> int:
        """Number of trained windows that no update covers yet."""
        return self.counter - self._covered_to

    @property
    def _covered_to(self) -> int:
        return min(self.counter, self.announced.end) if self.announced else self.claimed_from

    def room(self, most: int) -> int:
        """Return how many windows may be trained now if an update may claim at most `most`.

        While one update is undecided the next one has its own room. If the round is missed after all, the update after
        the next claims the surplus.
        """
        return max(0, self._covered_to + most - self.counter)

    def trained(self, windows: int, *, skipped: bool = False) -> WindowAccounting:
        """Return the count after one inner step on the next `windows` windows. `skipped`: it changed nothing."""
        return replace(self, counter=self.counter + windows, steps=self.steps + 1, skipped=self.skipped + skipped)

    def claim(self, most: int) -> tuple[int, int, int] | None:
        """Return (first, end, inner steps) of an update made now, or None when there is nothing to claim."""
        end = min(self.counter, self.claimed_from + most)
        return (self.claimed_from, end, max(1, self.steps)) if end > self.claimed_from else None

    def lost(self) -> WindowAccounting:
        """Return the count after the announced update's file disappeared: no update claims its windows any more."""
        gone = self.announced
        if gone is None:
            return self
        return replace(self, announced=None, claimed_from=gone.end, steps=max(0, self.steps - gone.steps))

    def decided(self, next_window: int, *, kept: bool, undecided: bool = False) -> WindowAccounting:
        """Return the count after the chain accepted the own windows below `next_window`.

        `undecided`: the announced update is still open. `kept`: if `next_window` is less than before (another branch of
        the chain won), the error feedback holds the progress of the windows between again. Otherwise that progress is
        lost, and no update claims those windows.
        """
        counter, claimed_from, steps, mine = self.counter, self.claimed_from, self.steps, self.announced
        if mine is not None and next_window >= mine.end:
            steps = max(0, steps - mine.steps)
        if next_window >= claimed_from or kept:
            claimed_from = next_window
            if counter <= next_window:
                counter, steps = next_window, 0
        return WindowAccounting(counter, claimed_from, steps, mine if undecided else None)

    # -- replayable runs ---------------------------------------------------------------------------------------

    def begun_again(self) -> WindowAccounting:
        """Return the count when training begins again after the announced update.

        Raises ValueError when no update is announced.
        """
        mine = self.announced
        if mine is None:
            raise ValueError("no update is announced after which training could begin again")
        return replace(self, counter=mine.end, steps=mine.steps, rebase_window=mine.end, skipped=0)

    def rebased(self) -> WindowAccounting:
        """Return the count after the announced update was accepted, and the progress since was moved to the new state.

        Raises ValueError when no update is announced.
        """
        mine = self.announced
        if mine is None:
            raise ValueError("no update is announced that could be accepted")
        return WindowAccounting(
            self.counter, mine.end, max(0, self.steps - mine.steps), None, self.counter, self.skipped
        )

    def started_over(self, next_window: int) -> WindowAccounting:
        """Return the count when all progress was given up, and the chain has accepted the windows below `next_window`.

        Windows that were announced are skipped, also those that only another branch has accepted.
        """
        start = max(next_window, self.claimed_from, self.announced.end if self.announced else 0)
        return WindowAccounting(start, start, rebase_window=start)
