"""A model of the training side: windows instead of tensors, so that the checker can account for every one of them.

A trained window is a unique integer (peer, incarnation, count). An update carries a set of them out of the error
feedback; a state is the hash chain of applied records.
"""

from __future__ import annotations

from protocol.ids import Digest, sha256
from protocol.messages import Certificate
from protocol.rounds.actions import ApplyRecord, SyncState


def state_after(state: Digest, certificate: Certificate) -> Digest:
    """Return the state that a record makes of a state, by its updates or by the parts of their mean."""
    return Digest(sha256(b"state", state, certificate.record.digest, *certificate.shards))


class Trainer:
    """One incarnation of a peer's trainer: it starts with nothing, also after a crash."""

    def __init__(self, identity: int, speed: float, cap: int, now: float):
        self.identity = identity
        self.speed = speed
        self.cap = cap
        self.state: Digest | None = None
        self.counter = 0
        self.claimed = 0
        """First window that an update of ours may claim."""
        self.covered = 0
        """End of the windows that an update of ours covers, accepted or still undecided."""
        self.feedback: set[int] = set()
        self.fresh: set[int] = set()
        self.trained: set[int] = set()
        self.rests = False
        self._count = 0
        self._since = now

    def run(self, now: float) -> None:
        """Train until now."""
        if self.state is None or self.speed <= 0 or self.rests:
            self._since = now
            return
        done = int((now - self._since) * self.speed)
        self._since += done / self.speed
        for _ in range(min(done, self.claimed + self.cap - self.counter)):
            window = self.identity * 1_000_000 + self._count
            self._count += 1
            self.counter += 1
            self.fresh.add(window)
            self.trained.add(window)

    @property
    def uncovered(self) -> int:
        return max(0, self.counter - self.covered)

    def make(self) -> tuple[int, int, frozenset[int]] | None:
        """First and end window, and what the update carries; None when nothing was trained that could be claimed."""
        first = max(self.claimed, self.counter - self.cap)
        if self.counter <= first or not (self.fresh or self.feedback):
            return None
        content = frozenset(self.feedback | self.fresh)
        self.feedback.clear()
        self.fresh.clear()
        self.covered = self.counter
        return first, self.counter, content

    def move(self, action: ApplyRecord | SyncState, state: Digest, contents) -> None:
        """Take the new state; missed updates go back into the feedback."""
        self.state = state
        for blob in action.missed:
            self.give_back(contents.get(blob, frozenset()))
        for blob in action.regained:
            self.feedback -= contents.get(blob, frozenset())
        self.claimed = action.next_window
        self.covered = max(action.next_window, self.covered) if not action.missed else action.next_window
        self.counter = max(self.counter, self.claimed)
        # A branch with fewer of our windows: the claim is limited, what was learnt is not lost.
        self.claimed = max(self.claimed, self.counter - self.cap)

    def order(self, now: float, rests: bool, cap: int) -> None:
        """Set whether to rest, and the most windows of an update, from now on."""
        if (rests, cap) != (self.rests, self.cap):
            self.run(now)
            self.rests, self.cap = rests, cap

    def begin_afresh(self) -> None:
        """Discard all that was learnt: it is of rounds that were rolled back."""
        self.counter = self.claimed = self.covered = 0
        self.feedback.clear()
        self.fresh.clear()
        self.trained.clear()

    def give_back(self, content: frozenset[int]) -> None:
        self.feedback |= content
