"""A node that leaves says goodbye, also when the round that it is in cannot be decided."""

from __future__ import annotations

import time
from types import SimpleNamespace

from peer.node import status_reporter
from peer.node.events import MessageVerified
from peer.store import Store, StoreFull
from protocol.ids import PeerKey
from protocol.messages import Goodbye
from tests.support.node_world import TIMERS, NodeWorld


async def test_who_leaves_while_its_gathered_round_is_undecided_says_goodbye(tmp_path):
    timers = TIMERS | {"exchange_seconds": 30, "patience_seconds": 30, "member_seconds": 30}
    w = NodeWorld(tmp_path, round={"target_tokens": 512, "max_update_tokens": 8192, **timers})
    goodbyes: list[Goodbye] = []
    try:
        ada, grace = w.start("ada"), w.start("grace")
        grace.bus.subscribe(
            MessageVerified, lambda e: goodbyes.append(e.message.body) if isinstance(e.message.body, Goodbye) else None
        )
        await w.rounds(["ada", "grace"], 1)
        w.internet.withheld = lambda giver, blob: True  # no update reaches anybody: no round is decided any more
        await w.until("ada has announced", lambda: ada.snapshot().phase == "exchanging")
        ada.leave()
        await w.running["ada"]
        await w.until("grace has the goodbye", lambda: bool(goodbyes), 5.0)
        assert ada.snapshot().finished == "left the swarm"
    finally:
        w.running.pop("ada", None)
        await w.close()


async def test_who_left_under_a_fast_clock_is_seen_when_it_is_back_under_a_right_one(tmp_path, monkeypatch):
    ahead = 7200.0
    clock = SimpleNamespace(time=lambda: time.time() + ahead, monotonic=time.monotonic)
    monkeypatch.setattr(status_reporter, "time", clock)
    w = NodeWorld(tmp_path, round={"target_tokens": 512, "max_update_tokens": 8192, **TIMERS})

    def members(name: str) -> set[PeerKey]:
        return {m.key for m in w.nodes[name].machine.summary(time.monotonic()).members}

    def seen(name: str, by: str) -> bool:
        return w.key(name) in members(by) and w.nodes[by].network.is_admitted(w.key(name))

    try:
        for name in ("ada", "grace"):
            w.start(name)
        await w.until("grace sees ada", lambda: seen("ada", by="grace"))
        await w.leave("ada")
        await w.until("grace has the goodbye", lambda: w.nodes["grace"].network.peers.has_left(w.key("ada")))
        ahead = 0.0
        w.start("ada")
        await w.until("grace sees ada again", lambda: seen("ada", by="grace"))
        await w.rounds(["ada", "grace"], 1)
    finally:
        await w.close()


def test_a_goodbye_that_cannot_be_stored_is_a_warning(tmp_path, monkeypatch, caplog):
    def full(name: str, data: bytes) -> None:
        raise StoreFull("no space left: free some")

    with Store(tmp_path, 1 << 20) as store:
        status_reporter.store_goodbye(store, 7)
        monkeypatch.setattr(store, "write_value", full)
        status_reporter.store_goodbye(store, 8)
        assert status_reporter.last_goodbye(store) == 7 and "no space left" in caplog.text
