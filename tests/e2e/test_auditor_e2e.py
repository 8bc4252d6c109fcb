"""`cairn auditor` beside one peer: it checks the peer's updates for the owner, and trains nothing."""

from __future__ import annotations

import asyncio
import json

import pytest

from protocol.messages import WorkReport
from tests.e2e.commands import cairn
from tests.e2e.world import World
from tests.support.waiting import LIMIT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200), pytest.mark.long]

TABLES = {
    "audit": {"replayable": True},
    "codec": {"kind": "sign", "beta": 0.0},
    "credit": {"hold_rounds": 16},
    "checkpoint": {"every": 8, "keep": 8, "final_depth": 17},
}


async def test_the_owners_auditor_replays_the_peers_updates_and_rounds_do_not_wait_for_it():
    with World(tables=TABLES) as world:
        world.start_coordinator()
        await world.coordinator_ready()
        world.start_peer("ada")
        await world.healthy(["ada"])
        world.start_auditor("watcher", world.coordinator_home / "owner.key")

        def passed() -> WorkReport | None:
            path = world.branch("ada").path
            told = [r.body for c in path for r in c.record.body.reports if r.author == world.owner.key]
            return next((r for r in told if r.check == "replay" and r.passed), None)

        report = await world.until("a record carries a replay by the owner", passed, seconds=600, every=0.5)
        updates = {u.digest: u.author for c in world.branch("ada").path for u in c.record.body.updates}
        assert updates[report.update] == world.key("ada")
        await world.round_after(["ada"], 2)
        assert set(updates.values()) == {world.key("ada")}, "a record lists the auditor"

        ada = world.folder / "ada" / "identity.key"
        code, out = await cairn("auditor", *world.auditor_arguments("stranger", ada), seconds=2 * LIMIT)
        assert code == 1 and "is not the key of this run's owner" in out and "Traceback" not in out

        status = json.loads((world.peer_folder("watcher") / "status.json").read_text())
        assert status["phase"] == "observing" and status["own_updates"] == 0 and status["audits"]["made"] > 0
        # Honest updates may fail loss checks, but no replay.
        assert not world.has_logged("watcher", "replay failed"), world.log("watcher")
        await asyncio.to_thread(world.stop, "watcher")
        process = world.processes["watcher"]
        assert process.code == 0 and "checks made; the same command resumes" in process.last_words(), world.logs()
        await asyncio.to_thread(world.stop, *(n for n, p in world.processes.items() if p.running))
    assert world.left == ([], [])
