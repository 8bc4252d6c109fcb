"""Two halves that have forgotten each other find each other again when the line between them heals."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.node import network as network_module
from protocol.ids import Digest, PeerKey
from tests.support.node_world import TIMERS, NodeWorld

NORTH, SOUTH = ("ada", "alan"), ("grace", "edsger")


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network_module, "DISCOVER_SECONDS", 0.2)
    monkeypatch.setattr(network_module, "MIN_FORGET_SECONDS", 2.0)
    w = NodeWorld(tmp_path, round={"target_tokens": 1024, "max_update_tokens": 8192, **TIMERS})
    yield w
    await w.close()


def cut(w: NodeWorld) -> None:
    """Between north and south."""
    north = {w.key(n) for n in NORTH}
    w.internet.reach = lambda a, b: (a in north) == (b in north)  # type: ignore[method-assign]


async def test_halves_that_forgot_each_other_are_one_swarm_again(world):
    w, everyone = world, (*NORTH, *SOUTH)
    for name in everyone:
        w.start(name)
    await w.rounds(everyone, 1)

    def known(name: str) -> set[PeerKey]:
        return set(w.nodes[name].network.peers.keys())

    for node in w.nodes.values():
        node.membership.addresses.clear()  # as in a swarm whose newest addresses are all of one's own side
    cut(w)
    for side in (NORTH, SOUTH):
        for name in side:
            there = {w.key(n) for n in side if n != name}
            await w.until(f"{name} has forgotten the other side", lambda n=name, t=there: known(n) == t)
    del w.internet.reach
    await w.until("all have heard of all", lambda: all(len(known(n)) == 3 for n in everyone))
    await w.rounds(everyone, 2)

    def records() -> set[Digest | None]:
        """Return the records of the newest round that all have decided: one, once all are on one branch."""
        decided = min(w.nodes[n].snapshot().round for n in everyone) - 1
        return {w.nodes[n].chain.main_chain_at(decided) for n in everyone}

    await w.until("all are on one branch", lambda: len(records()) == 1)
