"""Who is in the swarm: everyone heard of, with what each says of itself and since when it has been silent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
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
        self._known: OrderedDict[PeerKey, Known] = OrderedDict()

    def update(self, heard: Mapping[PeerKey, Heard], now: float) -> None:
        """Take in what the observer hears now."""
        for peer, h in sorted(heard.items(), key=lambda item: -item[1].seconds_since):
            self._known[peer] = Known(h.heartbeat, now - h.seconds_since)
            self._known.move_to_end(peer)
        while len(self._known) > MAX_PEERS:
            self._known.popitem(last=False)

    def __getitem__(self, peer: PeerKey) -> Known:
        return self._known[peer]

    def keys(self) -> list[PeerKey]:
        """Those heard of, most recently heard last."""
        return list(self._known)

    def phase(self, peer: PeerKey, now: float) -> str:
        """As in its heartbeat; or "silent", "gone"."""
        known = self._known.get(peer)
        if known is None or known.heartbeat.phase == "leaving":
            return "gone"
        silence = now - known.heard_at
        if silence > GONE_AFTER * self._member_seconds:
            return "gone"
        return "silent" if silence > self._member_seconds else known.heartbeat.phase
