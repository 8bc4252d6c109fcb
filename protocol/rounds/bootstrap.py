"""The time in which a newcomer collects what the others have, before it loads a state and trains."""

from __future__ import annotations

from protocol.rounds.deadlines import Deadlines

TIMES = 10
"""Maximum times its patience: a chain of thousands of rounds takes minutes, but an admitted peer can make records that
lead nowhere, without end."""


class Bootstrap:
    """`patience`: seconds after which it is over if nothing arrives of what others claim to have."""

    def __init__(self, now: float, patience: float):
        self._late = self._grew = now
        self._patience = patience

    def begin(self, now: float, seconds: float) -> None:
        """Start. Peers that are there are heard from within this time."""
        self._late, self._grew = now + seconds, now

    def grew(self, now: float) -> None:
        """Note that missing records arrived, and that their source has more."""
        self._grew = now

    def is_over(self, deadlines: Deadlines, *, ahead: bool, equal: bool) -> bool:
        """Return whether it is over. `ahead`: a peer has records that we miss; `equal`: one has a head that we know."""
        late = deadlines.due("bootstrap", self._late)
        at_last = max(self._late, min(self._grew, self._late + TIMES * self._patience)) + self._patience
        return (not ahead and (equal or late)) or deadlines.due("bootstrap at last", at_last)
