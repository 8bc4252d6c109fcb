"""The command line, the table and the JSON file of every benchmark."""

from __future__ import annotations

import argparse
import json
import os
import platform
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
    return parser


def machine() -> dict[str, Any]:
    """Describe the machine of a result."""
    import torch

    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


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
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Write the results as JSON, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results, indent=2) + "\n")
    partial.replace(path)
