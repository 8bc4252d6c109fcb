"""As many requests are under way as fill the line, and not many more: on lines of every sort, simulated."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest

from peer.swarm.links import Links
from peer.swarm.pace import BASE_SECONDS, FIRST, LEAST, MOST, Pace
from peer.swarm.traffic import Traffic
from protocol.ids import PeerKey
from protocol.merkle import CHUNK
from tests.support.specs import identity

MBIT = 1e6 / 8
PEER = identity("peer").key


@dataclass
class Run:
    """What one who asks for chunks got: `came` is bytes by the second."""

    pace: Pace
    seconds: float
    came: list[int]
    windows: list[int]

    def rate(self, since: float) -> float:
        """Bytes a second from then on."""
        return sum(self.came[int(since) :]) / (self.seconds - since)


def line(mbit: float | Callable[[float], float], rtt: float | Callable[[float], float], seconds: float) -> Run:
    """One holder behind a line of so many Mbit/s and so long a round trip, both of the time if need be: requests are
    answered in their order, one after the other."""
    rate_at = mbit if callable(mbit) else lambda _: mbit
    rtt_at = rtt if callable(rtt) else lambda _: rtt
    pace, came, windows = Pace(), [0] * int(seconds), []
    coming: list[tuple[float, int]] = []
    marks = {}
    busy_until, now, asked, under_way = 0.0, 0.0, 0, 0
    while now < seconds:
        while under_way < pace.window:
            under_way += 1
            marks[asked] = pace.sent(now, under_way)
            starts = max(busy_until, now + rtt_at(now) / 2)
            busy_until = starts + CHUNK / (rate_at(starts) * MBIT)
            heapq.heappush(coming, (busy_until + rtt_at(now) / 2, asked))
            asked += 1
        now, number = heapq.heappop(coming)
        under_way -= 1
        pace.came(marks.pop(number), CHUNK, now)
        if now < seconds:
            came[int(now)] += CHUNK
            windows.append(pace.window)
    return Run(pace, seconds, came, windows)


@pytest.mark.parametrize("mbit", [2, 20, 100, 500])
@pytest.mark.parametrize("rtt", [0.001, 0.05, 0.2, 0.4])
def test_a_line_is_filled_whatever_its_rate_and_length(mbit: float, rtt: float):
    run = line(mbit, rtt, 20)
    limit = MOST * CHUNK / (rtt + CHUNK / (mbit * MBIT))
    assert run.rate(5) >= 0.95 * min(mbit * MBIT, limit)


@pytest.mark.parametrize(("mbit", "rtt"), [(1, 0.1), (20, 0.05), (100, 0.2)])
def test_no_more_is_asked_for_than_comes_in_a_few_round_trips(mbit: float, rtt: float):
    run = line(mbit, rtt, 25)
    base = rtt + CHUNK / (mbit * MBIT)
    assert max(run.windows) <= max(FIRST, 2 + 3.2 * max(base, base / 3 + 0.25) * mbit * MBIT / CHUNK)
    assert run.pace.latency <= 4 * base + 0.5


def test_a_long_fat_line_is_full_after_a_few_round_trips():
    run = line(500, 0.2, 4)
    assert sum(run.came[:2]) >= 0.5 * 2 * 500 * MBIT


def test_the_window_follows_a_line_that_becomes_slower_and_faster_again():
    run = line(lambda now: 10 if 20 <= now < 40 else 200, 0.1, 60)
    assert sum(run.came[25:38]) >= 0.9 * 13 * 10 * MBIT
    assert sum(run.came[45:60]) >= 0.9 * 15 * 200 * MBIT
    assert min(run.windows) <= 5


def test_a_line_that_becomes_longer_is_filled_again_before_long():
    run = line(100, lambda now: 0.02 if now < 10 else 0.3, 120)
    assert run.rate(80) >= 0.9 * 100 * MBIT


def test_letting_the_queue_run_dry_costs_little_and_keeps_it_from_growing():
    run = line(100, 0.2, 6 * BASE_SECONDS)
    assert run.rate(5) >= 0.97 * 100 * MBIT
    assert LEAST in run.windows
    assert run.windows[-1] <= 60


def test_small_replies_say_nothing_of_the_rate():
    pace = Pace()
    for now in range(10):
        pace.came(pace.sent(now, 1), 8, now + 0.1)
    assert (pace.window, pace.latency) == (FIRST, 0.0)


def test_who_was_slow_while_much_was_asked_of_it_is_known_for_slow_while_it_is_spared():
    pace = Pace()
    for i in range(24):
        pace.came(pace.sent(10.0 * i, 4), CHUNK, 10.0 * i + 2.0)
    assert pace.latency == pytest.approx(2.0) and pace.laden == pytest.approx(2.0)
    for i in range(8):
        pace.came(pace.sent(1000 + 10.0 * i, 1), CHUNK, 1000 + 10.0 * i + 0.2)
    assert pace.latency < 0.5 and pace.laden > 1.5
    for i in range(120):
        pace.came(pace.sent(2000 + 10.0 * i, 1), CHUNK, 2000 + 10.0 * i + 0.2)
    assert pace.laden < 0.3


def test_who_has_become_slow_is_known_for_it_after_some_replies():
    pace = Pace()
    for i, took in enumerate([0.2] * 24 + [2.0] * 12):
        pace.came(pace.sent(10.0 * i, 4), CHUNK, 10.0 * i + took)
    assert pace.laden > 1.5


@pytest.mark.parametrize("late", [0.6, 2.0, 15.0, 59.0])
def test_one_reply_that_was_late_does_not_make_a_line_slow(late: float):
    pace = Pace()
    for i, took in enumerate([0.2] * 8 + [late]):
        pace.came(pace.sent(100.0 * i, 1), CHUNK, 100.0 * i + took)
    assert pace.laden < 1.5 * 0.2


def test_a_moment_in_which_all_that_is_under_way_is_late_does_not_make_a_line_slow():
    pace = Pace()
    for i in range(16):
        pace.came(pace.sent(float(i), 1), CHUNK, i + 0.2)
    for mark in [pace.sent(20.0, n) for n in range(1, 7)]:
        pace.came(mark, CHUNK, 30.0)
    assert pace.laden < 1.5 * 0.2


def test_a_first_reply_that_was_late_is_forgotten_soon():
    pace = Pace()
    for i, took in enumerate([5.0] + [0.2] * 40):
        pace.came(pace.sent(10.0 * i, 1), CHUNK, 10.0 * i + took)
    assert pace.laden < 1.5 * 0.2


def test_what_is_known_of_a_line_is_not_forgotten_with_its_stream():
    async def main() -> tuple[float, Pace]:
        async def open_stream(peer: PeerKey, seconds: float) -> Any:
            return asyncio.StreamReader(), Mock()

        links = Links(open_stream, Traffic())
        (await links.place(PEER, "quick")).free()
        links._links[PEER, "quick"].pace.laden = 2.0
        links.hang_up(PEER)
        between = links.laden(PEER, "quick")
        (await links.place(PEER, "quick")).free()
        pace = links._links[PEER, "quick"].pace
        links.close()
        return between, pace

    between, pace = asyncio.run(main())
    assert between == pace.laden == 2.0
    for i in range(6):
        pace.came(pace.sent(10.0 * i, 1), CHUNK, 10.0 * i + 0.2)
    assert pace.laden > 1.6
