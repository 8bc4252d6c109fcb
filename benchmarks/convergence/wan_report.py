"""Joins what `over_wan` and `rival_hivemind` have written into one JSON file and tables for people.

    python -m benchmarks.convergence.wan_report RESULT.json... [--json FILE]

JSON: {"cairn": [WanResult...], "hivemind": [RivalResult...]}, each with the machine it was measured on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import save, table

Result = dict[str, Any]


def joined(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Tables by their system."""
    return {
        "cairn": [r for r in results if "exchange_seconds" in r],
        "hivemind": [r for r in results if "variant" in r],
    }


def cairn_table(results: Sequence[Result]) -> str:
    rows = [
        (
            f"{r['run'].removeprefix('wan ')} H {round(r['target_tokens'] / _step_tokens(r))}",
            _codec(r), r["rounds"], f"{r['tokens_per_round'] / r['target_tokens']:.2f}", f"{r['loss']:.4f}",
            f"{r['updates_per_token']:.4f}", f"{r['between_peers_per_token']:.4f}",
            f"{r['control_bytes_per_second'] / 1e3:.1f}",
            f"{r['exchange_seconds']['certified']:.2f}", f"{r['exchange_floor']:.2f}",
            f"{1e3 * r['trainer_cpu_seconds_per_step']:.1f}", f"{r['train_seconds']:.0f}",
            "yes" if r["digests_equal"] else "NO", _load(r),
        )
        for r in results
    ]  # fmt: skip
    columns = (
        "run", "codec", "rounds", "tokens/asked", "loss", "update B/token", "wire B/token", "control kB/s",
        "exchange s", "floor s", "CPU ms/step", "wall s", "digests equal", "load",
    )  # fmt: skip
    return table(columns, rows)


def hivemind_table(results: Sequence[Result]) -> str:
    rows = [
        (
            f"{r['profile']} {r['variant']}{' free' if r['free'] else ''}",
            r["steps"], f"{r['windows_per_step']:.0f} of {r['target_windows']}",
            f"{r['seconds_per_step']:.2f}", f"{r['seconds_per_step_p90']:.2f}", f"{r['transport_floor']:.2f}",
            f"{r['wire_up_per_step']:,.0f}", _share(r["averaged"]), _share(r["agreed"]), _share(r["missed"]),
            f"{r['loss']:.4f}",
            "-" if r["curve"][-1]["simulated"] is None else f"{r['curve'][-1]['simulated']:.4f}", _load(r),
        )
        for r in results
    ]  # fmt: skip
    columns = (
        "variant", "steps", "windows", "s/step", "p90", "floor s", "up B/step", "averaged", "agreed", "missed", "loss",
        "simulator", "load",
    )  # fmt: skip
    return table(columns, rows)


def _step_tokens(r: Result) -> int:
    return r["peers"] * r["tables"]["inner"]["batch"] * r["tables"]["data"]["window"]


def _codec(r: Result) -> str:
    codec = r["tables"]["codec"]
    return f"{codec['kind']} k {codec['k']}" if "k" in codec else codec["kind"]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _load(r: Result) -> str:
    return f"{median(r['load']):.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence.wan_report", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    parts = joined([json.loads(path.read_text()) for path in options.results])
    print(f"Cairn\n\n{cairn_table(parts['cairn'])}\n\nhivemind.Optimizer\n\n{hivemind_table(parts['hivemind'])}")
    if options.json:
        save(options.json, parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
