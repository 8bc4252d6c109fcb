"""How a newcomer's state came over its line: sampled from the router's counters while it is being fetched."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

from tests.scenarios import script
from tests.scenarios.script import Scenario
from tests.scenarios.swarm import Swarm
from tests.wan.topology import WanError

EVERY = 0.1
PAUSE = 3.0
"""Seconds without a blob that arrives, and it is not the same one."""

TENTH = 0.1


@dataclass(frozen=True)
class Sample:
    """One moment in which a blob of `size` bytes was arriving: IP bytes that had come, by sender. `at`: seconds."""

    at: float
    size: int
    came: dict[str, int]

    @property
    def all(self) -> int:
        return sum(self.came.values())


@dataclass(frozen=True)
class Downloaded:
    """`share` of the downlink was used for `seconds`; `times` the state's size came; who sent a tenth of it each."""

    size: int
    seconds: float
    share: float
    times: float
    donors: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.size / 1e6:.1f} MB in {self.seconds:.1f} s, {self.share:.0%} of the line used, "
            f"{self.times:.2f} times its size came, from {' '.join(self.donors)}"
        )


class Metered:
    """`watch` it in a task; it looks at the peers of `expect download` and `interrupt` alone."""

    def __init__(self, swarm: Swarm, scenario: Scenario):
        self._swarm = swarm
        wanted = [s.peers for s in scenario.steps if isinstance(s, script.Download | script.Interrupt)]
        self._names = sorted({name for peers in wanted for name in peers})
        self._samples: dict[str, list[Sample]] = {name: [] for name in self._names}

    async def watch(self) -> None:
        while self._names:
            for name in self._names:
                if name in self._swarm.running():
                    with suppress(WanError):  # a router that is late once
                        await asyncio.to_thread(self._look, name)
            await asyncio.sleep(EVERY)

    def _look(self, name: str) -> None:
        size, samples = self._swarm.arriving(name), self._samples[name]
        if not size or (samples and size < samples[0].size):
            return
        if samples and size > samples[0].size:
            samples.clear()  # data came first: a state is larger
        if samples and time.monotonic() - samples[-1].at > PAUSE:
            return  # another one: the first is what a newcomer waits for
        samples.append(Sample(time.monotonic(), size, self._swarm.wan.flows(name)))

    def forget(self, name: str) -> None:
        """Reset the meter for a new start."""
        if name in self._samples:
            self._samples[name] = []

    def came(self, name: str, share: float) -> int | None:
        """Bytes that have come since a state began to arrive, once they are this share of it, and there is more."""
        samples = self._samples[name]
        if not samples or samples[-1].size < 1_000_000:
            return None
        came = samples[-1].all - samples[0].all
        return came if came >= share * samples[-1].size else None

    def download(self, name: str) -> Downloaded | None:
        """Return the download of the largest blob that arrived. None when there was none, or it came at once."""
        samples = self._samples.get(name, [])
        if len(samples) < 2:
            return None
        first, last = samples[0], samples[-1]
        seconds, size = last.at - first.at, last.size
        each = {n: last.came[n] - first.came[n] for n in last.came}
        whole, rate = last.all - first.all, self._swarm.wan.host(name).down
        donors = tuple(n for n, came in each.items() if came >= TENTH * size)
        return Downloaded(size, seconds, whole / (rate * seconds), whole / size, donors)
