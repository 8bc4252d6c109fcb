"""A newcomer is a member to others before it has the run's data: non-members get little of an uplink."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peer.node import trainer_client
from protocol.rounds.phase import Phase
from tests.support.node_world import NodeWorld


async def test_members_know_a_newcomer_while_it_fetches_the_runs_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = NodeWorld(tmp_path)
    world.start("ada")
    await world.rounds(["ada"], 1)
    may_have_data = asyncio.Event()

    async def slow(*_: Any, **__: Any) -> None:
        await may_have_data.wait()

    monkeypatch.setattr(trainer_client, "fetch_assets", slow)
    alan = world.start("alan")
    await world.until("ada knows alan", lambda: world.nodes["ada"].network.is_admitted(world.key("alan")))
    assert world.key("alan") not in world.trainers and alan.machine.phase is Phase.JOINING
    may_have_data.set()
    await world.rounds(["ada", "alan"], 2)
    await world.close()
