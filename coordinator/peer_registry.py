"""Who is in the swarm: everyone heard of, with what each says of itself and since when it has been silent."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coordinator.swarm import ReceivedHeartbeat
from protocol.ids import PeerKey
from protocol.messages import PHASES as SAID
from protocol.messages import Heartbeat

MAX_PEERS = 10_000
GONE_AFTER = 15
"""A peer is gone, not merely silent, after so many times `round.member_seconds`."""

PHASES = (*(p for p in SAID if p != "leaving"), "silent", "gone", "banned")
"""What a peer may be said to do: what it says itself; or that it is not heard, has left, or is banned by the owner."""

RATE_SECONDS = 30.0
"""Over so long bytes are counted: exchanges come in bursts."""


@dataclass(frozen=True, slots=True)
class TrackedPeer:
    """A peer's newest heartbeat and when it came; since when it does what it does (training and exchanging are one);
    and what its counters say it sends and receives, in bytes a second over half a minute or so."""

    heartbeat: Heartbeat
    heard_at: float
    since: float = 0.0
    up_per_second: float = 0.0
    down_per_second: float = 0.0
    counted_at: float = 0.0
    counted: tuple[int, int] = (0, 0)


class PeerRegistry:
    """The newest heartbeat of every peer; when there are too many, the one silent for longest is forgotten."""

    def __init__(self, member_seconds: float):
        self.member_seconds = member_seconds
        self._known: dict[PeerKey, TrackedPeer] = {}

    def update(self, heard: Mapping[PeerKey, ReceivedHeartbeat], now: float) -> None:
        """Take in what the observer hears now."""
        for peer, h in heard.items():
            self._known[peer] = self._next(self._known.get(peer), h.heartbeat, now - h.seconds_since)
        if (many := len(self._known) - MAX_PEERS) > 0:
            for peer in heapq.nsmallest(many, self._known, key=lambda p: self._known[p].heard_at):
                del self._known[peer]

    def _next(self, before: TrackedPeer | None, heartbeat: Heartbeat, heard_at: float) -> TrackedPeer:
        counted = (heartbeat.bytes_up, heartbeat.bytes_down)
        if before is None or heard_at - before.heard_at > self.member_seconds:  # it was away: all begins anew
            return TrackedPeer(heartbeat, heard_at, heard_at, counted_at=heard_at, counted=counted)
        same = _kind(before.heartbeat.phase) == _kind(heartbeat.phase)
        since = before.since if same else heard_at
        up, down, at, last = before.up_per_second, before.down_per_second, before.counted_at, before.counted
        if counted < last or heard_at - at >= RATE_SECONDS:
            elapsed = heard_at - at
            if elapsed > 0 and counted[0] >= last[0] and counted[1] >= last[1]:
                up, down = (counted[0] - last[0]) / elapsed, (counted[1] - last[1]) / elapsed
            at, last = heard_at, counted
        return TrackedPeer(heartbeat, heard_at, since, up, down, at, last)

    def get(self, peer: PeerKey) -> TrackedPeer | None:
        """What is known of a peer, if anything."""
        return self._known.get(peer)

    def keys(self) -> Iterable[PeerKey]:
        """Those heard of."""
        return self._known.keys()

    def phase(self, known: TrackedPeer | None, now: float) -> str:
        """As in the heartbeat; or "silent", "gone"."""
        if known is None or known.heartbeat.phase == "leaving":
            return "gone"
        silence = now - known.heard_at
        if silence > GONE_AFTER * self.member_seconds:
            return "gone"
        return "silent" if silence > self.member_seconds else known.heartbeat.phase


def _kind(phase: str) -> str:
    return "training" if phase == "exchanging" else phase
