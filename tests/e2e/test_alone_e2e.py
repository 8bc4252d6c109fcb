"""All volunteers leave in order, the coordinator is killed and comes back: a newcomer goes on from the head."""

from __future__ import annotations

import asyncio
import re
import signal

import pytest

from coordinator.checkpoints.archive import Archive
from tests.e2e.chains import check_same
from tests.e2e.world import World

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]


async def test_a_newcomer_goes_on_from_the_head_when_only_the_coordinator_is_there():
    with World() as world:
        world.start_coordinator()
        await world.coordinator_ready()
        for name in ("ada", "bob"):
            world.start_peer(name)
        archive = Archive(world.coordinator_home / "checkpoints", world.spec)

        def rounds_after_a_state() -> bool:
            archived = archive.all()
            return bool(archived) and 0 < archived[-1].round <= world.branch("ada").height - 3

        await world.until("rounds after an archived state", rounds_after_a_state)
        await asyncio.to_thread(world.stop, "ada", "bob", numbers=[signal.SIGINT])
        left = world.branch("coordinator").height
        assert left > archive.all()[-1].round, "nothing is to be replayed"
        await asyncio.to_thread(world.stop, "coordinator", numbers=[signal.SIGKILL])
        world.start_coordinator()
        await world.coordinator_ready()
        status = await world.status()
        assert status.health == "idle" and "held by nobody" not in status.message, status.message
        world.start_peer("cyd")
        first = await world.contributes_after("cyd", left - 1)
        assert first == left  # the round after the head: nothing of the others' work is lost
        await world.contributes_after("cyd", first)
        check_same({name: world.branch(name) for name in ("cyd", "coordinator")})
        failures = re.findall(r"request for blob|was not reached|no peer provides", world.log("cyd"))
        assert not failures, world.logs("cyd")
        await asyncio.to_thread(world.stop, "cyd", "coordinator")
    assert world.left == ([], [])
