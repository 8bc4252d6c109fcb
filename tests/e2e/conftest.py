"""The swarm that the tests of this folder share: starting three peers takes twenty seconds of two cores."""

from __future__ import annotations

import asyncio

import pytest_asyncio

from tests.e2e.world import World

PEERS = ["ada", "alan", "grace"]


@pytest_asyncio.fixture(loop_scope="package", scope="package")
async def swarm():
    """Start a coordinator and three peers.

    A test may stop any: the next one begins with `healthy`, which starts them again.

    At the end all are stopped in order, and nothing of them may be left.
    """
    with World() as world:
        world.start_coordinator()
        await world.coordinator_ready()
        for name in PEERS:
            world.start_peer(name)
        yield world
        await asyncio.to_thread(world.stop, *(n for n, p in world.processes.items() if p.running))
    assert world.left == ([], [])
