"""Make the pages of docs/results from the JSON files beside them: `make results`.

Each page is a Jinja template in benchmarks/templates. Its prose is written by hand; each figure is an expression over
the results. `hand_written` finds figures that are not, and tests/structure/test_results.py accepts none.

In a template:
  r              the page's own JSON, docs/results/NAME.json; `results("other")` is another one
  opening        the sentence on command, commit, date and machine, then the goals that were missed or not judged
  tables()       what `benchmarks.NAME` prints of the JSON; `goals()` is the table of all goals
  made_by(name)  the module that made a page's JSON, for a table of its own: `made_by("convergence").methods(r)`
  one(rows, key=value, ...)   the only row with these values; `some(...)` is all of them
  table(columns, rows)        a Markdown table
  x | n(3)       three significant digits; `x | pct(1)` per cent with one decimal; `x | fixed(2)` two decimals
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2

from benchmarks import report

RESULTS = Path(__file__).parent.parent / "docs/results"
TEMPLATES = Path(__file__).parent / "templates"

PROVENANCE = ("command", "commit", "date", "machine", "seeds")
"""Fields that a result has at least; `report.provenance` makes them."""

MODULES = {"wan_convergence": "benchmarks.convergence.wan_report", "scenarios": "tests.scenarios.results"}
"""Pages whose module has another name."""

FIGURE = re.compile(r"\d+\.\d+|(?<![\w.])\.\d+|\d\s?%|\d+x\b|\d[\d,.]* times\b")
"""A figure that only a measurement gives. Whole numbers may name a setting: 16 peers, 50 ms."""

NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}|\]\([^)\n]*\)|https?://\S+", re.S)
"""Code, expressions and addresses."""


NOT_FILLED = re.compile(r"[ |#!<>]|\[[^]]*\]: ")
"""The beginning of a block that is code, a table, a heading, a picture or a quotation."""

LINE = 120
"""Characters."""


def names() -> list[str]:
    """Return the names of the pages."""
    return sorted(file.stem for file in TEMPLATES.glob("*.md"))


def results(name: str) -> dict[str, Any]:
    """Return the JSON of a result. Raises OSError, ValueError."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def one(rows: Iterable[Mapping[str, Any]], **wanted: object) -> Mapping[str, Any]:
    """Return the only row that has these values. Raises ValueError."""
    found = some(rows, **wanted)
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows have {wanted}")
    return found[0]


def some(rows: Iterable[Mapping[str, Any]], **wanted: object) -> list[Mapping[str, Any]]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]


def significant(value: float, digits: int = 3) -> str:
    """Return a number with a number of significant digits, and thousands separated."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def measured(r: Mapping[str, Any]) -> str:
    """Return the sentence on the origin of a result."""
    machine, seeds = r["machine"], r["seeds"]
    if r["commit"]:
        origin = f"at commit `{r['commit'][:12]}`" + (" with changes" if r["changed"] else "")
    elif r.get("recorded_in"):
        origin = f"before commit `{r['recorded_in'][:12]}` (which one was not noted)"
    else:
        origin = "outside of a checkout"
    place = f"{machine['cores']} cores ({machine['processor']}) at load {machine['load']:g}, Python {machine['python']}"
    drawn = f"; seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds))}" if seeds else ""
    return f"Measured on {r['date']} {origin}, on {place}, torch {machine['torch']}{drawn}."


def opening(r: Mapping[str, Any]) -> str:
    """Return a page's beginning: the command, the origin, and the goals that were missed or not judged."""
    goals = r.get("goals", ())
    missed = [g for g in goals if g["met"] is False]
    unjudged = [g for g in goals if g["met"] is None and g["value"] is not None]
    lines = [f"    {r['command']}", "", measured(r)]
    for some, text in ((missed, "missed"), (unjudged, "not judged")):
        if some:
            rows = [[g["goal"], g["value"]] for g in some]
            lines += ["", f"**Goals that were {text}:**", "", report.table(["goal", "measured"], rows)]
    if goals and all(g["met"] for g in goals):
        lines += ["", "All goals were met."]
    return "\n".join(lines)


def environment() -> jinja2.Environment:
    """Return the templates, with the functions that they use. A name that is not there is an error."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
        trim_blocks=True, lstrip_blocks=True, autoescape=False,
    )  # fmt: skip
    env.filters |= {
        "n": significant,
        "pct": lambda value, decimals=0: f"{100 * value:.{decimals}f}%",
        "fixed": lambda value, decimals: f"{value:,.{decimals}f}",
        "mean": statistics.mean,
        "median": statistics.median,
    }
    env.globals |= {"results": results, "one": one, "some": some, "table": report.table, "measured": measured}
    env.globals["made_by"] = made_by
    return env


def page(name: str) -> str:
    """Return a page's text. Raises OSError, ValueError, jinja2.TemplateError."""
    own = RESULTS / f"{name}.json"
    values: dict[str, Any] = {}
    if own.exists():
        r = results(name)
        values = {"r": r, "goals": lambda: report.goal_lines(r["goals"])}
        if all(field in r for field in PROVENANCE):
            values["opening"] = opening(r)
        values["tables"] = lambda: made_by(name).show(r)
    return filled(environment().get_template(f"{name}.md").render(values))


def filled(text: str) -> str:
    """Return the page with its prose in lines of equal length, since figures differ in length."""
    blocks, code = [], False
    for block in re.split(r"\n{2,}", text.strip("\n")):
        fences = len(re.findall(r"^```", block, re.M))
        if not code and not fences and not NOT_FILLED.match(block):
            block = "\n".join(_filled(item) for item in re.split(r"\n(?=- |\d+\. )", block))
        code ^= fences % 2 == 1
        blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def _filled(item: str) -> str:
    mark = re.match(r"(?:- |\d+\. )?", item)
    indent = " " * len(mark[0]) if mark else ""
    return textwrap.fill(
        " ".join(item.split()), LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def made_by(name: str) -> ModuleType:
    """Return the module that made a page's JSON."""
    folder = Path(__file__).parent / name
    return import_module(MODULES.get(name, f"benchmarks.{name}.__main__" if folder.is_dir() else f"benchmarks.{name}"))


def hand_written(template: str) -> list[str]:
    """Return the figures of a template that are no expression over results, each with its line."""
    prose = NOT_PROSE.sub(lambda m: "\n" * m[0].count("\n"), template)
    return [f"{i}: {m[0]}" for i, line in enumerate(prose.splitlines(), 1) for m in FIGURE.finditer(line)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages. Return 1 if one cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="pages to make; all by default")
    failed = False
    for name in parser.parse_args(arguments).names or names():
        try:
            (RESULTS / f"{name}.md").write_text(page(name))
        except (OSError, ValueError, LookupError, jinja2.TemplateError) as e:
            print(f"benchmarks.pages: {name}: {type(e).__name__}: {e}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
