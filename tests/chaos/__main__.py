"""make test-chaos: a thousand kills, hundreds of power cuts and lying disks, and the two ways of doing it wrong."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.kills import files_in, kill_often
from tests.support import postgres_world


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="of a ledger in SQLite; a fifth in PostgreSQL")
    parser.add_argument("--cuts", type=int, default=1000, help="power cuts, and as many disks that lie")
    parser.add_argument("--steps", type=int, default=400, help="stories of the Hypothesis state machine")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    good = _kills(options.kills, options.seed) and _kills_of_postgres(options.kills // 5, options.seed)
    environment = os.environ | {
        "CAIRN_CHAOS_CUTS": str(options.cuts), "CAIRN_LEDGER_EXAMPLES": str(options.steps), "CAIRN_LEDGER_STEPS": "40",
    }  # fmt: skip
    long = [sys.executable, "-m", "pytest", "-q", "--timeout", "3600"]
    suites = ["tests/chaos/test_disk.py", "tests/chaos/test_kills.py", "tests/unit/protocol/test_ledger_machine.py"]
    return 0 if subprocess.run([*long, *suites], env=environment).returncode == 0 and good else 1


def _kills(kills: int, seed: int) -> bool:
    with tempfile.TemporaryDirectory(prefix="cairn-chaos-") as folder:
        place = files_in(Path(folder))
        return _told("SQLite", kill_often(place, kills, seed=seed, said=lambda s: print(f"SQLite: {s}", flush=True)))


def _kills_of_postgres(kills: int, seed: int) -> bool:
    if reason := postgres_world.missing():
        print(f"PostgreSQL: left out: {reason}")
        return True
    with postgres_world.server(fsync=True) as url:
        report = kill_often(
            lambda: postgres_world.empty_database(url), kills, seed=seed, most_seconds=0.5,
            said=lambda s: print(f"PostgreSQL: {s}", flush=True),
        )  # fmt: skip
        return _told("PostgreSQL", report)


def _told(name: str, report) -> bool:
    for problem in report.problems:
        print(f"{name}: {problem}")
    good = not report.problems and report.acknowledged >= report.kills
    print(f"{name}: {report.kills} kills, {report.acknowledged} acknowledged: {'good' if good else 'BAD'}")
    return good


if __name__ == "__main__":
    sys.exit(main())
