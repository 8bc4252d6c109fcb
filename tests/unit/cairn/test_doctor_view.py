"""The doctor's report on a terminal of 80 columns, in a pipe, and for scripts."""

from __future__ import annotations

import io
import json

from rich.console import Console

from cairn.doctor_view import as_plain, lines
from cairn.examination import Report
from peer.doctor.findings import DoctorFinding
from protocol.ids import RunId
from tests.support.specs import digest

OK = DoctorFinding("disk", "ok", "this run needs 10.0 MB at least, and 80.4 GB are free where /a/long-hyphened-path is")
NOTE = DoctorFinding("versions", "note", "cairn 0.1.0")
WARNING = DoctorFinding("clock", "warning", "this machine's clock is 5 s ahead of the coordinator's", "set it " * 15)
NO = DoctorFinding("memory", "no", "training needs 28.0 GB and room for a window", "take a GPU with more memory")


def shown(*findings: DoctorFinding, terminal: bool = False) -> list[str]:
    colours = "standard" if terminal else "auto"
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, highlight=False, color_system=colours)
    for line in lines(Report(RunId(digest("run")), findings), 80):
        console.print(line, soft_wrap=True)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_verdict_name_and_words_are_in_columns_and_the_remedy_is_below():
    text = shown(NOTE, OK, WARNING, NO)
    assert max(map(len, text)) <= 80
    assert text[0] == "note     versions  cairn 0.1.0"
    assert text[1].startswith("OK       disk      this run needs 10.0 MB")
    assert any("/a/long-hyphened-path" in line for line in text)
    assert text[-4:-1] == [
        "no       memory    training needs 28.0 GB and room for a window",
        "                   -> take a GPU with more memory",
        "",
    ]
    remedy = [line for line in text if "set it" in line]
    assert [line[:22].strip() for line in remedy] == ["->", ""]


def test_the_last_line_says_what_to_do_next():
    assert shown(NOTE, OK)[-1] == "this machine can take part: cairn peer join INVITE"
    assert shown(OK, WARNING)[-1] == "this machine can take part, with 1 warning: cairn peer join INVITE"
    assert shown(OK, WARNING, NO, NO)[-1] == "no: 2 of these must be fixed before this machine can take part"


def test_colours_are_for_terminals():
    assert "\x1b" not in "".join(shown(OK, WARNING, NO))
    assert "\x1b[1;31mno " in "".join(shown(NO, terminal=True))


def test_a_script_gets_every_finding_and_figure():
    report = Report(RunId(digest("run")), (OK, NO), {"step_seconds": 0.5})
    plain = json.loads(json.dumps(as_plain(report)))
    assert plain["run"] == digest("run").hex() and plain["verdict"] == "no"
    assert plain["findings"][1] == {"name": "memory", "verdict": "no", "found": NO.found, "remedy": NO.remedy}
    assert plain["figures"] == {"step_seconds": 0.5}
