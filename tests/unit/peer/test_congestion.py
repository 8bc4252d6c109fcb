"""As many requests are under way as fill the line, and not many more: on lines of every sort, simulated."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest

from peer.swarm.transfer.actions import Priority
from peer.swarm.transfer.congestion import BASE_SECONDS, FIRST, LEAST, MOST, CongestionController
from peer.swarm.transfer.frames import BlobOp, BlobReply, BlobRequest, ReplyStatus
from peer.swarm.transfer.streams import StreamPool
from peer.swarm.transport import ByteCount
from protocol.ids import Digest, PeerKey
from protocol.merkle import CHUNK
from tests.support.fetch_world import simulated
from tests.support.specs import identity

MBIT = 1e6 / 8
PEER = identity("peer").key


@dataclass
class Run:
    """The chunks that one peer got: `came` is bytes by the second."""

    controller: CongestionController
    seconds: float
    came: list[int]
    windows: list[int]

    def rate(self, since: float) -> float:
        """Bytes a second from then on."""
        return sum(self.came[int(since) :]) / (self.seconds - since)


def line(mbit: float | Callable[[float], float], rtt: float | Callable[[float], float], seconds: float) -> Run:
    """Simulate one provider behind a path of this rate and round trip, which may change with the time.

    Requests are answered in their order, one after the other.
    """
    rate_at = mbit if callable(mbit) else lambda _: mbit
    rtt_at = rtt if callable(rtt) else lambda _: rtt
    controller, came, windows = CongestionController(), [0] * int(seconds), []
    coming: list[tuple[float, int]] = []
    marks = {}
    busy_until, now, asked, under_way = 0.0, 0.0, 0, 0
    while now < seconds:
        while under_way < controller.window:
            under_way += 1
            marks[asked] = controller.sent(now, under_way)
            starts = max(busy_until, now + rtt_at(now) / 2)
            busy_until = starts + CHUNK / (rate_at(starts) * MBIT)
            heapq.heappush(coming, (busy_until + rtt_at(now) / 2, asked))
            asked += 1
        now, number = heapq.heappop(coming)
        under_way -= 1
        controller.received(marks.pop(number), CHUNK, now)
        if now < seconds:
            came[int(now)] += CHUNK
            windows.append(controller.window)
    return Run(controller, seconds, came, windows)


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
    assert run.controller.latency <= 4 * base + 0.5


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
    controller = CongestionController()
    for now in range(10):
        controller.received(controller.sent(now, 1), 8, now + 0.1)
    assert (controller.window, controller.latency) == (FIRST, 0.0)


def test_who_was_slow_while_much_was_asked_of_it_is_known_for_slow_while_it_is_spared():
    controller = CongestionController()
    for i in range(24):
        controller.received(controller.sent(10.0 * i, 4), CHUNK, 10.0 * i + 2.0)
    assert controller.latency == pytest.approx(2.0) and controller.loaded_latency == pytest.approx(2.0)
    for i in range(8):
        controller.received(controller.sent(1000 + 10.0 * i, 1), CHUNK, 1000 + 10.0 * i + 0.2)
    assert controller.latency < 0.5 and controller.loaded_latency > 1.5
    for i in range(120):
        controller.received(controller.sent(2000 + 10.0 * i, 1), CHUNK, 2000 + 10.0 * i + 0.2)
    assert controller.loaded_latency < 0.3


def test_who_has_become_slow_is_known_for_it_after_some_replies():
    controller = CongestionController()
    for i, took in enumerate([0.2] * 24 + [2.0] * 12):
        controller.received(controller.sent(10.0 * i, 4), CHUNK, 10.0 * i + took)
    assert controller.loaded_latency > 1.5


@pytest.mark.parametrize("late", [0.6, 2.0, 15.0, 59.0])
def test_one_reply_that_was_late_does_not_make_a_line_slow(late: float):
    controller = CongestionController()
    for i, took in enumerate([0.2] * 8 + [late]):
        controller.received(controller.sent(100.0 * i, 1), CHUNK, 100.0 * i + took)
    assert controller.loaded_latency < 1.5 * 0.2


def test_a_moment_in_which_all_that_is_under_way_is_late_does_not_make_a_line_slow():
    controller = CongestionController()
    for i in range(16):
        controller.received(controller.sent(float(i), 1), CHUNK, i + 0.2)
    for mark in [controller.sent(20.0, n) for n in range(1, 7)]:
        controller.received(mark, CHUNK, 30.0)
    assert controller.loaded_latency < 1.5 * 0.2


def test_a_first_reply_that_was_late_is_forgotten_soon():
    controller = CongestionController()
    for i, took in enumerate([5.0] + [0.2] * 40):
        controller.received(controller.sent(10.0 * i, 1), CHUNK, 10.0 * i + took)
    assert controller.loaded_latency < 1.5 * 0.2


def test_the_loaded_latency_of_a_stream_that_ended_holds_for_the_next_one():
    async def main() -> tuple[float, float, float]:
        readers: list[asyncio.StreamReader] = []

        async def open_stream(peer: PeerKey, seconds: float) -> Any:
            readers.append(asyncio.StreamReader())
            return readers[-1], Mock()

        pool, request = StreamPool(open_stream, ByteCount()), BlobRequest(BlobOp.CHUNK, Digest(bytes(32)))

        async def get(seconds: float) -> None:
            got = asyncio.ensure_future(pool.request(PEER, Priority.SMALL, request, CHUNK))
            await asyncio.sleep(seconds)
            readers[-1].feed_data(BlobReply(ReplyStatus.OK, bytes(CHUNK)).prefix() + bytes(CHUNK))
            await got

        await get(2.0)
        pool.hang_up(PEER)
        between = pool.loaded_latency(PEER, Priority.SMALL)
        await get(0.2)
        new = pool.loaded_latency(PEER, Priority.SMALL)
        for _ in range(5):
            await get(0.2)
        later = pool.loaded_latency(PEER, Priority.SMALL)
        pool.close()
        return between, new, later

    between, new, later = simulated(main())
    assert between == pytest.approx(2.0)
    assert 1.9 < new < 2.0 and later > 1.6
