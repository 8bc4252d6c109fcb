"""A machine at a fraction of the others' speed: its trainer is stopped and continued, many times a second.

On cores that many trainers share, a share of the time is not a share of the speed. So what it trained is compared
with what the others did, and the share of the time is set by that.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from statistics import median

from tests.scenarios.seen import Seen
from tests.scenarios.swarm import Swarm

PERIOD = 0.25
"""Seconds of one stop and go."""

ADJUST_EVERY = 12
"""Periods between two looks at what was trained: a peer shows itself once a second."""

LEAST, MOST = 0.02, 1.0


class Slowed:
    """A thread of its own, from when the peer is seen to train until `stop`."""

    def __init__(self, swarm: Swarm, seen: Seen, name: str, speed: float):
        self._swarm, self._seen, self._name, self._speed = swarm, seen, name, speed
        self._share = speed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name} is slow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let it run again."""
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        before: dict[str, int] = {}
        periods, pid = 0, None
        while not self._over.is_set():
            pid = pid or self._trainer()
            if pid is None or self._name not in self._seen.ready:
                self._over.wait(PERIOD)
                continue
            if periods % ADJUST_EVERY == 0:
                before = self._adjust(before)
            periods += 1
            try:
                os.kill(pid, signal.SIGSTOP)
                self._over.wait(PERIOD * (1 - self._share))
                os.kill(pid, signal.SIGCONT)
                self._over.wait(PERIOD * self._share)
            except ProcessLookupError:
                pid = None  # it has ended; the node may start another one

    def _trainer(self) -> int | None:
        with suppress(AssertionError, KeyError):
            return self._swarm.trainer_of(self._name)
        return None

    def _adjust(self, before: dict[str, int]) -> dict[str, int]:
        """More or less of the time, by what was trained since; what was trained until now."""
        now = {n: self._seen.counted.trained(n) for n in list(self._seen.ready)}
        did = {n: count - before[n] for n, count in now.items() if n in before}
        others = [count for n, count in did.items() if n != self._name and count > 0]
        if self._name in did and others:
            goal = self._speed * median(others)
            factor = goal / did[self._name] if did[self._name] > 0 else 1.5
            self._share = min(MOST, max(LEAST, self._share * min(1.5, max(0.6, factor))))
        return now
