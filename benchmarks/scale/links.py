"""Virtual time, and packets on modelled links: each peer has an up and a down rate, each pair a delay.

A packet goes as the product's outbox sends it: what waits for one receiver goes together, at most `CALLS_OUT` calls of
a sender are under way, and a call is over when its answer is back. Packets pass a sender's line one after the other,
then the receiver's, and are then looked at one after the other. They go before blobs, which get what is left.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.scale.sizes import PACKET
from peer.node.outbox import MAX_PACKET, MAX_WAITING
from peer.swarm.swarm import CALLS_OUT
from protocol.messages import Heartbeat

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
    """What one peer sent and got, in bytes and messages."""

    __slots__ = ("up", "down", "sent", "packets")

    def __init__(self) -> None:
        self.up = self.down = self.sent = self.packets = 0


class Links:
    """All lines. `deliver(to, message, source)` is called when a message has been looked at."""

    def __init__(
        self,
        clock: Clock,
        up: Sequence[float],
        down: Sequence[float],
        delay: Callable[[int, int], float],
        size_of: Callable[[Any], int],
        deliver: Callable[[int, Any, int], None],
    ):
        """Rates in bytes a second; delays one way, in seconds."""
        self._clock = clock
        self.up, self.down, self.delay = up, down, delay
        self._size_of = size_of
        self._deliver = deliver
        count = len(up)
        self._up_free = [0.0] * count
        self._down_free = [0.0] * count
        self._looked = [0.0] * count
        self._waiting: list[dict[int, deque[tuple[Any, int]]]] = [{} for _ in range(count)]
        self._turns: list[deque[int]] = [deque() for _ in range(count)]
        self._calls = [0] * count
        self.traffic = [Traffic() for _ in range(count)]
        self.crossed_up = [0.0] * count
        """Bytes of packets on a line since the blobs last looked."""
        self.crossed_down = [0.0] * count

    def broadcast(self, source: int, message: Any) -> None:
        """To everyone."""
        item = (message, self._size_of(message))
        for to in range(len(self.up)):
            if to != source:
                self._queue(source, to, item)
        self._go(source)

    def send(self, source: int, to: int, messages: Sequence[Any]) -> None:
        """To one."""
        for message in messages:
            self._queue(source, to, (message, self._size_of(message)))
        self._go(source)

    def _queue(self, source: int, to: int, item: tuple[Any, int]) -> None:
        waiting = self._waiting[source]
        queue = waiting.get(to)
        if queue is None:
            # No call to this peer is under way, nor is one waiting for its turn.
            queue = waiting[to] = deque(maxlen=MAX_WAITING)
            self._turns[source].append(to)
        elif isinstance(getattr(item[0], "body", None), Heartbeat):
            for old in [i for i in queue if isinstance(getattr(i[0], "body", None), Heartbeat)]:
                queue.remove(old)
        queue.append(item)

    def _go(self, source: int) -> None:
        turns = self._turns[source]
        while turns and self._calls[source] < CALLS_OUT:
            self._calls[source] += 1
            self._call(source, turns.popleft())

    def _call(self, source: int, to: int) -> None:
        queue = self._waiting[source][to]
        packet, size = [], 0
        while queue and (not size or size + queue[0][1] <= MAX_PACKET):
            message, more = queue.popleft()
            packet.append(message)
            size += more
        size += PACKET
        now, traffic = self._clock.now, self.traffic[source]
        traffic.up += size
        traffic.sent += len(packet)
        traffic.packets += 1
        self.traffic[to].down += size
        self.crossed_up[source] += size
        self.crossed_down[to] += size
        delay = self.delay(source, to)
        left = self._up_free[source] = max(now, self._up_free[source]) + size / self.up[source]
        here = self._down_free[to] = max(left + delay, self._down_free[to]) + size / self.down[to]
        self._clock.at(here, self._arrive, source, to, packet, delay)

    def _arrive(self, source: int, to: int, packet: list[Any], delay: float) -> None:
        now = self._clock.now
        done = self._looked[to] = max(now, self._looked[to]) + CHECK * len(packet)
        self._clock.at(done, self._looked_at, source, to, packet)
        self._clock.at(done + delay, self._answered, source, to)

    def _looked_at(self, source: int, to: int, packet: list[Any]) -> None:
        for message in packet:
            self._deliver(to, message, source)

    def _answered(self, source: int, to: int) -> None:
        self._calls[source] -= 1
        waiting = self._waiting[source]
        if waiting[to]:
            self._turns[source].append(to)
        else:
            del waiting[to]
        self._go(source)
