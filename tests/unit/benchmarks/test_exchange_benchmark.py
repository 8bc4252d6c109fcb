"""The evaluation in the benchmark of an exchange."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.exchange import PEERS, RUN_FILE, Sample, all_to_all, endless, floors, judged, percentile, table
from coordinator.authoring.toml_file import tomllib

PARTS = {
    "tcp_blobs": 0.001,
    "tcp_messages": 0.002,
    "check": 0.006,
    "apply": 0.020,
    "digest": 0.013,
    "make_update": 0.011,
}


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.9, 5.0),
        (range(1, 11), 0.9, 9),
        (range(1, 11), 0.91, 10),
        ([3, 1, 2], 0.5, 2),
        ([3, 1, 2], 0.0, 1),
        ([3, 1, 2], 1.0, 3),
    ],
)
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values, share, expected):
    assert percentile(values, share) == expected


def test_of_no_values_there_is_no_percentile():
    with pytest.raises(ValueError):
        percentile([], 0.9)


def test_a_floor_holds_those_of_the_steps_before():
    assert floors(PARTS) == pytest.approx({"blobs": 0.007, "certified": 0.009, "applied": 0.042})


def test_the_results_are_over_all_rounds_and_peers_and_count_who_had_no_part():
    samples = [
        Sample(peer, r, 0.1, 0.2, 0.25 + 0.01 * r) for r in range(10) for peer in PEERS if (peer, r) != ("ada", 9)
    ]
    results = judged(samples, 10, PARTS)
    assert results["missing"] == 1 and [s["samples"] for s in results["steps"]] == [39, 39, 39]
    applied = results["steps"][2]
    assert applied["name"] == "applied" and applied["median"] == pytest.approx(0.29)
    assert applied["p90"] == pytest.approx(0.33) and applied["floor"] == pytest.approx(0.042)
    (goal,) = results["goals"]
    assert goal["value"] == pytest.approx(289) and goal["met"]
    late = judged([Sample("ada", 0, 0.1, 0.2, 0.302)], 1, PARTS)
    assert not late["goals"][0]["met"]
    lines = table(results).splitlines()
    assert len(lines) == 5
    assert [c.strip() for c in lines[4].split("|")[1:5]] == ["applied", "290", "330", "42"]


def test_the_run_that_is_measured_is_the_demos_with_its_end_far_away():
    text = endless(RUN_FILE.read_text(), RUN_FILE.parent)
    run, demo = tomllib.loads(text), tomllib.loads(RUN_FILE.read_text())
    assert run["run"]["total_tokens"] == 10**9 and Path(run["data"]["source"]).exists()
    run["run"]["total_tokens"], run["data"]["source"] = demo["run"]["total_tokens"], demo["data"]["source"]
    assert run == demo


def test_plain_processes_send_each_other_all_bytes():
    assert 0 < all_to_all(3, 200_000, 20) < 5
