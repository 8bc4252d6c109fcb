"""A node's training data: what is damaged on its disk comes again from the others, and training goes on."""

from __future__ import annotations

from tests.support.node_world import TIMERS, NodeWorld


async def test_a_shard_that_is_damaged_is_fetched_again_and_training_goes_on(tmp_path, caplog):
    caplog.set_level("INFO")
    w = NodeWorld(tmp_path, round={"target_tokens": 512, "max_update_tokens": 8192, **TIMERS})
    try:
        w.start("ada"), w.start("grace")
        await w.rounds(["ada", "grace"], 1)
        path = w.nodes["ada"].store.path(w.spec.data.train[0].name)
        await w.kill("ada")
        right = path.read_bytes()
        path.write_bytes(bytes([right[0] ^ 1]) + right[1:])
        ada = w.start("ada")
        await w.until("the shard is here again", lambda: "is here again: training goes on" in caplog.text)
        assert path.read_bytes() == right
        assert "was damaged" in caplog.text and "is fetched from members again" in caplog.text
        await w.until("it trains", lambda: ada.snapshot().trained_windows > 0)
    finally:
        await w.close()
