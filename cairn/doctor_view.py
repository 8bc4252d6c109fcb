"""A report of the doctor as lines for the terminal, or as plain values. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.text import Text

from cairn.examination import Report

STYLES = {"ok": "green", "note": "dim", "warning": "bold yellow", "no": "bold red"}


def lines(report: Report, width: int) -> Iterator[Text]:
    """Yield each finding with its remedy below, in columns, and what all of them say together."""
    names = max(len(finding.name) for finding in report.findings)
    indent = 9 + names + 2
    room = max(20, width - indent)
    for finding in report.findings:
        found, remedy = _wrapped(finding.found, room), _wrapped(finding.remedy, room - 3)
        label = (f"{'OK' if finding.verdict == 'ok' else finding.verdict:<9}", STYLES[finding.verdict])
        yield Text.assemble(label, f"{finding.name:<{names}}  {found[0]}")
        yield from (Text(" " * indent + line) for line in found[1:])
        for mark, line in zip(["-> ", *["   "] * len(remedy)], remedy, strict=False):
            yield Text(" " * indent + mark + line, style="bold")
    yield Text()
    yield Text(_together(report))


def _wrapped(text: str, width: int) -> list[str]:
    # A path or an address stays whole.
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _together(report: Report) -> str:
    if report.is_over:
        return "no: this run is over"
    counts = {verdict: sum(f.verdict == verdict for f in report.findings) for verdict in ("no", "warning")}
    if counts["no"]:
        return f"no: {counts['no']} of these must be fixed before this machine can take part"
    if counts["warning"]:
        many = "1 warning" if counts["warning"] == 1 else f"{counts['warning']} warnings"
        return f"this machine can take part, with {many}: cairn peer join INVITE"
    return "this machine can take part: cairn peer join INVITE"


def as_plain(report: Report) -> dict[str, Any]:
    """Return the report for scripts."""
    return {
        "run": str(report.run),
        "verdict": report.verdict,
        "findings": [asdict(finding) for finding in report.findings],
        "figures": report.figures,
    }
