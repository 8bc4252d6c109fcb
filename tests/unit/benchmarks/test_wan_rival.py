"""The rival's averaging is checked by the values that its peers gave and used, not by its reports."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.convergence import over_wan, rival_hivemind
from benchmarks.convergence.hivemind_job import Job
from benchmarks.convergence.rival_hivemind import judge_sketches
from benchmarks.convergence.wan_hosts import Wire, claimed_kind

STEPS, PEERS = 5, 4


@pytest.fixture
def lines() -> list[list[dict[str, Any]]]:
    """Four peers that average as they should; the first gives twice as many windows as the others."""
    chance = np.random.default_rng(0)
    own = chance.normal(size=(PEERS, STEPS, 8))
    windows = np.array([8, 4, 4, 4])
    right = (windows[:, None, None] * own).sum(0) / windows.sum()
    return [
        [
            {"step": s, "windows": int(windows[p]), "own": own[p, s].tolist(), "used": right[s].tolist()}
            for s in range(STEPS)
        ]
        for p in range(PEERS)
    ]


def test_peers_that_averaged_are_found_to_have_averaged(lines: list[list[dict[str, Any]]]):
    averaged, agreed, missed, worst = judge_sketches(lines, STEPS)
    assert (averaged, agreed, missed) == (1.0, 1.0, 0.0)
    assert worst < 1e-12


def test_a_peer_that_used_its_own_gradient_is_found_out(lines: list[list[dict[str, Any]]]):
    lines[2][3]["used"] = lines[2][3]["own"]
    averaged, agreed, missed, worst = judge_sketches(lines, STEPS)
    assert averaged == 19 / 20
    assert agreed == 4 / 5
    assert missed == 0
    assert worst > 0.5


def test_a_round_in_which_nobody_averaged_counts_as_none_though_all_report_success(lines: list[list[dict[str, Any]]]):
    for peer in lines:
        peer[1]["used"] = peer[1]["own"]
    averaged, agreed, _, _ = judge_sketches(lines, STEPS)
    assert (averaged, agreed) == (16 / 20, 4 / 5)


def test_peers_that_agree_on_something_else_than_the_mean_have_not_averaged(lines: list[list[dict[str, Any]]]):
    for peer in lines:
        peer[0]["used"] = [0.0] * 8
    averaged, agreed, _, _ = judge_sketches(lines, STEPS)
    assert averaged == 16 / 20
    assert agreed == 1.0


def test_a_step_without_a_peer_is_missed_by_it_and_not_agreed(lines: list[list[dict[str, Any]]]):
    del lines[3][2]
    _, agreed, missed, _ = judge_sketches(lines, STEPS)
    assert missed == 1 / 20
    assert agreed == 4 / 5


def test_a_job_is_read_as_it_was_written(tmp_path: Path):
    job = Job({"name": "x"}, 3, 1e-3, 20, "here", "there", ["/ip4/10.77.0.1/tcp/7000"], {"matchmaking_time": 3.0})
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


def test_processes_are_told_apart_and_bytes_are_counted_between_two_looks():
    assert claimed_kind("/usr/bin/python -m peer.training --fd 5 --parent 7") == "trainer"
    assert claimed_kind("/site-packages/hivemind/hivemind_cli/p2pd -listen=/unix/x") == "daemon"
    assert claimed_kind("/usr/bin/python -m cairn peer join INVITE") == "node"
    assert Wire(10, 7) - Wire(4, 2) == Wire(6, 5)


@pytest.mark.parametrize("benchmark", [over_wan, rival_hivemind], ids=["over_wan", "rival_hivemind"])
def test_without_an_emulated_internet_the_reason_is_printed_and_the_exit_code_is_not_zero(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(benchmark, "why_not", lambda: "network namespaces need root: run it as root")
    monkeypatch.setattr("sys.argv", ["benchmark"])
    assert benchmark.main() == 2
    assert "need root" in capsys.readouterr().err
