"""Kills a worker with SIGKILL at random moments, and looks at what it leaves."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.chaos import worker
from tests.chaos.verdict import problems

PER_LEDGER = 25
"""Kills of one ledger before a new one is begun: checking all of it each time stays quick."""

MOST_SECONDS = 0.15


@dataclass
class Report:
    """How it went."""

    kills: int = 0
    acknowledged: int = 0
    problems: list[str] = field(default_factory=list)


def kill_often(
    place: Callable[[], AbstractContextManager[str]], kills: int, *, seed: int, mode: str = "honest",
    until_found: bool = False, said: Callable[[str], None] = lambda _: None,
) -> Report:  # fmt: skip
    """So many kills; `place` gives a new, empty ledger's address. `until_found`: stop at the first problem."""
    rng, report = random.Random(seed), Report()
    while report.kills < kills:
        with place() as where:
            acknowledged: set[str] = set()
            for _ in range(min(PER_LEDGER, kills - report.kills)):
                # Some while it opens, most in the thick of it.
                opening = rng.random() < 0.15
                heard = _one_life(where, mode, opening, rng.random() * MOST_SECONDS * (0.3 if opening else 1))
                report.kills += 1
                report.acknowledged += len(heard)
                acknowledged |= heard
                found = problems(where, acknowledged)
                if found:
                    report.problems += [f"kill {report.kills}, seed {seed}: {p}" for p in found[:5]]
                    break
        said(f"{report.kills} kills, {report.acknowledged} acknowledged, {len(report.problems)} problems")
        if report.problems and until_found:
            break
    return report


def _one_life(where: str, mode: str, opening: bool, seconds: float) -> set[str]:
    """What a worker acknowledged before it was killed, so long after it began, or after it had opened the ledger."""
    reading, writing = os.pipe()
    child = os.fork()  # everything is imported already: a life costs milliseconds
    if child == 0:
        try:
            os.close(reading)
            worker.run(where, mode, worker.on_pipe(writing))
        finally:
            os._exit(1)
    os.close(writing)
    try:
        said = b"" if opening else os.read(reading, 65_536)  # "opened"
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        while more := os.read(reading, 65_536):
            said += more
    finally:
        os.close(reading)
        _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        raise AssertionError(f"the worker ended by itself with {os.waitstatus_to_exitcode(status)}: see above")
    return set(said.decode().splitlines()) - {"opened"}
