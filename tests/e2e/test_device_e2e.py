"""A volunteer asks for a device that is not there: one line that says what to do, and the swarm goes on."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
async def test_a_device_that_is_not_there_ends_the_peer_with_one_line_that_says_what_to_do():
    with World() as world:
        world.start_coordinator()
        await world.coordinator_ready()
        world.start_peer("ada")
        process = world.start_peer("margaret", device="cuda")
        await world.until("margaret gives up", lambda: not process.running)
        assert process.code == 1
        said = process.output.read_text()
        assert "Traceback" not in said
        (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert "no CUDA device" in line and "--device cpu" in line
        await world.round_after(["ada"], 1)
