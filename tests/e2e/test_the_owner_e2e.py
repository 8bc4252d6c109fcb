"""The owner commands a run of real processes: pause, go on, ban one of three, roll back to a checkpoint.

The last file of those that share a swarm: nobody gets the banned one back.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from coordinator.checkpoints.archive import Archive
from tests.e2e.conftest import PEERS
from tests.e2e.world import LIMIT, World

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]


async def order(world: World, *words: str) -> str:
    command = [sys.executable, "-m", "cairn", "run", words[0], str(world.coordinator_home), *words[1:]]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{world.logs()}"
    return done.stdout


async def test_the_owner_pauses_resumes_bans_and_rolls_back_a_run(swarm: World):
    world = swarm
    await world.healthy(PEERS)

    said = await order(world, "pause", "--reason", "moving house")
    assert "pausing at once" in said and "received it" in said
    paused = "paused by the run's owner"

    def all_paused() -> bool:
        shown = [world.snapshot(n) for n in PEERS]
        return all(s is not None and paused in s.orders and s.phase == "paused" for s in shown)

    await world.until("all are paused", all_paused)
    assert "moving house" in world.snapshot_left("ada").orders

    def progress() -> list[tuple[int, int]]:
        return [(world.branch(n).height, world.snapshot_left(n).trained_windows) for n in PEERS]

    async def nothing_moves() -> bool:
        before = progress()
        await asyncio.sleep(2.5)
        return progress() == before

    await world.until("nothing moves for 2.5 s", nothing_moves)

    await order(world, "resume")
    await world.round_after(PEERS, 2)

    grace = world.key("grace")
    said = await order(world, "ban", str(grace), "--reason", "wrong updates")
    assert "banning" in said
    await world.until("the banned one has left", lambda: not world.processes["grace"].running)
    world.assert_logged("grace", r"banned by the run's owner \(wrong updates\)")
    rest = PEERS[:2]
    start = world.branch("ada").height
    await world.round_after(rest, 2)
    listed = {k for c in world.branch("ada").path[start + 1 :] for k in c.record.body.contributors}
    assert grace not in listed
    world.start_peer("grace")
    await world.until("it is refused", lambda: not world.processes["grace"].running)
    assert "has banned this key" in world.processes["grace"].output.read_text()

    archive = Archive(world.coordinator_home / "checkpoints", world.spec)
    await world.until("two states are archived", lambda: len([a for a in archive.all() if a.round]) >= 2)
    await world.round_after(rest, 1)
    to = [a for a in archive.all() if a.round][-2]
    old = world.branch("ada").height
    said = await order(world, "rollback", str(to.round), "--yes")
    assert f"to round {to.round}" in said

    def on_new_branch() -> bool:
        return all(_carries(world, n, to.round) for n in [*rest, "coordinator"])

    await world.until("all are on the new branch", on_new_branch)
    await world.round_reached(rest, to.round + 3)
    ada, alan = (world.branch(n).path for n in rest)
    common = min(len(ada), len(alan))
    assert [c.digest for c in ada[:common]] == [c.digest for c in alan[:common]]
    # The next training begins with the archived state, and all hold one state.
    assert ada[to.round].record.body.base_state == to.state and old > to.round

    def signed() -> bool:
        return world.has_logged("coordinator", "rolled back to round")

    assert signed()
    await world.until("the final of the new branch", lambda: _final(world) > to.round)
    status = await world.status()
    assert status.health not in ("trouble", "split"), status.message


def _final(world: World) -> int:
    final = world.branch("ada").final
    return final.body.round if final is not None and final.body.epoch == 1 else -1


def _carries(world: World, name: str, round_: int) -> bool:
    path = world.branch(name).path
    return len(path) > round_ and path[round_].record.body.directive is not None
