"""Two machines with one identity.key: their heartbeats reach each other through the DHT, and each reports the other."""

from __future__ import annotations

from dataclasses import replace

from protocol.message_codec import KeySigner
from protocol.wire import swarm_pb2 as wire
from tests.support.node_world import TIMERS, NodeWorld
from tests.support.specs import identity

REPORT = "copy of this one's key"


async def test_another_machine_with_a_copy_of_our_key_is_reported_by_its_heartbeat(tmp_path, caplog):
    w = NodeWorld(tmp_path, round={"target_tokens": 512, "max_update_tokens": 8192, **TIMERS})
    try:
        ada, _ = w.start("ada"), w.start("grace")
        await w.rounds(["ada", "grace"], 1)
        own = ada.network.relay.own_heartbeat
        assert own is not None and REPORT not in caplog.text
        key = KeySigner(identity("ada"))
        twins = [key.sign(replace(own.body, sequence=own.body.sequence + ahead)).encoded for ahead in (60_000, 61_000)]
        through = w.internet.there[w.key("grace")]
        await through.send(w.key("ada"), wire.Packet(messages=[own.encoded, *twins]))
        await w.until("it is reported", lambda: REPORT in caplog.text)
    finally:
        await w.close()
