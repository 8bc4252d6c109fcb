"""Whole nodes whose rounds are reduced: they go on when one dies, let others in, and hold the same bits."""

from __future__ import annotations

import pytest

from protocol.reduce_plan import shard_count
from protocol.rounds.policy import RoundPolicy
from tests.support.long_cases import long_cases
from tests.support.node_world import TIMERS, NodeWorld, spoilt

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
"""With the codec `none`, an update of this small model has more than five chunks."""

WIDER = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
"""With the codec `int8` likewise."""

REDUCE = {"target_tokens": 1024, "max_update_tokens": 8192, "exchange": "reduce", **TIMERS}
PATIENT = {"max_seconds": 60, "exchange_seconds": 20, "patience_seconds": 20, "member_seconds": 10}
"""Nobody is late on a busy machine."""


@pytest.fixture
async def world(tmp_path, monkeypatch):
    made: list[NodeWorld] = []

    def make(**fields) -> NodeWorld:
        made.append(NodeWorld(tmp_path, **fields))
        return made[-1]

    yield make
    for w in made:
        await w.close()


def states(w: NodeWorld) -> dict[str, dict[str, str]]:
    """Return, by record, the state that each node holds after it."""
    found: dict[str, dict[str, str]] = {}
    for name, task in w.running.items():
        if not task.done() and (s := w.nodes[name].snapshot()).state:
            found.setdefault(s.head, {})[name] = s.state
    return found


async def test_rounds_are_reduced_by_committees_also_while_peers_come_and_go(world):
    w = world(model=WIDE, codec={"kind": "none"}, round=REDUCE | {"committee": 2}, checkpoint={"every": 3, "keep": 1})
    four = ["ada", "alan", "grace", "edsger"]
    for name in four[:3]:
        w.start(name)
    await w.rounds(four[:3], 4)
    for c in w.path("ada"):
        updates = c.record.body.updates
        assert len(c.shards) == shard_count(len(updates), updates[0].body.blob_size)
    assert max(len(c.shards) for c in w.path("ada")) == 3
    await w.kill("alan")
    await w.rounds(["ada", "grace"], 2)
    w.start("alan")
    w.start("edsger")
    now = w.nodes["ada"].snapshot().round
    await w.until("all four contribute", lambda: all(w.contributed(name, now) for name in four))
    await w.rounds(four, 1)
    for same in states(w).values():
        assert len(set(same.values())) == 1
    # Fetched data of others' updates is gone when their round is over; the parts stay.
    for name in four:
        store = w.nodes[name].store
        foreign = {u.body.blob for c in w.path(name) for u in c.record.body.updates if u.author != w.key(name)}
        await w.until(
            f"{name} keeps nothing of others' updates",
            lambda n=name, f=foreign, s=store: not (f - w.announced(n)) & (w.slices(n) | s.blobs().keys()),
        )
        assert {part for c in w.path(name)[-2:] for part in c.shards} <= store.blobs().keys()


@pytest.mark.parametrize(
    "codec",
    [
        {"kind": "sign"},
        *long_cases({"kind": "sparse", "k": 256}),
        *long_cases({"kind": "int8"}),
    ],
)
async def test_small_updates_have_one_part_which_a_committee_makes_for_all(world, codec):
    w = world(codec=codec, round=REDUCE)
    names = ["ada", "alan", "grace", "edsger"]
    for name in names:
        w.start(name)
    await w.rounds(names, 3)
    await w.until("a round of all four", lambda: max(len(c.record.body.updates) for c in w.path("ada")) == 4)
    await w.rounds(names, 1)
    assert all(len(c.shards) == 1 for c in w.path("ada"))
    assert all(len(set(same.values())) == 1 for same in states(w).values())


async def test_who_withholds_its_updates_is_left_out_and_the_others_go_on(world):
    w = world(round=REDUCE | {"exchange_seconds": 2})
    for name in ("ada", "alan", "grace"):
        w.start(name)
    await w.rounds(["ada", "alan", "grace"], 1)
    w.internet.withheld = lambda giver, blob: giver == w.key("grace") and not w.is_a_part(blob)
    now = w.nodes["ada"].snapshot().round + 1
    await w.rounds(["ada", "alan"], 4)
    await w.until("ada contributes", lambda: w.contributed("ada", now) >= 2)
    assert w.contributed("grace", now) == 0


@pytest.mark.long
async def test_authors_and_committees_behind_nats_reach_each_other_by_who_hears_both(world, caplog):
    """Three behind NATs, one that all reach: half of the committees are behind NATs, and so is who they need."""
    w = world(model=WIDE, codec={"kind": "none"}, round=REDUCE | PATIENT | {"committee": 2})
    names = ["ada", "alan", "grace", "edsger"]
    w.internet.behind_nats = {w.key(name) for name in names[1:]}
    for name in names:
        w.start(name)
    await w.rounds(names, 3)
    await w.until("a round of all four", lambda: len(w.path("ada")[-1].record.body.updates) == 4)
    caplog.clear()
    now = w.nodes["ada"].snapshot().round

    def whole_without_ada() -> int:
        """Count the rounds of all four that have a committee without the one that all reach."""
        since = [c.record.body for c in w.path("ada") if c.record.body.round >= now]
        plan, chain = RoundPolicy.of(w.spec).exchange, w.nodes["ada"].chain
        dealt = (plan.committees(chain.seed(body.parent), body) for body in since if len(body.updates) == 4)
        return sum(any(w.key("ada") not in committee for committee in committees) for committees in dealt)

    await w.until("three such rounds", lambda: whole_without_ada() >= 3)
    assert "cannot get, or use, the update" not in caplog.text
    assert all(len(set(same.values())) == 1 for same in states(w).values())


async def test_an_update_that_breaks_the_rules_where_only_some_look_is_in_no_record(world, caplog):
    w = world(model=WIDER, codec={"kind": "int8"}, round=REDUCE)
    for name in ("ada", "alan", "grace", "edsger"):
        w.start(name)
    await w.until("edsger has a trainer", lambda: w.key("edsger") in w.trainers)
    w.trainer("edsger").alter = spoilt
    others = ["ada", "alan", "grace"]
    await w.rounds(others, 3)
    assert w.contributed("edsger") == 0 and all(w.contributed(name) for name in others)
    assert "breaks the codec's rules" in caplog.text
    assert all(len(set(same.values())) == 1 for same in states(w).values())
