"""The command line, the goals, the table and the JSON file of every benchmark.

A result is a JSON object that begins with `header`: which command measured, of which commit, when, where and with which
seeds. `goals` is a list of `goal`. `benchmarks.pages` makes the pages of docs/results from these files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def command_line(doc: str, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; add your own to it."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="end within a minute or two on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--no-goals", action="store_true", help="exit with 0 though goals are missed")
    return parser


def provenance(
    name: str, arguments: Sequence[str] | None = None, seeds: Sequence[int] = (), package: str = "benchmarks"
) -> dict[str, Any]:
    """Return the fields with which each result begins.

    command: as it was typed. commit: of the checkout, or null outside of one. changed: whether the checkout had changes
    that were not committed. date: of the start, UTC. machine: see `machine`. seeds: of what is drawn, if anything is.
    """
    typed = sys.argv[1:] if arguments is None else arguments
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "command": f"python -m {package}.{name} {shlex.join(typed)}".rstrip(),
        "commit": _git("rev-parse", "HEAD") or None,
        "changed": bool(changed),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "seeds": list(seeds),
    }


def _git(*arguments: str) -> str:
    """Return what git prints in this checkout; empty without git or without a checkout."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def goal(text: str, value: object, met: bool | None) -> dict[str, Any]:
    """Return a goal with what was measured. `met` is None when this run did not measure it, or not often enough."""
    return {"goal": text, "value": value, "met": met}


def goal_lines(goals: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the goals, the missed ones first."""
    words = {False: "MISSED", None: "not judged", True: "met"}
    ordered = sorted(goals, key=lambda g: list(words).index(g["met"]))
    return table(["goal", "measured", ""], [[g["goal"], g["value"], words[g["met"]]] for g in ordered])


def ended(results: Mapping[str, Any], options: argparse.Namespace, tables: str) -> int:
    """Print tables and goals, save, and return the exit status: 1 when a goal is missed, unless `--no-goals`."""
    print(tables)
    if results["goals"]:
        print("\n" + goal_lines(results["goals"]))
    if options.json:
        save(options.json, results)
    return int(not options.no_goals and any(g["met"] is False for g in results["goals"]))


def machine() -> dict[str, Any]:
    """Describe the machine of a result."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    """Return the processor's model on Linux, and its architecture elsewhere."""
    about = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.{1,100})", about.read_text() if about.exists() else "", re.M)
    return model[1].strip() if model else platform.processor() or platform.machine()


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table that also reads well in a terminal: the first column left, the others right."""
    text = [[_cell(c) for c in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(text[0]), rule, *map(line, text[1:])])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Write the results as JSON, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results, indent=2) + "\n")
    partial.replace(path)
