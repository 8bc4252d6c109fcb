"""Virtual time, and packets on modelled links: each peer has an up and a down rate, each pair a delay.

A broadcast follows the product's outbox: at most `CALLS_OUT` calls are in flight, and a call ends with its answer. A
sender's packets pass its link one after the other. Only the first `watched` peers receive anything; the messages to
the others are counted. At a receiver packets pass the line, and are looked at, one after the other.
Packets go before blobs, which get what is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.scale.sizes import PACKET
from peer.swarm.swarm import CALLS_OUT

CHECK = 0.0002
"""Seconds of one core for a message that arrives: verify its signature, decode it (about 5,000 a second)."""


LOOK_EVERY = 32
"""Calls between two looks whether it is over."""


class Clock:
    """An event heap."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call it at a time."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, call, args))

    def run(self, until: Callable[[], bool], limit: float) -> None:
        """Make calls in order until `until` holds or the time is over."""
        heap, pop = self._heap, heapq.heappop
        while heap and not until():
            for _ in range(min(LOOK_EVERY, len(heap))):
                self.now, _, call, args = pop(heap)
                if self.now > limit:
                    return
                call(*args)


class Traffic:
    """Bytes and messages that one peer sent, and bytes that it received (counted for watched peers)."""

    __slots__ = ("up", "down", "sent")

    def __init__(self) -> None:
        self.up = self.down = self.sent = 0


class Links:
    """All lines. `deliver(to, message, source)` is called when a message has been looked at."""

    def __init__(
        self,
        clock: Clock,
        watched: int,
        up: Sequence[float],
        down: Sequence[float],
        delay: Callable[[int, int], float],
        size_of: Callable[[Any], int],
        deliver: Callable[[int, Any, int], None],
    ):
        """Rates in bytes a second; delays one way, in seconds."""
        self._clock = clock
        self.watched = watched
        self.up, self.down, self.delay = up, down, delay
        self._size_of = size_of
        self._deliver = deliver
        self._up_free = [0.0] * len(up)
        self._down_free = [0.0] * watched
        self._looked = [0.0] * watched
        self.traffic = [Traffic() for _ in up]
        self.crossed_up = [0.0] * len(up)
        """Bytes of packets on a line since the blobs last looked."""
        self.crossed_down = [0.0] * watched

    def broadcast(self, source: int, message: Any) -> None:
        """Send a message to everyone."""
        count = len(self.up)
        size = self._size_of(message) + PACKET
        self._count(source, count - 1, size)
        begin = max(self._clock.now, self._up_free[source])
        line = size / self.up[source]
        turn = 2 * self.delay(source, source + 1) + CHECK + line + size / self.down[0]
        self._up_free[source] = begin + max((count - 1) * line, (count - 1) // CALLS_OUT * turn)
        for to in range(self.watched):
            if to != source:
                place = (to - source - 1) % count
                left = begin + max((place + 1) * line, place // CALLS_OUT * turn + line)
                self._clock.at(left + self.delay(source, to), self._arrive, source, to, message, size)

    def send(self, source: int, to: int, messages: Sequence[Any]) -> None:
        """Send a message to one peer, in one packet."""
        size = PACKET + sum(map(self._size_of, messages))
        self._count(source, 1, size, len(messages))
        left = self._up_free[source] = max(self._clock.now, self._up_free[source]) + size / self.up[source]
        if to < self.watched:
            for i, message in enumerate(messages):
                whole = 0 if i else size
                self._clock.at(left + self.delay(source, to), self._arrive, source, to, message, whole)

    def _count(self, source: int, packets: int, size: int, messages: int = 1) -> None:
        traffic = self.traffic[source]
        traffic.up += packets * size
        traffic.sent += packets * messages
        self.crossed_up[source] += packets * size

    def _arrive(self, source: int, to: int, message: Any, size: int) -> None:
        now = self._clock.now
        self.traffic[to].down += size
        self.crossed_down[to] += size
        here = self._down_free[to] = max(now, self._down_free[to]) + size / self.down[to]
        done = self._looked[to] = max(here, self._looked[to]) + CHECK
        self._clock.at(done, self._deliver, to, message, source)
