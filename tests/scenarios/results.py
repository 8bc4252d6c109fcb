"""The results of a run of scenarios: its JSON file, and the tables of docs/results/scenarios.md.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  scenarios: each one of the run, in its order, with
    name; what (must work); left_out (why it cannot be played here, or null)
    tries: all of them, whether they passed or not, each with
      commit; passed; seconds; rounds; late_ms (of the emulated internet, the most); load (of the machine, at the end)
      steps: a list of step, seconds, found (what was measured, in words), ok
      peers: for each, rounds (that it contributed to), windows, up, down (bytes on its link)
  goals: every try passes, and each scenario is played PLAYS times
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import report
from tests.scenarios import script

if TYPE_CHECKING:
    from tests.scenarios.play import Outcome

Row = Mapping[str, Any]

PLAYS = 3
"""Tries of a scenario below which a pass may be luck."""


def begun(file: Path | None = None, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the results of a run in which nothing was played yet but what a file has, if it is there."""
    earlier = json.loads(file.read_text())["scenarios"] if file is not None and file.exists() else []
    return report.provenance("scenarios", arguments, package="tests") | {"scenarios": earlier, "goals": []}


def scenario(results: dict[str, Any], name: str, what: str, left_out: str | None) -> dict[str, Any]:
    """Return the row of a scenario: the one that is there, or a new one without a try."""
    row = next((row for row in results["scenarios"] if row["name"] == name), None)
    if row is None:
        row = {"name": name, "tries": []}
        results["scenarios"].append(row)
    row |= {"what": what, "left_out": left_out}
    return row


def tried(results: Row, outcome: Outcome) -> dict[str, Any]:
    """Return one try of a run."""
    return {
        "commit": results["commit"],
        "passed": outcome.ok,
        "seconds": outcome.seconds,
        "rounds": outcome.rounds,
        "late_ms": outcome.late_ms,
        "load": round(os.getloadavg()[0], 2),
        "steps": [asdict(step) for step in outcome.steps],
        "peers": outcome.peers,
    }


def judged(results: Row) -> list[dict[str, Any]]:
    """Return the goals, from all tries."""
    tries = [one for row in results["scenarios"] for one in row["tries"]]
    passed = sum(one["passed"] for one in tries)
    met = passed == len(tries) if tries else None
    names = script.names()
    often = sum(row["name"] in names and len(row["tries"]) >= PLAYS for row in results["scenarios"])
    return [
        report.goal("each try of a scenario passes", f"{passed} of {len(tries)}", met),
        report.goal(f"each scenario is played {PLAYS} times", f"{often} of {len(names)}", often == len(names)),
    ]


def show(results: Row) -> str:
    """Return a table of the scenarios with all their tries."""
    rows = [
        [
            row["name"],
            "left out" if row["left_out"] else f"{sum(one['passed'] for one in row['tries'])} of {len(row['tries'])}",
            ", ".join(f"{one['seconds']:.0f}" for one in row["tries"]),
            ", ".join(str(one["rounds"]) for one in row["tries"]),
        ]
        for row in results["scenarios"]
    ]
    return report.table(["scenario", "passed", "seconds of each try", "rounds of each try"], rows)


def measured(row: Row) -> list[tuple[int, Row]]:
    """Return what each try of a scenario found, with its number: all expectations, and the step that failed."""
    return [
        (number, step)
        for number, one in enumerate(row["tries"], 1)
        for step in one["steps"]
        if step["step"].startswith("expect ") or not step["ok"]
    ]


def origins(results: Row) -> list[tuple[str, int]]:
    """Return the commits of the tries, each with the number of its tries, the most first."""
    tries = [one for row in results["scenarios"] for one in row["tries"]]
    return Counter((one["commit"] or "unknown")[:8] for one in tries).most_common()


def checks() -> list[tuple[script.Scenario, float | None]]:
    """Return all scenarios, each with the goodput that it asks for, if any."""
    scenarios = [script.read(name) for name in script.names()]
    return [(s, max((e.share for e in s.steps if isinstance(e, script.Goodput)), default=None)) for s in scenarios]
