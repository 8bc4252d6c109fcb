"""The coordinator's benchmark measures what it says; its figures are not tested."""

from __future__ import annotations

from benchmarks.coordinator.hour import hour
from benchmarks.coordinator.load import percentiles


async def test_an_hour_ends_with_all_but_the_open_rounds_final_and_credits_on_disk(tmp_path):
    found = await hour(tmp_path, 20, 6)
    assert found["final_rounds"] == 3 and found["bytes_per_round"] > 0
    assert 0 < found["processor_seconds"] < 60 and found["followed_max_ms"] >= found["followed_ms"] > 0


def test_percentiles_are_of_the_slowest_and_in_milliseconds():
    found = percentiles([n / 1000 for n in range(1, 101)])
    assert (round(found["p50"]), round(found["p99"]), round(found["max"]), found["calls"]) == (51, 100, 100, 100)
    assert percentiles([])["calls"] == 0
