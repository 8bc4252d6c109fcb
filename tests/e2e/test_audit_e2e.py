"""A stranger audits a live run from its invite, on real processes: the chain from the peers, the log from the owner."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from tests.e2e.conftest import PEERS
from tests.e2e.world import World
from tests.support.waiting import ended

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]


async def cairn(*arguments: str) -> tuple[int, str]:
    """Run a command as a separate process, as a stranger would."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cairn", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await ended(process.communicate())
    return process.returncode or 0, out.decode() + (err.decode() if process.returncode else "")


async def test_a_stranger_audits_the_ledger_and_a_peer_its_receipts(swarm: World):
    await swarm.healthy(PEERS)

    async def some_settled() -> bool:
        status = await swarm.status()
        return status.final_round is not None and status.final_round >= 4

    await swarm.until("five rounds are final", some_settled, every=0.5)
    invite = str(swarm.invite)
    code, out = await cairn("audit", "ledger", invite, "--json")
    found = json.loads(out)
    assert code == 0 and found["clean"], out
    # The chain came from those who train, not from the coordinator's own observer.
    assert set(found["certificates"]["members"]) <= {str(swarm.key(name)) for name in PEERS} and found["rounds"] >= 5
    assert found["certificates"]["members"] and found["certificates"]["coordinator"] == 0
    assert {str(swarm.key(name)) for name in PEERS} >= set(found["peers"]) and found["warnings"] == []
    assert sum(found["micro_credits"][k] for k in ("settled", "pending")) == found["micro_credits"]["issued"] > 0
    code, out = await cairn("audit", "ledger", invite)
    assert code == 0 and "clean" in out, out
    ada = str(swarm.folder / "ada")
    code, out = await cairn("account", "show", invite, "--json", "--home", ada)
    assert code == 0 and json.loads(out)["receipts"], out
    code, out = await cairn("audit", "receipt", invite, "--home", ada)
    assert code == 0 and "WRONG" not in out, out
