"""Counters that grow from one overview to the next: durations of the phases of a round, and peers' traffic."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.overview import Overview
from coordinator.swarm import TRAINING_PHASES
from protocol.ids import PeerKey

MAX_BYTES_PER_SECOND = 10 * 10**9
"""Maximum traffic of one peer: a larger claim adds this much."""


class RoundTimer:
    """Times the phases of each round.

    A round begins when the record before it is seen, its exchange when half of the training peers report it.

    `took(phase, seconds)` is called with "train" and "exchange", if both were observed, and with "all". The precision
    is that of the overviews.
    """

    def __init__(self, took: Callable[[str, float], None]):
        self._took = took
        self._round: int | None = None
        self._began: float | None = None  # None: its beginning was not observed
        self._exchange: float | None = None

    def update(self, o: Overview, now: float) -> None:
        """Take in a new overview (unix seconds)."""
        if o.round != self._round:
            # Rounds that were caught up with have no duration of their own.
            if self._began is not None and self._round is not None and o.round == self._round + 1:
                self._took("all", now - self._began)
                if self._exchange is not None:
                    self._took("train", self._exchange - self._began)
                    self._took("exchange", now - self._exchange)
            seen = self._round is not None and o.round == self._round + 1
            self._round, self._began, self._exchange = o.round, now if seen else None, None
        if o.rests and self._began is not None and self._exchange is None:
            self._began = now  # a pause is not part of a round
        if self._exchange is None and self._began is not None:
            at = [
                p.phase for p in o.peers if p.phase in TRAINING_PHASES and p.heartbeat and p.heartbeat.round == o.round
            ]
            if at and 2 * at.count("exchanging") >= len(at):
                self._exchange = now


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
