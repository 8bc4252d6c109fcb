"""Rounds that are reduced in parts by committees keep the promises of those that gather: on real processes."""

from __future__ import annotations

import asyncio

import pytest

from protocol.reduce_plan import shard_count
from tests.e2e.chains import Branch, check_same
from tests.e2e.world import World

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

WIDE = {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 4}
"""An update of 1.3 MB in 8 bits: six chunks, of which a part takes two or three."""

PEERS = ["ada", "alan", "grace"]


def check_reduced(world: World, branch: Branch) -> None:
    """Check that each round was reduced, with the number of shards that its contributors and updates give."""
    for c in branch.path:
        updates = c.record.body.updates
        assert len(c.shards) == shard_count(len(updates), updates[0].body.blob_size) > 0


def held_whole(world: World, name: str) -> set[bytes]:
    """Return the digests of the blobs in a peer's store."""
    blobs = world.peer_folder(name) / "store" / "blobs"
    return {bytes.fromhex(f.name) for f in blobs.glob("*/*") if "." not in f.name}


async def test_a_swarm_that_reduces_goes_on_when_one_dies_and_takes_in_another():
    tables = {"model": WIDE, "codec": {"kind": "int8"}, "round": {"exchange": "reduce"}}
    with World(target_tokens=8192, tables=tables) as world:
        world.start_coordinator()
        await world.coordinator_ready()
        for name in PEERS:
            world.start_peer(name)
        await world.healthy(PEERS)
        await world.round_after(PEERS, 3)
        check_reduced(world, world.branch("ada"))
        assert max(len(c.shards) for c in world.branch("ada").path) == 3

        world.processes["alan"].kill()  # at any moment: its slices are missing, and so is it in its committees
        await world.round_after(["ada", "grace"], 2)
        world.start_peer("alan")
        world.start_peer("edsger")
        await world.contributes_after("alan", world.branch("ada").height)
        await world.contributes_after("edsger", 0)
        everyone = [*PEERS, "edsger"]
        await world.round_after(everyone, 2)
        assert "fetching the checkpoint" in world.log("edsger")
        branches = {n: world.branch(n) for n in [*everyone, "coordinator"]}
        check_same(branches)
        check_reduced(world, branches["ada"])
        for name in everyone:
            assert "differs from the state" not in world.log(name), world.logs(name)

        # Others' updates were never stored whole here: only slices, which are removed once the round is decided.
        # (Of the last round or two they may lie there yet.)
        def foreign() -> set[int]:
            held = held_whole(world, "ada")
            return {c.record.body.round for c in branches["ada"].path for u in c.record.body.updates
                    if u.author != world.key("ada") and bytes(u.body.blob) in held}  # fmt: skip

        newest = branches["ada"].height - 2
        await world.until("no old update of others is held", lambda: all(r >= newest for r in foreign()))
        losses = [[u.body.loss for u in c.record.body.updates] for c in branches["ada"].path]
        assert max(losses[-1]) < min(losses[0])
        await asyncio.to_thread(world.stop, *everyone, "coordinator")
    assert world.left == ([], [])
