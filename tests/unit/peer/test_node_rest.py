"""A node whose user wants the devices: it hands in its work, lets its trainer go, and comes back without a loss."""

from __future__ import annotations

import asyncio

from peer.node.node import Node
from peer.node.rest import RestWish
from protocol.ids import PeerKey
from tests.support.node_world import TIMERS, NodeWorld
from tests.support.waiting import ended

# Rounds that take a while, so that a rest begins within one; others end them by what they have done.
ROUND = {"target_tokens": 2048, "max_update_tokens": 8192, **TIMERS}


def windows_of(node: Node, key: PeerKey) -> list[tuple[int, int]]:
    """Return the windows of a peer's updates on a node's chain, oldest first."""
    path = node.chain.path(node.chain.root, node.chain.head)
    updates = (u for c in path for u in c.record.body.updates if u.author == key)
    return [(u.body.first_window, u.body.end_window) for u in updates]


async def test_nothing_trained_is_lost_by_a_rest_and_the_others_go_on_without_it(tmp_path):
    w = NodeWorld(tmp_path, round=ROUND)
    try:
        rest = RestWish()
        ada, grace, key = w.start("ada", rest), w.start("grace"), w.key("ada")
        await w.until("both contribute", lambda: min(w.contributed("ada"), w.contributed("grace")) >= 2)
        before = w.trainer("ada")
        rest.want("user", "the user plays")
        await w.until("its devices are free", lambda: rest.is_free)
        trained = ada.snapshot().trained_windows
        assert before.stopping and ada.snapshot().rest == "the user plays" and ada.snapshot().phase == "resting"
        await w.until("grace knows", lambda: phases(grace) == {key: "resting"})
        await w.rounds(["grace"], 3)
        since = grace.chain.height(grace.chain.head)
        await w.rounds(["grace"], 3)
        assert w.contributed("ada", since) == 0 and phases(grace) == {key: "resting"}
        assert ada.snapshot().trained_windows == trained and w.trainer("ada") is before  # no step since
        await w.until("it follows", lambda: ada.chain.height(ada.chain.head) >= since + 3)

        rest.want("user", "")
        await w.until("it contributes again", lambda: w.contributed("ada", since) > 1)
        assert w.trainer("ada") is not before and not rest.is_free
        await w.until("it trains", lambda: ada.snapshot().next_window > 0)
        now = ada.snapshot()
        assert now.trained_windows == now.next_window > trained, "windows were trained twice"
        assert now.rest == "" and now.phase != "resting"
        claimed = windows_of(grace, key)
        assert [a for _, a in claimed[:-1]] == [b for b, _ in claimed[1:]], "windows were left out"
    finally:
        await w.close()


def phases(node: Node) -> dict[PeerKey, str]:
    return {m.key: m.heartbeat.phase for m in node.machine.summary(0.0).members}


async def test_a_rest_from_the_start_uses_no_device_and_may_end_at_once(tmp_path):
    w = NodeWorld(tmp_path, round=ROUND)
    try:
        w.start("grace")
        await w.rounds(["grace"], 1)
        rest = RestWish()
        rest.want("user", "not yet")
        ada = w.start("ada", rest)
        await w.until("it follows", lambda: ada.snapshot().round > 1)
        assert rest.is_free and w.key("ada") not in w.trainers
        for _ in range(3):  # the last word counts
            rest.want("user", "")
            rest.want("user", "after all")
        rest.want("user", "")
        await w.until("it contributes", lambda: w.contributed("ada") > 0)
    finally:
        await w.close()


async def test_who_changes_their_mind_at_any_moment_still_trains_in_the_end(tmp_path):
    w = NodeWorld(tmp_path, round=ROUND)
    try:
        rest = RestWish()
        ada = w.start("ada", rest)
        await w.rounds(["ada"], 1)
        for wait in (0, 1, 2, 5, 20, 100):
            rest.want("user", "now")
            for _ in range(wait):
                await asyncio.sleep(0.005)
            rest.want("user", "")
            for _ in range(wait):
                await asyncio.sleep(0.005)
        await w.rounds(["ada"], 2)
        assert ada.snapshot().rest == ""
    finally:
        await w.close()


async def test_who_leaves_while_it_rests_leaves_in_order(tmp_path):
    w = NodeWorld(tmp_path, round=ROUND)
    try:
        rest = RestWish()
        ada = w.start("ada", rest)
        await w.rounds(["ada"], 1)
        rest.want("user", "now")
        await w.until("its devices are free", lambda: rest.is_free)
        ada.leave()
        await ended(w.running.pop("ada"))
        assert ada.snapshot().finished == "left the swarm"
    finally:
        await w.close()
