"""The pages of docs/results are what their templates and JSON files make; no figure on them is written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages, report

NOT_FROM_A_BENCHMARK = {"early_transfer"}
"""Results of a command that is no longer there; the file says how it was measured."""

FILES = sorted(file.stem for file in pages.RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", pages.names())
def test_a_page_is_what_its_template_and_results_make(name: str):
    assert (pages.RESULTS / f"{name}.md").read_text() == pages.page(name), "run: make results"


def test_each_page_has_a_template():
    assert {file.stem for file in pages.RESULTS.glob("*.md")} == set(pages.names())


@pytest.mark.parametrize("name", pages.names())
def test_no_figure_of_a_page_is_written_by_hand(name: str):
    assert pages.hand_written((pages.TEMPLATES / f"{name}.md").read_text()) == []


@pytest.mark.parametrize("name", sorted(set(FILES) - NOT_FROM_A_BENCHMARK))
def test_a_result_says_how_when_and_where_it_was_measured(name: str):
    found = pages.results(name)
    assert set(pages.PROVENANCE) <= set(found)
    assert found["command"].startswith(("python -m benchmarks.", "python -m tests."))
    assert found["commit"] or found["recorded_in"]
    assert {"processor", "cores", "python", "torch", "threads", "load"} <= set(found["machine"])
    assert all(set(goal) == {"goal", "value", "met"} for goal in found["goals"])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 1.25 times the floor.", ["1: 1.25"]),
        ("a share of 98%", ["1: 8%"]),
        ("567x fewer, 20 times as long", ["1: 567x", "1: 20 times"]),
        ("16 peers, 50 ms, `--lr 1.6e-2`, [page](x1.5.md), {{ r.x | n(3) }}", []),
        ("```\n1.5\n```\nand 2.5", ["4: 2.5"]),
    ],
)
def test_figures_in_prose_are_found(text: str, found: list[str]):
    assert pages.hand_written(text) == found


def test_each_figure_of_the_claims_is_on_the_page_of_results():
    claims = (pages.RESULTS.parents[1] / "README.md").read_text().split("## Three claims")[1].split("\n## ")[0]
    number = re.compile(r"\d[\d.,]*\d%?|\d%?")
    said = set(number.findall(pages.NOT_PROSE.sub("", claims)))
    assert len(said) > 3
    assert said - set(number.findall((pages.RESULTS / "README.md").read_text())) == set()


def result(**more: Any) -> dict[str, Any]:
    machine = {"processor": "x86_64", "cores": 2, "python": "3.11", "torch": "2.13", "threads": 1, "load": 0.5}
    return {"command": "python -m benchmarks.x", "commit": "a" * 40, "changed": False, "date": "2026-11-25",
            "machine": machine, "seeds": [1, 2], "goals": [], **more}  # fmt: skip


def test_missed_goals_are_told_first():
    opening = pages.opening(result(goals=[report.goal("a", 1, True), report.goal("b", 2, False)]))
    assert "Goals that were missed" in opening
    assert "| b " in opening and "| a " not in opening
    assert "All goals were met" in pages.opening(result(goals=[report.goal("a", 1, True)]))


def test_a_goal_that_was_not_judged_is_not_told_as_met():
    opening = pages.opening(result(goals=[report.goal("a", 1, True), report.goal("b", "2 seeds", None)]))
    assert "Goals that were not judged" in opening and "| b " in opening and "| a " not in opening
    assert "met" not in pages.opening(result(goals=[report.goal("a", 1, True), report.goal("b", None, None)]))


def test_a_cell_is_in_words():
    assert "| passed 57, failed 1.5 | a, b |" in report.table(["x", "y"], [[{"passed": 57, "failed": 1.5}, ["a", "b"]]])


def test_a_machine_is_told_by_the_model_of_its_processor():
    about = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.+)$", about.read_text(), re.M) if about.exists() else []
    if not models:
        pytest.skip("this system does not say the model")
    assert report.machine()["processor"] == models[0][:100].strip()


def test_a_result_of_changed_files_says_so():
    assert "with changes" in pages.measured(result(changed=True))
    assert "was not noted" in pages.measured(result(commit=None, recorded_in="b" * 40))


def test_a_name_that_the_results_do_not_have_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    templates, found = tmp_path / "templates", tmp_path / "results"
    templates.mkdir()
    found.mkdir()
    (templates / "x.md").write_text("{{ r.rows[0].second }}\n")
    (found / "x.json").write_text(json.dumps(result(rows=[{"seconds": 1}])))
    monkeypatch.setattr(pages, "TEMPLATES", templates)
    monkeypatch.setattr(pages, "RESULTS", found)
    assert pages.main(["x"]) == 1
    assert not (found / "x.md").exists()


def test_a_missed_goal_ends_a_benchmark_with_1(capsys: pytest.CaptureFixture[str]):
    parser = report.command_line("", "x")
    missed = result(goals=[report.goal("fast", 2, False), report.goal("small", None, None)])
    assert report.ended(missed, parser.parse_args([]), "") == 1
    assert report.ended(missed, parser.parse_args(["--no-goals"]), "") == 0
    assert report.ended(result(goals=[report.goal("small", None, None)]), parser.parse_args([]), "") == 0
    assert "MISSED" in capsys.readouterr().out


def test_significant_digits():
    written = {1234.5: "1,234", 12.345: "12.3", 0.012345: "0.0123", 0: "0", 1.0: "1.00"}
    assert [pages.significant(value) for value in written] == list(written.values())


def test_prose_is_filled_and_nothing_else():
    text = "# A\n\n" + "word\n" * 30 + "\n- one\n  and more\n- two\n\n    code\n\n| a |\n| b |\n\n```\nx\n\ny\n```\n"
    found = pages.filled(text)
    assert "\n\n- one and more\n- two\n\n    code\n\n| a |\n| b |\n\n```\nx\n\ny\n```\n" in found
    assert max(map(len, found.splitlines())) == 119
