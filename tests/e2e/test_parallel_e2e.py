"""A peer of one process and one of many ranks in one swarm: same bits, and a rank's death costs a restart, no more."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.chains import check_same
from tests.e2e.world import World

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

PEERS = ["ada", "alan"]


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc: a trainer's ranks are not known")
async def test_peers_of_one_process_and_of_two_ranks_hold_the_same_bits_also_after_a_rank_was_killed():
    with World() as world:
        world.start_coordinator()
        await world.coordinator_ready()
        world.start_peer("ada")
        world.start_peer("alan", parallel="fsdp=2")
        await world.contributes_after("alan", 0)
        await world.contributes_after("ada", 0)
        trainer = world.trainer_of("alan")
        assert "--parallel fsdp=2, as asked" in world.log("alan") and "2 x CPU" in world.log("alan")
        [rank] = children(trainer)
        os.kill(rank, signal.SIGKILL)
        await world.until(
            "the node tells why, and has another trainer", lambda: "rank 1 of 2 ended" in world.log("alan")
        )
        now = await world.round_after(["ada"], 1)
        await world.contributes_after("alan", now)
        check_same({n: world.branch(n) for n in [*PEERS, "coordinator"]})
        for name in PEERS:
            assert "differs from the state" not in world.log(name)
        await asyncio.to_thread(world.stop, *PEERS, "coordinator")
    assert world.left == ([], [])


LAYOUTS = {"ada": "dp=1", "alan": "dp=2", "edsger": "tp=2", "barbara": "pp=2"}
"""Every kind of layout but fsdp, which is above."""


async def test_a_swarm_of_many_layouts_trains_together_and_all_hold_the_same_bits():
    with World(tied=False) as world:  # pp does not split tied embeddings
        world.start_coordinator()
        await world.coordinator_ready()
        for name, layout in LAYOUTS.items():
            world.start_peer(name, parallel=layout)
        for name in LAYOUTS:
            await world.contributes_after(name, 0)
        await world.round_after(list(LAYOUTS), 3)
        for name, layout in LAYOUTS.items():
            assert layout == "dp=1" or f"--parallel {layout}, as asked" in world.log(name)
            assert "differs from the state" not in world.log(name), world.logs(name)
        branches = {n: world.branch(n) for n in [*LAYOUTS, "coordinator"]}
        check_same(branches)
        assert branches["ada"].windows.keys() == {world.key(n) for n in LAYOUTS}
        await asyncio.to_thread(world.stop, *LAYOUTS, "coordinator")
    assert world.left == ([], [])
