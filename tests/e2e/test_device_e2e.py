"""A volunteer asks for a device that is not there: one line that says what to do, and the swarm goes on."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.conftest import PEERS
from tests.e2e.world import World

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
async def test_a_device_that_is_not_there_ends_the_peer_with_one_line_that_says_what_to_do(swarm: World):
    await swarm.healthy(PEERS)
    process = swarm.start_peer("margaret", device="cuda")
    await swarm.until("margaret gives up", lambda: not process.running)
    assert process.code == 1
    said = process.output.read_text()
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "no CUDA device" in line and "--device cpu" in line
    await swarm.round_after(PEERS, 1)
