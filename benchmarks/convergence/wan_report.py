"""Joins what `over_wan` and `rival_hivemind` have written into one JSON file and tables for people.

    python -m benchmarks.convergence.wan_report RESULT.json... [--json FILE]

JSON keys:
  command, commit, date, machine: of joining; seeds: of all runs; see benchmarks.report
  cairn: a list of results of `over_wan`; hivemind: of `rival_hivemind`; each with its own header
  goals: none
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import provenance, save, table

Result = Mapping[str, Any]


def joined(results: Sequence[Result], arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Return one result with the runs by their system."""
    seeds = sorted({seed for r in results for seed in r["seeds"]})
    return provenance("convergence.wan_report", arguments, seeds) | {
        "cairn": [r for r in results if "exchange_seconds" in r],
        "hivemind": [r for r in results if "variant" in r],
        "goals": [],
    }


def show(results: Result) -> str:
    """Return both tables."""
    return f"Cairn\n\n{cairn(results)}\n\nhivemind.Optimizer\n\n{hivemind(results)}"


def cairn(results: Result) -> str:
    """Return the table of Cairn's runs. Bytes are by token that the peer itself trained on, as in `convergence`."""
    rows = [
        (
            r["run"].removeprefix("wan "), _codec(r), round(r["target_tokens"] / step_tokens(r)),
            f"{steps_a_round(r):.0f}", r["rounds"], f"{r['loss']:.4f}",
            f"{r['peers'] * r['updates_per_token']:.3g}", f"{r['peers'] * r['between_peers_per_token']:.3g}",
            f"{r['control_bytes_per_second'] / 1e3:.1f}",
            f"{r['exchange_seconds']['certified']:.2f}", f"{r['exchange_floor']:.2f}", f"{r['train_seconds']:.0f}",
            "yes" if r["digests_equal"] else "NO", _load(r),
        )
        for r in results["cairn"]
    ]  # fmt: skip
    columns = (
        "run", "codec", "H asked", "H", "rounds", "loss", "update B/token", "wire B/token", "control kB/s",
        "exchange s", "floor s", "wall s", "digests equal", "load",
    )  # fmt: skip
    return table(columns, rows)


def hivemind(results: Result) -> str:
    """Return the table of hivemind's runs."""
    rows = [
        (
            f"{r['profile']} {r['variant']}{' free' if r['free'] else ''}",
            r["steps"], f"{r['windows_per_step']:.0f} of {r['target_windows']}",
            f"{r['seconds_per_step']:.2f}", f"{r['seconds_per_step_p90']:.2f}", f"{r['transport_floor']:.2f}",
            f"{r['wire_up_per_step']:,.0f}", _share(r["averaged"]), _share(r["agreed"]), _share(r["missed"]),
            f"{r['loss']:.4f}",
            "-" if r["curve"][-1]["simulated"] is None else f"{r['curve'][-1]['simulated']:.4f}", _load(r),
        )
        for r in results["hivemind"]
    ]  # fmt: skip
    columns = (
        "variant", "steps", "windows", "s/step", "p90", "floor s", "up B/step", "averaged", "agreed", "missed", "loss",
        "simulator", "load",
    )  # fmt: skip
    return table(columns, rows)


def step_tokens(r: Result) -> int:
    """Return the tokens of one inner step of all peers."""
    return r["peers"] * r["tables"]["inner"]["batch"] * r["tables"]["data"]["window"]


def steps_a_round(r: Result) -> float:
    """Return the inner steps that a peer trained in a round."""
    return r["tokens_per_round"] / step_tokens(r)


def furthest(results: Result) -> float:
    """Return the largest difference between a real loss of hivemind's and the simulator's at the same step."""
    points = [p for r in results["hivemind"] for p in r["curve"]]
    return max(abs(p["loss"] - p["simulated"]) for p in points if p["simulated"] is not None)


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
    results = joined([json.loads(path.read_text()) for path in options.results])
    print(show(results))
    if options.json:
        save(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
