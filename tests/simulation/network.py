"""Virtual time, and a network that loses, delays, duplicates, reorders and partitions."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Clock:
    """An event heap: `at` puts a call into the future, `run_until` makes them in order."""

    def __init__(self):
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable, tuple]] = []
        self._count = 0
        self.steps = 0

    def at(self, when: float, call: Callable, *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, call, args))

    def after(self, delay: float, call: Callable, *args: Any) -> None:
        self.at(self.now + delay, call, *args)

    def run_until(self, when: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= when:
            self.now, _, call, args = heapq.heappop(heap)
            self.steps += 1
            call(*args)
        self.now = when


@dataclass
class Weather:
    """How bad the network is."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.05
    jitter: float = 0.02
    """Deviations of the delay are exponential with this mean: messages overtake each other."""


class Network:
    """Delivers by chance. `cut` holds the ordered pairs (from, to) between which nothing passes."""

    def __init__(self, clock: Clock, rng: random.Random, weather: Weather):
        self.clock = clock
        self.rng = rng
        self.weather = weather
        self.cut: set[tuple[int, int]] = set()

    def connected(self, a: int, b: int) -> bool:
        """Return whether b can answer questions of a."""
        return (a, b) not in self.cut and (b, a) not in self.cut

    def delay(self) -> float:
        return self.weather.delay + self.rng.expovariate(1.0) * self.weather.jitter

    def send(self, source: int, to: int, call: Callable, *args: Any) -> None:
        """Call it at the receiver after a delay, or never, or twice."""
        if (source, to) in self.cut:
            return
        w, rng = self.weather, self.rng
        if w.loss and rng.random() < w.loss:
            return
        self.clock.after(self.delay(), call, *args)
        if w.duplicate and rng.random() < w.duplicate:
            self.clock.after(self.delay() * 3, call, *args)
