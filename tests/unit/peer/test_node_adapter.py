"""Whole nodes of a run that trains an adapter: the base travels once, the rounds carry the adapter alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.node import base_model
from protocol.merkle import blob_digest, chunk_count
from protocol.spec import AdapterSettings
from tests.support.long_cases import long_cases
from tests.support.node_world import TIMERS, NodeWorld

ROUND = {"target_tokens": 1024, "max_update_tokens": 8192, **TIMERS}


@pytest.fixture(params=["bfloat16", *long_cases("nf4")])
async def world(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base_model, "link_from_other_runs", lambda *_: False)  # each node stands for a machine
    w = NodeWorld(
        tmp_path, adapter=AdapterSettings(rank=4, alpha=8, dtype=request.param), codec={"kind": "sign"}, round=ROUND,
        checkpoint={"every": 2, "keep": 1},
    )  # fmt: skip
    yield w
    await w.close()


async def test_peers_train_one_adapter_and_a_newcomer_fetches_the_base_from_them(world: NodeWorld):
    w, base = world, blob_digest(world.base)
    for name in ("ada", "alan"):
        w.start(name)
    await w.rounds(["ada", "alan"], 3)
    w.start("grace")
    now = w.nodes["ada"].snapshot().round
    await w.until("all three contribute", lambda: all(w.contributed(n, now) for n in ("ada", "alan", "grace")))
    await w.rounds(["ada", "alan", "grace"], 1)
    for name in ("alan", "grace"):
        fetched = [index for key, blob, index in w.internet.fetched if (key, blob) == (w.key(name), base)]
        assert sorted(fetched) == list(range(chunk_count(len(w.base))))
        assert w.nodes[name].store.has(base)
    states: dict[str, set[str]] = {}
    for node in w.nodes.values():
        states.setdefault(node.snapshot().head, set()).add(node.snapshot().state)
    assert all(len(same) == 1 for same in states.values())
    for trainer in w.trainers.values():
        assert trainer.ready.parameters == w.spec.model.layout.numel < len(w.base) // 10
        assert not trainer.notes
