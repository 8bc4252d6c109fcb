"""The bound on the bytes a second of blobs."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from peer.swarm.pace import LOOK_SECONDS, Pace
from tests.support.waiting import ended


class Clock:
    """Seconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.longest = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.longest = max(self.longest, seconds)
        await asyncio.sleep(0)


@given(st.integers(1, 10**9), st.lists(st.integers(0, 10**7), max_size=30))
def test_no_more_goes_than_the_rate_a_burst_and_one_piece(rate: int, sizes: list[int]):
    async def play() -> None:
        clock, gone = Clock(), 0
        pace = Pace(clock, clock.sleep)
        pace.set_rate(rate)

        async def send(size: int) -> None:
            nonlocal gone
            await pace.take(size)
            assert gone <= rate * (1 + clock.now) + 1
            gone += size

        if sum(sizes) / rate < 1000:
            await asyncio.gather(*map(send, sizes))
            assert gone == sum(sizes) and clock.longest <= LOOK_SECONDS

    asyncio.run(play())


async def test_the_rate_may_change_while_somebody_waits():
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    await pace.take(10**12)  # no rate yet
    pace.set_rate(100_000)
    await pace.take(10**9)
    waiting = asyncio.ensure_future(pace.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    pace.set_rate(0)
    await ended(waiting)
    assert clock.now <= 2 * LOOK_SECONDS


async def test_what_did_not_go_is_given_back():
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    pace.set_rate(100_000)
    await pace.take(10**9)
    pace.give_back(10**9)
    await pace.take(1)
    assert clock.now == 0.0
