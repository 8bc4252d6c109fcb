"""A node that leaves says goodbye, also when the round that it is in cannot be decided."""

from __future__ import annotations

from peer.node.events import MessageVerified
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
