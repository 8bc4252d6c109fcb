"""Kills a worker with SIGKILL at random moments, and looks at what it leaves.

    python -m tests.chaos.kills WHERE --kills N --seed S [--mode early] [--until-found]

The argument WHERE is a folder, or a PostgreSQL server's URL; the output is the report as JSON. A process of its own,
since it forks:
nothing else must run in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.chaos import worker
from tests.chaos.verdict import problems
from tests.support import postgres_world

PER_LEDGER = 25
"""Kills of one ledger before a new one is begun: checking all of it each time stays quick."""

MOST_SECONDS = 0.1
"""Of a life, after the ledger is open."""

OPEN_SECONDS = 60
"""A worker that has not opened the ledger by then is stuck."""


@dataclass
class Report:
    """How it went."""

    kills: int = 0
    acknowledged: int = 0
    problems: list[str] = field(default_factory=list)


def files_in(folder: Path) -> Callable[[], AbstractContextManager[str]]:
    """New ledgers in a folder; each is removed after use."""
    numbers = itertools.count()

    @contextmanager
    def place() -> Iterator[str]:
        path = folder / f"ledger{next(numbers)}.sqlite"
        yield str(path)
        for left in folder.glob(f"{path.name}*"):
            left.unlink()

    return place


def kill_often(
    place: Callable[[], AbstractContextManager[str]], kills: int, *, seed: int, mode: str = "honest",
    until_found: bool = False, most_seconds: float = MOST_SECONDS, said: Callable[[str], None] = lambda _: None,
) -> Report:  # fmt: skip
    """Kill a worker a number of times; `place` returns a new, empty ledger's address.

    `until_found`: stop at the first problem.
    """
    rng, report = random.Random(seed), Report()
    while report.kills < kills:
        with place() as where:
            acknowledged: set[str] = set()
            for _ in range(min(PER_LEDGER, kills - report.kills)):
                # Some while it opens, most in the thick of it.
                opening = rng.random() < 0.15
                # Half of the lives are long enough to acknowledge something, on however busy a machine.
                lines = 0 if opening else rng.randint(1, 2)
                heard = _one_life(where, mode, lines, rng.random() * most_seconds * (0.3 if opening else 1))
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


def _one_life(where: str, mode: str, lines: int, seconds: float) -> set[str]:
    """Kill a worker a given time after it said a number of lines; return its acknowledgements.

    The first line is that it has opened the ledger, each of the others an acknowledgement.
    """
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
        said = b""
        while said.count(b"\n") < lines:
            if not select.select([reading], [], [], OPEN_SECONDS)[0]:
                os.kill(child, signal.SIGKILL)
                raise AssertionError(f"the worker said nothing for {OPEN_SECONDS} s after {said!r}")
            if not (more := os.read(reading, 65_536)):
                break
            said += more
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


def one_whole_life(where: str, mode: str, rounds: int) -> list[str]:
    """Return the problems that remain after a worker posts a number of rounds without a kill."""
    child = os.fork()
    if child == 0:
        try:
            worker.run(where, mode, lambda _: None, rounds)
            os._exit(0)
        finally:
            os._exit(1)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        return [f"the worker ended with {code}"]
    return problems(where, [f"round {rounds - 1}", "admitted 0"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where")
    parser.add_argument("--kills", type=int, default=20, help="0: a whole life")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=["honest", "early", "split"], default="honest")
    parser.add_argument("--until-found", action="store_true")
    o = parser.parse_args()
    if "://" in o.where:
        place = lambda: postgres_world.empty_database(o.where)  # noqa: E731
    else:
        place = files_in(Path(o.where))
    if o.kills:
        report = kill_often(place, o.kills, seed=o.seed, mode=o.mode, until_found=o.until_found)
    else:
        with place() as where:
            report = Report(problems=one_whole_life(where, o.mode, 20))
    json.dump(asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
