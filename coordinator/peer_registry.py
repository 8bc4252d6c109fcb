"""The peers that the run page shows: each with its newest heartbeat, and since when it has been silent.

It decides nothing. The heartbeats are those of the observer's node, which forgets the silent sooner.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from coordinator.swarm import ReceivedHeartbeat
from protocol.ids import PeerKey
from protocol.messages import PHASES as REPORTED
from protocol.messages import Heartbeat

MAX_PEERS = 10_000
GONE_AFTER = 15
"""A silent peer is gone after this number of times `round.member_seconds`."""

PHASES = (*(p for p in REPORTED if p != "leaving"), "silent", "gone", "banned", "barred")
"""The phases that are shown: the peer's own reports; or silent, gone, banned by the owner, barred by a conviction."""

RATE_SECONDS = 30.0
"""Seconds over which bytes are counted: exchanges come in bursts."""


@dataclass(frozen=True, slots=True)
class TrackedPeer:
    """A peer's newest heartbeat, when it came, and how fast its counters grow.

    `since` is when it entered this phase; training and exchanging count as one. Times are unix seconds. Rates are bytes
    a second over about half a minute, by the peer's own counters.
    """

    heartbeat: Heartbeat
    heard_at: float
    since: float = 0.0
    up_per_second: float = 0.0
    down_per_second: float = 0.0
    counted_at: float = 0.0
    counted: tuple[int, int] = (0, 0)


class PeerRegistry:
    """The newest heartbeat of every peer; if there are too many, the one silent for longest is forgotten."""

    def __init__(self, member_seconds: Callable[[], float]):
        self._member_seconds = member_seconds
        self._known: dict[PeerKey, TrackedPeer] = {}

    def update(self, heartbeats: Mapping[PeerKey, ReceivedHeartbeat], now: float) -> None:
        """Take in the observer's heartbeats."""
        away = self._member_seconds()
        for peer, h in heartbeats.items():
            self._known[peer] = _next(self._known.get(peer), h.heartbeat, now - h.seconds_since, away)
        for peer in self._known.keys() - heartbeats.keys():
            if (known := self._known[peer]).heartbeat.unreachable:  # kilobytes, and no news of a peer that is away
                self._known[peer] = replace(known, heartbeat=replace(known.heartbeat, unreachable=()))
            if (known := self._known[peer]).heard_at > now:  # the clock was set back
                self._known[peer] = replace(known, heard_at=now)
        if (many := len(self._known) - MAX_PEERS) > 0:
            for peer in heapq.nsmallest(many, self._known, key=lambda p: self._known[p].heard_at):
                del self._known[peer]

    def get(self, peer: PeerKey) -> TrackedPeer | None:
        return self._known.get(peer)

    def keys(self) -> Iterable[PeerKey]:
        return self._known.keys()

    def phase(self, known: TrackedPeer | None, now: float) -> str:
        """Return the phase of the heartbeat; or "silent", "gone"."""
        if known is None or known.heartbeat.phase == "leaving":
            return "gone"
        silence, limit = now - known.heard_at, self._member_seconds()
        if silence > GONE_AFTER * limit:
            return "gone"
        return "silent" if silence > limit else known.heartbeat.phase


def _next(before: TrackedPeer | None, heartbeat: Heartbeat, heard_at: float, away: float) -> TrackedPeer:
    counted = (heartbeat.bytes_up, heartbeat.bytes_down)
    if before is None or heard_at - before.heard_at > away:  # it was away: start from scratch
        return TrackedPeer(heartbeat, heard_at, heard_at, counted_at=heard_at, counted=counted)
    same = _kind(before.heartbeat.phase) == _kind(heartbeat.phase)
    since = before.since if same else heard_at
    up, down, at, last = before.up_per_second, before.down_per_second, before.counted_at, before.counted
    if counted < last or not 0 <= heard_at - at < RATE_SECONDS:  # below 0: the clock was set back
        elapsed = heard_at - at
        if elapsed > 0 and counted[0] >= last[0] and counted[1] >= last[1]:
            up, down = (counted[0] - last[0]) / elapsed, (counted[1] - last[1]) / elapsed
        at, last = heard_at, counted
    return TrackedPeer(heartbeat, heard_at, since, up, down, at, last)


def _kind(phase: str) -> str:
    return "training" if phase == "exchanging" else phase
