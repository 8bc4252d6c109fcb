"""Observations of a swarm over time: the peers' snapshots, sampled beside the play. Reads files only."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from statistics import median

from tests.scenarios.counted import Counted
from tests.scenarios.swarm import Swarm

EVERY = 0.25


class Seen:
    """`watch` it in a task. Times are of `time.monotonic`."""

    def __init__(self, swarm: Swarm):
        self._swarm = swarm
        self.rounds: dict[str, int] = {}
        """The round in which each peer is, as it last said."""
        self.ready: dict[str, int] = {}
        """The round in which each peer was first seen to train where the others are, since it was started last."""
        self.states: dict[tuple[int, str], dict[str, str]] = defaultdict(dict)
        """By the number of rounds applied and the last one's record: the digest that each peer showed."""
        self.first: dict[int, float] = {}
        """When the first peer was seen in a round."""
        self.counted = Counted(swarm.scenario.window)
        self.training: dict[str, float] = {}
        """The share of each trainer's last minute in which it trained."""

    async def watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(EVERY)

    def _look(self) -> None:
        now = time.monotonic()
        for name in self._swarm.running():
            if (s := self._swarm.shown(name)) is None:
                continue
            self.rounds[name] = s.round
            self.counted.shown(name, s)
            if (training := s.time_shares.get("training")) is not None:
                self.training[name] = training
            if s.phase in ("training", "exchanging") and s.round >= max(self.rounds.values()) - 1:
                self.ready.setdefault(name, s.round)
            if s.round not in self.first and s.round >= max(self.first, default=0):
                self.first[s.round] = now
            if s.state and s.phase in ("training", "exchanging"):  # between two branches, state and record differ
                self.states[s.state_round, s.head][name] = s.state

    def forget(self, name: str) -> None:
        """Reset a peer that starts again."""
        self.rounds.pop(name, None)
        self.ready.pop(name, None)
        self.counted.starts(name)

    def last_look(self, name: str) -> None:
        """Record a peer before its power cut."""
        shown = self._swarm.shown(name)
        self.counted.cut(name, shown, self._swarm.age(name) if shown else 0.0)

    def forget_states(self) -> None:
        """States seen so far do not count: a branch that lost may have had others."""
        self.states.clear()

    def pace(self, last: int, since: int = 0) -> float | None:
        """Return the median seconds of the last rounds, none of them before `since`; None if there were none."""
        times = [self.first[r] for r in sorted(self.first) if r >= since][-last - 1 :]
        took = [b - a for a, b in zip(times, times[1:], strict=False)]
        return median(took) if took else None
