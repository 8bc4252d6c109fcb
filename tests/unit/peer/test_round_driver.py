"""The driver of the round machine starts a peer again that was asleep: the others have gone on meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from peer.node.driver import RoundDriver
from peer.node.events import EventQueue, NodeEvents
from peer.node.round_timings import RoundTimings
from tests.support.waiting import ended, until


def driver(since_boot, slept_seconds: float = 60.0) -> RoundDriver:
    machine: Any = SimpleNamespace(next_tick=float("inf"))
    bus = NodeEvents()
    return RoundDriver(
        machine, cast(Any, None), EventQueue(bus), bus, RoundTimings(), status=cast(Any, None),
        slept_seconds=slept_seconds, since_boot=since_boot,
    )  # fmt: skip


async def test_a_peer_whose_machine_slept_starts_again(monkeypatch):
    monkeypatch.setattr("peer.node.driver.MAX_TICK_SECONDS", 0.01)
    now, looked = 1000.0, 0

    def since_boot() -> float:
        nonlocal looked
        looked += 1
        return now

    running = asyncio.create_task(driver(since_boot).run())
    for pause in (0, 59, 59):
        now, before = now + pause, looked
        await until(lambda before=before: looked > before + 3, "it looks at the clock again")
        assert not running.done()
    now += 3600
    finished = await ended(running)
    assert finished.again and "asleep for 3600 s" in finished.reason
