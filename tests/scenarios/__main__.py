"""Play scenarios, and print what came of each: `python -m tests.scenarios [NAME ...]`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from benchmarks.report import save
from tests.scenarios import results, script
from tests.scenarios.play import Outcome, Play
from tests.scenarios.swarm import Swarm
from tests.wan.testbed import Wan, why_not

SPARE_SECONDS = 120.0
"""Seconds for the work before and after a scenario's own time."""


def play(scenario: script.Scenario, logs: Path | None = None) -> Outcome:
    """One scenario, on an emulated internet of its own. Raises WanError when that cannot be had.

    `logs`: a folder for the whole logs of all, which go with the scenario's end otherwise.
    """
    with (
        Wan(scenario.topology(), name=f"s{os.getpid()}", ttl=scenario.limit_seconds + SPARE_SECONDS) as wan,
        Swarm(scenario, wan) as swarm,
    ):
        try:
            return asyncio.run(Play(scenario, swarm).go())
        finally:
            if logs is not None:
                keep_logs(swarm, logs / scenario.name)


def keep_logs(swarm: Swarm, folder: Path) -> None:
    """Write each process's log of all its lives."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in swarm.processes:
        (folder / f"{name}.log").write_text(swarm.log(name))


def report(outcome: Outcome) -> str:
    """Return a table of the peers, for the line below the scenario's verdict."""
    s = outcome.scenario
    verdict = "passed" if outcome.ok else "FAILED"
    lines = [
        f"{s.name}: {verdict}: {s.what}",
        f"  {outcome.rounds} rounds in {outcome.seconds:.0f} s; the router was at most {outcome.late_ms:.0f} ms late",
        f"  {'peer':<10}{'in rounds':>10}{'windows':>10}{'MB up':>8}{'MB down':>9}",
    ]
    for name, f in outcome.peers.items():
        lines.append(
            f"  {name:<10}{f['rounds']:>10.0f}{f['windows']:>10.0f}{f['up'] / 1e6:>8.1f}{f['down'] / 1e6:>9.1f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(script.names())}; all if none is given"
    )
    parser.add_argument("--tries", type=int, default=1, metavar="N", help="play each N times (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all tries there, and go on with those that are")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs of all processes there, by try")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes and hosts are removed, results are kept
    try:
        scenarios = [script.read(name) for name in given.names or script.names()]
    except script.ScriptError as e:
        print(e, file=sys.stderr)
        return 2
    found = results.begun(given.json)

    def keep() -> None:
        found["goals"] = results.judged(found)
        if given.json:
            save(given.json, found)

    try:
        for scenario in scenarios:
            left_out = why_not(nat=scenario.nat) or None
            row = results.scenario(found, scenario.name, scenario.what, left_out)
            if left_out:
                print(f"{scenario.name}: left out: it cannot be played here: {left_out}\n", flush=True)
                continue
            print(f"{scenario.name}: {scenario.what}", flush=True)
            for number in range(len(row["tries"]) + 1, given.tries + 1):
                outcome = play(scenario, given.logs / str(number) if given.logs else None)
                row["tries"].append(results.tried(found, outcome))
                keep()
                print(report(outcome) + "\n", flush=True)
                if not outcome.ok:
                    print(outcome.logs, file=sys.stderr, flush=True)
    finally:
        keep()
    print(results.show(found))
    asked_for_all = given.tries >= results.PLAYS and not given.names
    return 0 if all(goal["met"] for goal in found["goals"][: 2 if asked_for_all else 1]) else 1


if __name__ == "__main__":
    sys.exit(main())
