"""The evaluation in the benchmark of transfers."""

from __future__ import annotations

import pytest

from benchmarks.transfer.__main__ import goals, show, transports
from benchmarks.transfer.cases import CASES, MB, QUICK, Case, judged


def found(seconds: float, down: int) -> dict[str, float]:
    return {
        "seconds": seconds,
        "bytes_down": down,
        "rss": 2e6,
        "rss_before": 1e6,
        "daemon_rss": 3e6,
        "cpu_seconds": 0.5,
    }


@pytest.mark.parametrize(
    ("case", "floor"),
    [
        (Case("x", 100 * MB, rtt_ms=200), 8.0 + 0.4),
        (Case("x", 10 * MB, donor_mbit=20, fetchers=7), 4.0 + 0.2),
        (Case("x", 60 * MB, donors=6, donor_mbit=20), 4.8 + 0.2),
        (Case("x", 60 * MB, donors=2, donor_mbit=20), 12.0 + 0.2),
    ],
)
def test_the_floor_is_the_narrowest_place_and_two_round_trips(case: Case, floor: float):
    assert case.floor == pytest.approx(floor)


def test_a_row_is_of_the_last_fetcher_and_counts_what_donors_sent():
    case = Case("x", 10 * MB, donors=2, fetchers=2)
    row = judged(case, [found(2.0, 10 * MB), found(3.0, 12 * MB)], {"d0": 5 * MB, "d1": 10 * MB}, None)
    assert (row["seconds"], row["copies"], row["came"]) == (3.0, 1.5, 1.2)
    assert row["ratio"] == pytest.approx(3.0 / case.floor)
    assert "2 -> 2, 100 Mbit/s, 100 ms" in show({"rows": [row]})


def test_goals_are_of_the_cases_that_were_played():
    author = {"name": "author", "copies": 1.3, "seconds": 7.0, "floor": 6.0, "plain": 48.0, "udp": True}
    join = {"name": "join", "copies": 1.0, "seconds": 7.0, "floor": 6.0, "plain": 6.5, "udp": True}
    assert [g["met"] for g in goals([author, join])] == [False, True, True, False]
    assert goals([{**author, "name": "far", "plain": None}]) == []
    assert goals([{**join, "name": "join-no-udp", "udp": False}]) == []


def test_a_case_by_tcp_stands_beside_the_same_by_quic():
    quic = {"name": "far", "floor": 5.5, "seconds": 7.04, "plain": 7.5, "udp": True}
    tcp = {**quic, "name": "far-no-udp", "seconds": 10.4, "udp": False}
    (line,) = transports([quic, {**quic, "name": "memory-100"}, tcp]).splitlines()[2:]
    assert line.replace(" ", "") == "|far|5.5|7|10.4|7.5|"


@pytest.mark.parametrize("case", [*CASES, *QUICK], ids=lambda c: c.name)
def test_every_case_is_a_topology(case: Case):
    assert len(case.topology().hosts) == case.donors + case.fetchers
