"""Every scenario can be read, what makes no sense is refused, and the core ones pass (all: `make test-wan`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import pages
from benchmarks.report import save
from tests.scenarios import results, script
from tests.scenarios.__main__ import play, report
from tests.scenarios.play import Done, Outcome
from tests.scenarios.swarm import TIMERS
from tests.wan.testbed import why_not

SCENARIOS = {name: script.read(name) for name in script.names()}
CORE = [name for name, scenario in SCENARIOS.items() if scenario.core]

ROOM = 4

TINY = """
what = "a test"
[[hosts]]
name = "ada"
[[steps]]
do = "start"
peers = ["ada"]
"""

SHARED = TINY.replace('"ada"\n[[steps', '"ada"\nnat = true\n[[hosts]]\nname = "zoe"\nbehind = "ada"\n[[steps')


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """Return a scenario's name, in a folder of its own."""
    monkeypatch.setattr(script, "FOLDER", folder)
    (folder / "own.toml").write_text(text)
    return "own"


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_begins_with_peers_and_ends_with_what_is_expected_of_them(name: str):
    scenario = SCENARIOS[name]
    assert scenario.steps[0].do in ("start", "history")
    assert scenario.steps[-1].do.startswith("expect ")
    assert set(scenario.topology().hosts) == {*scenario.peers, script.HOME}


def test_what_a_scenario_does_not_say_has_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scenario = script.read(written(tmp_path, monkeypatch, TINY))
    assert scenario.peers == ["ada"] and not scenario.nat and not scenario.core
    assert scenario.topology().lines["ada", script.HOME].rtt_ms == 80


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", "what: Field required"),
        (TINY + 'wait = "maybe"', "steps.0.start.wait"),
        (TINY + '[[steps]]\ndo = "explode"', "steps.1"),
        (TINY + '[[steps]]\ndo = "power off"\npeers = ["zoe"]', "there is no host 'zoe'"),
        (TINY + '[[steps]]\ndo = "cut"\nbetween = [["ada"], ["zoe"]]', "there is no host 'zoe'"),
        (TINY + '[[steps]]\ndo = "rounds"\ncount = 0', "greater than or equal to 1"),
        (TINY.replace('"ada"\n[[steps', '"ada"\nbehind = "zoe"\n[[steps'), "is behind 'zoe'"),
        (TINY.replace('"ada"\n[[steps', '"ada"\nup_mbit = 0\n[[steps'), "rates must be positive"),
        (SHARED + '[[steps]]\ndo = "power off"\npeers = ["zoe"]', "zoe has no line of its own"),
        (SHARED + '[[steps]]\ndo = "interrupt"\noff = 3\npeers = ["zoe"]', "zoe has no line of its own"),
        (TINY.replace('"ada"\n[[steps', '"ada"\nspeed = 2\n[[steps'), "hosts.0.speed"),
        (TINY + "surprise = 1", "Extra inputs are not permitted"),
        ("what = ", "own.toml"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, said: str
):
    with pytest.raises(script.ScriptError, match="own.toml") as e:
        script.read(written(tmp_path, monkeypatch, wrong))
    assert said in str(e.value)


def test_a_scenario_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(script.ScriptError, match="partition"):
        script.read("nonsense")


def test_a_run_of_scenarios_is_shown_with_every_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scenario = SCENARIOS["nat"]
    failed = Outcome(scenario, [Done("expect pace | last 3", 2.0, "9.5 s a round", ok=False)], rounds=3, seconds=61.2)
    passed = Outcome(scenario, [Done("start", 1.0, "done")] * (len(scenario.steps) - 1), rounds=12, seconds=84.4)
    passed.steps.append(Done("expect one chain", 1.0, "6 on one chain"))
    run = results.begun(arguments=["--tries", "2"])
    row = results.scenario(run, "nat", scenario.what, None)
    results.scenario(run, "mixed", "", "no root")
    row["tries"] = [results.tried(run, o) for o in (failed, passed)]
    run["goals"] = results.judged(run)
    save(tmp_path / "scenarios.json", run)
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert pages.main(["scenarios"]) == 0
    page = (tmp_path / "scenarios.md").read_text()
    assert "python -m tests.scenarios --tries 2" in page
    assert re.search(r"each try of a scenario passes +\| +1 of 2 \|", page)
    assert re.search(rf"each scenario is played 3 times +\| +0 of {len(SCENARIOS)} \|", page)
    row["tries"].append(row["tries"][1])
    assert results.judged(run)[1]["value"] == f"1 of {len(SCENARIOS)}"
    row["tries"].pop()
    assert re.search(r"\| nat +\| +1 of 2 \| +61, 84 \| +3, 12 \|\n\| mixed +\| left out \|", page)
    assert "| 1 | expect pace and last 3 | **FAILED:** 9.5 s a round |\n" in page
    assert "| 2 | expect one chain | 6 on one chain |\n" in page
    assert "no figures" not in page
    again = results.begun(tmp_path / "scenarios.json")
    assert results.scenario(again, "nat", scenario.what, None)["tries"] == row["tries"]


def roomy(scenario: script.Scenario) -> script.Scenario:
    """Return the scenario with more time for each step and phase of a round: other work may have the cores here."""
    steps = tuple(
        s.model_copy(update={"seconds": ROOM * s.seconds}) if hasattr(s, "seconds") and s.do != "wait" else s
        for s in scenario.steps
    )
    timers = {name: ROOM * seconds for name, seconds in TIMERS.items()}
    run = scenario.run | {"round": timers | scenario.run.get("round", {})}
    return scenario.model_copy(update={"steps": steps, "run": run, "limit_seconds": ROOM * scenario.limit_seconds})


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("name", CORE)
def test_the_core_scenarios_pass(name: str):
    scenario = SCENARIOS[name]
    if reason := why_not(nat=scenario.nat):
        pytest.skip(f"no emulated internet here: {reason}")
    outcome = play(roomy(scenario))
    assert outcome.ok, f"{report(outcome)}\n{[s for s in outcome.steps if not s.ok]}\n{outcome.logs}"
