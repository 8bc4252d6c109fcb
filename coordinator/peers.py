"""Who is in the swarm: everyone heard of, with what each says of itself and since when it has been silent."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coordinator.swarm import Heard
from protocol.ids import PeerKey
from protocol.messages import Heartbeat

MAX_PEERS = 10_000
GONE_AFTER = 15
"""A peer is gone, not merely silent, after so many times `round.member_seconds`."""


@dataclass(frozen=True, slots=True)
class Known:
    """A peer's newest heartbeat and when it came."""

    heartbeat: Heartbeat
    heard_at: float


class PeerBook:
    """The newest heartbeat of every peer; when there are too many, the one silent for longest is forgotten."""

    def __init__(self, member_seconds: float):
        self._member_seconds = member_seconds
        self._known: dict[PeerKey, Known] = {}

    def update(self, heard: Mapping[PeerKey, Heard], now: float) -> None:
        """Take in what the observer hears now."""
        for peer, h in heard.items():
            self._known[peer] = Known(h.heartbeat, now - h.seconds_since)
        if (many := len(self._known) - MAX_PEERS) > 0:
            for peer in heapq.nsmallest(many, self._known, key=lambda p: self._known[p].heard_at):
                del self._known[peer]

    def get(self, peer: PeerKey) -> Known | None:
        """What is known of a peer, if anything."""
        return self._known.get(peer)

    def keys(self) -> Iterable[PeerKey]:
        """Those heard of."""
        return self._known.keys()

    def phase(self, known: Known | None, now: float) -> str:
        """As in the heartbeat; or "silent", "gone"."""
        if known is None or known.heartbeat.phase == "leaving":
            return "gone"
        silence = now - known.heard_at
        if silence > GONE_AFTER * self._member_seconds:
            return "gone"
        return "silent" if silence > self._member_seconds else known.heartbeat.phase
