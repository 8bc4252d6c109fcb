"""Play scenarios, and print what came of each: `python -m tests.scenarios [NAME ...]`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from tests.scenarios import script
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


def page(outcomes: list[Outcome]) -> str:
    """Return all results as Markdown."""
    lines = ["# The scenarios on the emulated internet", "", "    make test-wan", ""]
    for o in outcomes:
        lines += [
            f"## {o.scenario.name}: {'passed' if o.ok else '**FAILED**'}",
            "",
            f"{_sentence(o.scenario.what)}",
            "",
        ]
        lines += ["| step | seconds | found |", "| --- | ---: | --- |"]
        lines += [f"| {s.step.replace('|', 'and')} | {s.seconds:.0f} | {s.found or 'done'} |" for s in o.steps]
        lines += ["", f"{o.rounds} rounds in {o.seconds:.0f} s.", ""]
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(script.names())}; all if none is given"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a page for people there")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the whole logs of all processes there")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes and hosts are removed, results are kept
    outcomes, left_out = list[Outcome](), list[str]()
    try:
        scenarios = [script.read(name) for name in given.names or script.names()]
        for scenario in scenarios:
            if reason := why_not(nat=scenario.nat):
                print(f"{scenario.name}: left out: it cannot be played here: {reason}\n", flush=True)
                left_out.append(scenario.name)
                continue
            print(f"{scenario.name}: {scenario.what}", flush=True)
            outcomes.append(play(scenario, given.logs))
            print(report(outcomes[-1]) + "\n", flush=True)
            if not outcomes[-1].ok:
                print(outcomes[-1].logs, file=sys.stderr, flush=True)
    except script.ScriptError as e:
        print(e, file=sys.stderr)
        return 2
    finally:
        if given.markdown:
            given.markdown.write_text(page(outcomes))
        if given.json:
            given.json.write_text(json.dumps([asdict(o) | {"scenario": o.scenario.name} for o in outcomes], indent=1))
    failed = [o.scenario.name for o in outcomes if not o.ok]
    print(
        f"{len(outcomes) - len(failed)} of {len(outcomes)} scenarios passed"
        + (f"; not: {', '.join(failed)}" if failed else "")
        + (f"; left out: {', '.join(left_out)}" if left_out else "")
    )
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
