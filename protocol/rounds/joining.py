"""How long a newcomer hears what the others have before it loads a state and trains."""

from __future__ import annotations

TIMES = 10
"""Of its patience, at most: a chain of thousands of rounds takes minutes, but whoever was admitted can make records
that lead nowhere, for ever."""


class Joining:
    """`patience`: seconds in which nothing comes of what others claim to have."""

    def __init__(self, now: float, patience: float):
        self._late = self._grew = now
        self._patience = patience

    def begin(self, now: float, seconds: float) -> None:
        """Whoever is there is heard of within so many seconds."""
        self._late, self._grew = now + seconds, now

    def grew(self, now: float) -> None:
        """Records came that we lacked, and there are more where they came from."""
        self._grew = now

    def is_over(self, now: float, *, ahead: bool, heard_equal: bool) -> bool:
        """`ahead`: somebody has records that we lack. `heard_equal`: the head of somebody's chain is in ours."""
        return (not ahead and (heard_equal or now >= self._late)) or now >= self._at_last

    @property
    def _at_last(self) -> float:
        return max(self._late, min(self._grew, self._late + TIMES * self._patience)) + self._patience

    def times(self) -> list[float]:
        """When it may be over though nothing is heard."""
        return [self._late, self._at_last]
