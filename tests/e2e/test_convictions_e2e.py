"""A peer that sends noise for the largest claims: audits find it, a jury convicts it, and it is barred."""

from __future__ import annotations

import asyncio

import pytest

from peer.coordinator_client import CoordinatorClient
from peer.keyfile import load_or_make
from protocol.ids import PeerKey
from protocol.messages import AuditDecision, Signed, WorkReport
from tests.e2e.chains import check_same
from tests.e2e.commands import cairn
from tests.e2e.world import World, write_run
from tests.support.waiting import LIMIT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200), pytest.mark.long]

HONEST = ["ada", "alan", "grace"]
LIAR = "noisy"
TOKENS = 49_152
"""Of a round, which takes a few seconds then."""

HOLD_ROUNDS = 48
"""Three replays, one after the other, come before the credit of an update: two auditors' and a juror's. On two cores
that four trainers share each takes half a minute."""

ROUNDS = 2 * HOLD_ROUNDS
"""Rounds within which it is convicted, on a machine of any speed: reports count for HOLD_ROUNDS."""


def replayable_world() -> World:
    """Return a world whose honest peers are the founders, so that they have stake from the first round on."""
    tables = {
        "audit": {"replayable": True},
        "codec": {"kind": "sign", "beta": 0.0},
        "credit": {"hold_rounds": HOLD_ROUNDS},
        "checkpoint": {"every": 8, "keep": 8, "final_depth": HOLD_ROUNDS + 1},
    }
    world = World(target_tokens=TOKENS, tables=tables)
    keys = [str(load_or_make(world.folder / name / "identity.key").key) for name in HONEST]
    write_run(world.folder / "run", target_tokens=TOKENS, tables=tables | {"admission": {"founders": sorted(keys)}})
    return world


def reports_on(world: World, key: PeerKey) -> list[Signed[WorkReport]]:
    """Return the reports that records carry on a key's updates."""
    path = world.branch("ada").path
    own = {(c.digest, u.digest) for c in path for u in c.record.body.updates if u.author == key}
    return [r for c in path for r in c.record.body.reports if (r.body.record, r.body.update) in own]


def decisions(world: World) -> list[AuditDecision]:
    return [d for c in world.branch("ada").path for d in c.record.body.decisions]


async def repeated(world: World, round_: int, peer: str) -> tuple[int, str]:
    """Repeat the check of an update as a stranger does."""
    which = ("--round", str(round_), "--peer", peer, "--device", "cpu", "--threads", "1")
    return await cairn("audit", "update", str(world.invite), *which, seconds=5 * LIMIT)


async def test_a_peer_that_sends_noise_is_convicted_and_rests_and_nobody_else_is_accused():
    with replayable_world() as world:
        world.start_coordinator()
        await world.coordinator_ready()
        for name in HONEST:
            world.start_peer(name, audits="cpu")
        await world.healthy(HONEST)
        world.start_peer(LIAR, module="tests.e2e.lying_peer")
        first = await world.contributes_after(LIAR, 0)
        liar = world.key(LIAR)

        def convicted() -> AuditDecision | None:
            assert world.branch("ada").height < first + ROUNDS, world.logs(lines=60)
            return next((d for d in decisions(world) if d.convicted), None)

        decision = await world.until("a record convicts the liar", convicted, seconds=600, every=0.5)
        assert decision.author == liar and not decision.refuted
        failed = [r for r in reports_on(world, liar) if r.body.check == "replay"]
        assert len({r.author for r in failed if not r.body.passed}) >= 2 and not any(r.body.passed for r in failed)

        # Anybody finds the same, on a machine of their own.
        body = next(c.record.body for c in world.branch("ada").path if c.digest == decision.record)
        code, out = await repeated(world, body.round, LIAR)
        assert code == 1 and out.count("FAILED") >= 4 and "convicts the author" in out, out
        code, out = await repeated(world, body.round, str(next(k for k in body.contributors if k != liar)))
        assert code == 0 and "result    passed" in out, out

        # It is barred and says so, and no record lists it. Its credit is void.
        await world.until("the liar is barred", lambda: world.has_logged(LIAR, "THIS PEER IS CONVICTED"))
        at = world.branch("ada").height
        await world.round_after(HONEST, 3)
        late = world.branch("ada").path[at + 1 :]
        assert late and not any(liar in c.record.body.contributors for c in late)

        async def is_void() -> bool:
            async with CoordinatorClient(world.invite, timeout=60.0) as client:
                totals = await client.totals(liar)
            return totals.micro_credits_settled == totals.micro_credits_pending == 0

        await world.until("its credit is void", is_void, every=0.5)

        for name in HONEST:
            replays = [r for r in reports_on(world, world.key(name)) if r.body.check == "replay"]
            assert all(r.body.passed for r in replays)
        assert any(r.body.check == "replay" for n in HONEST for r in reports_on(world, world.key(n)))
        assert [d for d in decisions(world) if d.author != liar] == []
        check_same({name: world.branch(name) for name in HONEST})
        counts = [s.audits for name in HONEST if (s := world.snapshot(name)) is not None]
        assert all(c["made"] > 0 for c in counts), counts

        # The owner pardons it: it trains again, and starts over.
        code, out = await cairn("run", "pardon", str(world.coordinator_home), str(liar), "--reason", "a faulty card")
        assert code == 0 and "pardoning" in out and "received it" in out, out
        await world.until("the liar is pardoned", lambda: world.has_logged(LIAR, "has pardoned this peer"))
        await world.contributes_after(LIAR, world.branch("ada").height)
        await asyncio.to_thread(world.stop, *(n for n, p in world.processes.items() if p.running))
    assert world.left == ([], [])
