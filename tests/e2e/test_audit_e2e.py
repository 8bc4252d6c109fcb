"""A stranger audits a live run from its invite, on real processes: the chain from the peers, the log from the owner."""

from __future__ import annotations

import json

import pytest

from tests.e2e.commands import cairn
from tests.e2e.conftest import PEERS
from tests.e2e.world import World

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]


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


async def test_a_stranger_who_would_repeat_a_check_reads_why_there_is_none(swarm: World):
    """`test_convictions_e2e` repeats checks of real peers, where these keep their updates for long enough."""
    await swarm.healthy(PEERS)
    which = (str(swarm.invite), "--round", str(max(swarm.rounds_with("ada"))), "--peer", "ada")
    code, out = await cairn("audit", "update", *which, "--check", "replay")
    assert code == 3 and "this run has no replays" in out and "Traceback" not in out
    code, out = await cairn("audit", "update", str(swarm.invite), "--round", "1", "--peer", "nobody")
    assert code == 3 and "lists no update of 'nobody'" in out and "Traceback" not in out
