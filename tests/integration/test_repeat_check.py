"""A check is repeated by an observer without admission: real nodes and trainers, and a real auditor's process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from cairn.update_audit import RepeatedCheck, find_update, follow, lines, make_check, take_held
from peer.channel import UpdateMade
from peer.node.audit_process import AuditProcess
from peer.node.enrollment import Enrollment
from peer.node.options import NodeOptions
from peer.store import Store
from protocol.codec import make_codec
from protocol.message_codec import MessageDecoder
from protocol.messages import AuditCheck
from protocol.spec import RunSpec
from tests.support.node_world import TIMERS, NodeWorld, address_of, replaced
from tests.support.specs import OWNER, identity
from tests.support.trainer_world import BATCH, WINDOW
from tests.support.waiting import LIMIT

NAMES = ("ada", "grace", "noisy")
LIAR = "noisy"


def with_random_signs(spec: RunSpec, made: UpdateMade) -> UpdateMade:
    """Return the update with signs of chance, and the norms that it had."""
    codec = make_codec(spec.codec, spec.model.layout)
    values = {t.name: torch.zeros(t.shape) for t in codec.layout.tensors}
    codec.add_to(made.blob_path.read_bytes(), values)
    signs = {n: v.abs() * (torch.randint(0, 2, v.shape) * 2 - 1) for n, v in values.items()}
    return replaced(made, bytes(codec.encode(signs)))


async def repeat(world: NodeWorld, checks: Sequence[tuple[int, str, AuditCheck]]) -> list[RepeatedCheck]:
    """Make checks of updates, by round and author, as a stranger."""
    home = world.folder / "stranger"
    home.mkdir()
    store = Store(home / "store", 1 << 40)
    decoder = MessageDecoder(world.spec.run_id, OWNER.key)
    ways_in = [address_of(world.key(n)) for n in NAMES]
    membership = Enrollment(identity("stranger"), world.spec, store, None, "", b"", ways_in)
    node = world.build(membership, NodeOptions(home, observer=True, device="cpu"))
    world.run("stranger", node, store)
    await node.started(world.running["stranger"])
    found = []
    for round_, author, check in checks:
        await follow(node, world.running["stranger"], round_)
        audited = find_update(node.chain, decoder, round_, str(world.key(author)))
        if author == LIAR:  # as on the machine of a member
            await asyncio.to_thread(take_held, node, audited, check, world.folder / "ada" / "store")
            assert store.has(audited.update.body.blob)
        found.append(await asyncio.wait_for(make_check(node, audited, check, AuditProcess()), 2 * LIMIT))
    assert not node.network.is_admitted(world.key("stranger"))
    return found


@pytest.mark.long
async def test_a_stranger_finds_the_honest_update_again_and_not_the_lie(tmp_path):
    world = NodeWorld(
        tmp_path,
        round={"target_tokens": 10 * BATCH * WINDOW, "max_update_tokens": 40 * BATCH * WINDOW, **TIMERS},
        codec={"kind": "sign", "beta": 0.0},
        audit={"replayable": True},
        checkpoint={"every": 4, "keep": 50},
    )
    try:
        for name in NAMES:
            world.start(name)
        await world.until("all have trainers", lambda: all(world.key(n) in world.trainers for n in NAMES))
        world.trainer(LIAR).alter = lambda made: with_random_signs(world.spec, made)

        def rounds_of(name: str) -> list[int]:
            key = world.key(name)
            return [c.record.body.round for c in world.path("ada") if key in c.record.body.contributors]

        await world.until("some rounds by all", lambda: min(len(rounds_of(n)) for n in NAMES) >= 3)
        honest, lie = rounds_of("ada")[2], rounds_of(LIAR)[2]
        good, bad = await repeat(world, [(honest, "ada", "replay"), (lie, LIAR, "replay")])
        assert good.passed and {s.name: s.value > 0.99 for s in good.scores} == {"scale": True, "signs": True}
        shown = lines(good, world.spec.owner_key)
        assert shown[-1] == "result    passed" and str(world.key("ada")) in shown[0]
        signs = next(s for s in bad.scores if s.name == "signs")
        assert not bad.passed and signs.value < 0.6
        assert lines(bad, world.spec.owner_key)[-1] == "result    FAILED"
    finally:
        await world.close()
