"""The simulator of large swarms: rounds go on as they should, no faster than the lines; shadows are like machines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scale.__main__ import calibration_shown, finished, gpu_seconds, row_of, shown
from benchmarks.scale.fluid import fair_shares
from benchmarks.scale.shape import Shape
from benchmarks.scale.sizes import Sizes
from benchmarks.scale.world import World
from protocol.codec import make_codec
from tests.support.signed import HEADERS, RECORD, VOTES

SMALL = Shape(8, "1M", "sparse", step_seconds=0.3)


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
def test_a_small_swarm_plays_rounds_of_all_its_peers(exchange):
    shape = replace(SMALL, exchange=exchange)
    counts = World(shape).play(1, 1000.0)
    assert counts.contributors == 8 and not counts.reports and counts.attempts == 0
    assert counts.exchange_seconds > shape.floor
    assert counts.round_seconds == pytest.approx(30 * 0.3, rel=0.3)
    if exchange == "gather":
        assert counts.blob_bytes == pytest.approx(7 * shape.blob, rel=0.01)
    assert 0.9 < counts.training <= 1 and counts.training_without_overlap < counts.training


def test_the_lines_bound_the_exchange():
    slow = replace(SMALL, up=1e6, down=1e6)
    counts = World(slow).play(1, 1000.0)
    assert slow.floor < counts.exchange_seconds < 2 * slow.floor
    assert World(SMALL).play(1, 1000.0).exchange_seconds < counts.exchange_seconds / 2


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
def test_a_few_machines_and_shadows_give_the_figures_of_machines_alone(exchange):
    shape = replace(SMALL, peers=24, exchange=exchange)
    whole, few = (World(replace(shape, watched=n)).play(1, 1000.0) for n in (24, 6))
    assert few.contributors == whole.contributors == 24 and not few.reports
    assert few.exchange_seconds == pytest.approx(whole.exchange_seconds, rel=0.15)
    assert few.message_up == pytest.approx(whole.message_up, rel=0.15)
    assert few.round_seconds == pytest.approx(whole.round_seconds, rel=0.15)
    assert few.steps < whole.steps / 2


def test_sizes_are_those_of_real_messages():
    sizes, shape = Sizes(), Shape(4, "1M", "sign")
    assert abs(sizes.of(HEADERS[1], names=True) - len(HEADERS[1].encoded)) < 60
    assert abs(sizes.of(VOTES[1], names=True) - len(VOTES[1].encoded)) < 60
    assert sizes.of(RECORD, names=True) < sizes.of(RECORD, names=False) / 3
    assert shape.blob == make_codec(shape.coder, shape.layout).size
    assert sum(shape.slice_bytes(p) for p in range(shape.parts)) >= shape.blob - 1


def test_shares_are_max_min_fair():
    wants = np.array([1.0, 10.0, 4.0, 0.0])
    assert list(fair_shares(wants, 100.0)) == [1, 10, 4, 0]
    assert list(fair_shares(wants, 9.0)) == [1, 4, 4, 0]
    assert list(fair_shares(wants, 1.5)) == [0.5, 0.5, 0.5, 0]


def test_a_row_is_shown_and_judged():
    row = row_of(replace(SMALL, peers=16, parameters="1B", blob_bytes=10_000, step_seconds=2.0), 1)
    (goal,) = finished({"rows": [row]})["goals"]
    assert goal["value"] == 1 - gpu_seconds() / row["round_seconds"] < row["training"] and goal["met"] is False
    (goal,) = finished({"rows": [row | {"round_seconds": 1000.0}]})["goals"]
    assert goal["met"] is True
    assert "sparse" in shown([row])


def test_a_simulated_row_stands_beside_the_only_real_row_of_the_same_swarm():
    simulated = {"peers": 8, "parameters": "25M", "codec": "sign", "up": 25e6, "rtt": 0.1, "floor": 7.0,
                 "exchange_seconds": 9.0}  # fmt: skip
    real = {"name": "sign", "parameters": 25_165_824, "peers": 8, "mbit": 25.0, "rtt_ms": 100.0, "tcp": "bbr",
            "certified": 10.0}  # fmt: skip
    others = [real | {"mbit": 100.0}, real | {"pause": 60.0}, real | {"tcp": "cubic"}, real | {"ordinary": True}]
    line = calibration_shown([simulated], [*others, real]).splitlines()[-1]
    assert "out of sample" in line and "0.90" in line
    with pytest.raises(ValueError, match="0 real rows"):
        calibration_shown([simulated], others)
