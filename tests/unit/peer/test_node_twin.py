"""Two machines with one identity.key report each other; one that comes back under another name is no second one."""

from __future__ import annotations

from dataclasses import replace

from protocol.message_codec import KeySigner
from protocol.wire import swarm_pb2 as wire
from tests.support.node_world import TIMERS, NodeWorld
from tests.support.specs import admission, identity

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


async def test_who_comes_back_under_another_name_in_an_undecided_round_announces_no_second_header(tmp_path, caplog):
    w = NodeWorld(tmp_path, round={"target_tokens": 512, "max_update_tokens": 8192, **TIMERS, "max_seconds": 600})
    try:
        w.start("ada"), w.start("grace")
        await w.rounds(["ada", "grace"], 1)
        w.internet.withheld = lambda giver, blob: giver == w.key("ada")  # so that the round is not decided
        await w.until("both have announced", lambda: len(w.announced("ada") & w.announced("grace")) == 2)
        before, number = w.announced("ada"), w.nodes["ada"].snapshot().round
        await w.kill("ada")
        again = w.start("ada")
        again.membership.admission = admission(w.spec, identity("ada"), name="bob").encoded
        w.internet.there.pop(w.key("grace"))  # it says nothing of the first header
        # Alone, it may decide the round at once.
        await w.until("it has announced again", lambda: bool(w.announced_in("ada", number)))
        assert w.announced_in("ada", number) < before
        w.internet.there[w.key("grace")] = w.nodes["grace"].network.swarm
        w.internet.withheld = lambda giver, blob: False
        await w.rounds(["ada", "grace"], 1)
        assert "announced two updates" not in caplog.text and REPORT not in caplog.text
    finally:
        await w.close()
