"""A counter that grows from one overview to the next: the traffic of peers."""

from __future__ import annotations

from coordinator.overview import Overview
from protocol.ids import PeerKey

MAX_BYTES_PER_SECOND = 10 * 10**9
"""Maximum traffic of one peer: a larger claim adds this much."""


class TrafficCounter:
    """Bytes that peers report as sent and received, added up while they are heard from: it only grows."""

    def __init__(self):
        self.up = 0
        self.down = 0
        self._last: dict[PeerKey, tuple[int, int]] = {}
        self._at: float | None = None

    def update(self, o: Overview, now: float) -> None:
        """Take in a new overview (unix seconds)."""
        most = int(MAX_BYTES_PER_SECOND * max(0.0, now - (now if self._at is None else self._at)))
        last: dict[PeerKey, tuple[int, int]] = {}
        for p in o.peers:
            if (h := p.heartbeat) is None:
                continue
            last[p.peer] = (h.bytes_up, h.bytes_down)
            if (before := self._last.get(p.peer)) is not None:
                self.up += min(most, _grown(before[0], h.bytes_up))
                self.down += min(most, _grown(before[1], h.bytes_down))
        self._last, self._at = last, now


def _grown(before: int, now: int) -> int:
    """Return the growth of a counter; a restarted peer counts from zero again."""
    return now - before if now >= before else now
