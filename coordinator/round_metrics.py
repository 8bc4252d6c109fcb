"""What is counted from one look at the swarm to the next: how long the parts of a round took, what peers sent."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.overview import Overview
from coordinator.swarm import TRAINING_PHASES
from protocol.ids import PeerKey

MAX_BYTES_PER_SECOND = 10 * 10**9
"""No peer sends more: one that says so adds this much and not more."""


class RoundTimer:
    """Begin of a round: when the record before was seen. Its exchange begins when half of those who work at it say so.

    `took(phase, seconds)` hears of "train" and "exchange", where both were seen, and of "all"; as exact as one looks.
    """

    def __init__(self, took: Callable[[str, float], None]):
        self._took = took
        self._round: int | None = None
        self._began: float | None = None  # None: nobody saw it begin
        self._exchange: float | None = None

    def update(self, o: Overview, now: float) -> None:
        """Take in what is so now."""
        if o.round != self._round:
            # Rounds that were caught up with have no time of their own.
            if self._began is not None and self._round is not None and o.round == self._round + 1:
                self._took("all", now - self._began)
                if self._exchange is not None:
                    self._took("train", self._exchange - self._began)
                    self._took("exchange", now - self._exchange)
            seen = self._round is not None and o.round == self._round + 1
            self._round, self._began, self._exchange = o.round, now if seen else None, None
        if o.rests and self._began is not None and self._exchange is None:
            self._began = now  # a pause is no part of a round
        if self._exchange is None and self._began is not None:
            at = [
                p.phase for p in o.peers if p.phase in TRAINING_PHASES and p.heartbeat and p.heartbeat.round == o.round
            ]
            if at and 2 * at.count("exchanging") >= len(at):
                self._exchange = now


class TrafficCounter:
    """Bytes that peers say they have sent and received, added up while they are heard: it only grows."""

    def __init__(self):
        self.up = 0
        self.down = 0
        self._last: dict[PeerKey, tuple[int, int]] = {}
        self._at: float | None = None

    def update(self, o: Overview, now: float) -> None:
        """Take in what is so now."""
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
    """A peer that started again counts from zero again."""
    return now - before if now >= before else now
