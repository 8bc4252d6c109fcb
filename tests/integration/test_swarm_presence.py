"""Members find each other in the DHT by signed heartbeats; forged, foreign, stale and oversized records get nowhere."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.utils import MSGPackSerializer

from peer.swarm import SwarmLimits
from peer.swarm.libp2p import dht
from peer.swarm.libp2p.dht import MAX_MEMBERS, HeartbeatValidator, members_key, unpack
from peer.swarm.rate_limiter import CallLimits
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.ids import RunId, sha256
from protocol.message_codec import KeySigner
from protocol.messages import Goodbye
from tests.support.swarm_world import RUN, Member, identity, members
from tests.support.waiting import LIMIT

KEY = DHTID.generate(members_key(RUN))


class Author(Member):
    """Signs heartbeats; no store, no network."""

    def __init__(self, who: Identity):
        self.identity = who
        self.key = who.key


def record(author: Author, *, sequence: int = 1, life: float = 60, now: float = 1000.0, **changes: Any) -> DHTRecord:
    fields: dict[str, Any] = {
        "key": KEY.to_bytes(),
        "subkey": MSGPackSerializer.dumps(author.key.hex()),
        "value": MSGPackSerializer.dumps(author.heartbeat(sequence)),
        "expiration_time": now + life,
    }
    return DHTRecord(**(fields | changes))


def validator(now: float = 1000.0) -> HeartbeatValidator:
    return HeartbeatValidator(RUN, now=lambda: now)


def test_a_members_own_heartbeat_is_accepted_again_and_again():
    v = validator()
    assert v.validate(record(Author(identity(1))))
    assert v.validate(record(Author(identity(1))))
    assert v.validate(record(Author(identity(1)), sequence=2))


def test_a_captured_heartbeat_that_lasts_longer_keeps_its_author_out_no_longer_than_it_lasts():
    now = [1000.0]
    v = HeartbeatValidator(RUN, now=lambda: now[0])
    author = Author(identity(1))
    captured, admitted = record(author, sequence=1), 0
    for n in range(2, 42):  # each 15 s a newer one of the author's, and the old one again
        assert v.validate(replace(captured, expiration_time=now[0] + 119)) is (n == 2)
        admitted += v.validate(record(author, sequence=n, now=now[0]))
        now[0] += 15
    assert admitted > 30


def forgeries() -> dict[str, DHTRecord]:
    a, b = Author(identity(1)), Author(identity(2))
    good = a.heartbeat()
    other_run = RunId(b"o" * 32)
    goodbye = KeySigner(a.identity).sign(Goodbye(RUN, 1)).encoded
    dumps = MSGPackSerializer.dumps
    return {
        "another's key": record(a, subkey=dumps(b.key.hex())),
        "no subkey": record(a, subkey=b""),
        "a subkey that is bytes": record(a, subkey=dumps(a.key.hex().encode())),
        "an endless subkey": record(a, subkey=b"\xa1" * 5000),
        "a changed byte": record(a, value=dumps(good[:-1] + bytes([good[-1] ^ 1]))),
        "another DHT key": record(a, key=DHTID.generate("x").to_bytes()),
        "another run": record(a, value=dumps(a.heartbeat(run=other_run))),
        "another kind": record(a, value=dumps(goodbye)),
        "too long a life": record(a, life=121),
        "decades": record(a, life=1e9),
        "infinity": record(a, expiration_time=float("inf")),
        "no time": record(a, expiration_time=float("nan")),
        "expired": record(a, life=-10),
        "too big": record(a, value=dumps(a.heartbeat(addresses=["x" * 199] * 16, known_headers=tuple(range(2000))))),
        "nothing": record(a, value=b""),
        "text": record(a, value=dumps("x")),
        "a map": record(a, value=dumps({"a": 1})),
        "a wrong length": record(a, value=b"\xc5\xff\xff" + good),
        "bin 32": record(a, value=b"\xc6\x00\x00" + len(good).to_bytes(2, "big") + good),
        "deep nesting": record(a, value=b"\x91" * 10_000),
    }


@pytest.mark.parametrize("what", forgeries())
def test_a_forged_record_is_refused(what):
    v = validator()
    assert not v.validate(forgeries()[what])
    assert v.validate(record(Author(identity(1))))  # and the real one is still taken


def test_an_older_heartbeat_does_not_replace_a_newer_one_until_that_has_gone():
    clock = [1000.0]
    v = HeartbeatValidator(RUN, now=lambda: clock[0])
    a = Author(identity(1))
    assert v.validate(record(a, sequence=5))
    assert not v.validate(record(a, sequence=4, life=119))
    clock[0] = 1100.0
    assert v.validate(record(a, sequence=4, now=1100.0))


@pytest.mark.parametrize("bound", ["MAX_MEMBERS", "MAX_TOTAL"])
def test_the_table_is_bounded_and_has_room_again_when_records_expire(monkeypatch, bound):
    crowd = [Author(Identity(sha256(b"%d" % n))) for n in range(25)]
    monkeypatch.setattr(dht, bound, 20 if bound == "MAX_MEMBERS" else 20 * len(record(crowd[0]).value))
    clock = [1000.0]
    v = HeartbeatValidator(RUN, now=lambda: clock[0])
    assert [v.validate(record(a)) for a in crowd] == [True] * 20 + [False] * 5
    assert v.validate(record(crowd[0], sequence=2))
    clock[0] = 1200.0
    assert v.validate(record(crowd[-1], now=1200.0))
    assert [v.validate(record(a, now=1200.0)) for a in crowd[:-1]] == [True] * 19 + [False] * 5
    assert MAX_MEMBERS * 700 > 2**21  # at the usual size of a heartbeat it is the bytes that bound the table


def test_unpack_takes_bytes_and_nothing_else():
    for data in (b"", b"x", b"x" * 255, b"x" * 256, b"x" * 65535):
        assert unpack(MSGPackSerializer.dumps(data)) == data


async def test_members_publish_and_everyone_discovers_all_of_them(tmp_path):
    async with members(4, tmp_path) as all_four:
        for m in all_four:
            assert await m.swarm.publish(m.heartbeat(), 60)
        expected = sorted(m.heartbeat() for m in all_four)
        for m in all_four:
            assert sorted(await m.swarm.discover()) == expected
            assert m.warnings == []
        a, b = all_four[:2]
        assert await a.swarm.publish(a.heartbeat(2), 60)
        assert a.heartbeat(2) in await b.swarm.discover() and a.heartbeat(1) not in await b.swarm.discover()


async def test_a_lone_peer_publishes_to_itself_without_a_warning(tmp_path):
    async with members(1, tmp_path) as (a,):
        assert await a.swarm.publish(a.heartbeat(), 60)
        assert await a.swarm.discover() == [a.heartbeat()]
        assert a.warnings == []


async def test_a_hostile_node_can_neither_store_forgeries_nor_hide_members(tmp_path):
    async with members(3, tmp_path) as (a, b, liar):
        for m in (a, b):
            assert await m.swarm.publish(m.heartbeat(3), 60)
        dht = liar.swarm.presence.node
        now = time.time()
        dumps = MSGPackSerializer.dumps
        big = Author(identity(77))
        for subkey, value, until in [
            (a.key.hex(), dumps(liar.heartbeat(9)), now + 60),
            (a.key.hex(), dumps(a.heartbeat(9)[:-1] + b"x"), now + 60),
            (a.key.hex(), dumps(a.heartbeat(2)), now + 100),  # replayed, to outlive the newer one
            (liar.key.hex(), dumps(liar.heartbeat()), now + 1e9),
            (liar.key.hex(), b"\x00" * 100_000, now + 60),
            (big.key.hex(), dumps(b"x" * 20_000), now + 60),
            (None, dumps(liar.heartbeat()), now + 60),
        ]:
            for victim in (a, b):
                answer = await dht.protocol.call_store(
                    PeerID(victim.key.libp2p_id), keys=[KEY], values=[value], expiration_time=until, subkeys=[subkey]
                )
                assert not answer or not any(answer)
        # The liar keeps records in its own storage, unchecked, and hands them out with a far later expiration:
        for subkey, value in [(a.key.hex(), dumps(a.heartbeat(1))), (b.key.hex(), dumps(b"rubbish")), ("x", b"\xff")]:
            dht.protocol.storage.store(KEY, value, now + 1e8, subkey=subkey)
        assert sorted(await a.swarm.discover()) == sorted([a.heartbeat(3), b.heartbeat(3)])
        dht.protocol.storage.store(KEY, b"\xd4" * 1000, now + 1e9)  # and what is no dictionary at all
        assert sorted(await b.swarm.discover()) == sorted([a.heartbeat(3), b.heartbeat(3)])


async def test_a_call_to_the_dht_names_one_key_and_strangers_are_sent_little(tmp_path):
    limits = SwarmLimits(calls=CallLimits(strangers_answer_bytes_per_second=1))
    async with members(2, tmp_path, limits=limits) as (a, b):
        assert await a.swarm.publish(a.heartbeat(), 60)
        protocol = b.swarm.presence.node.protocol
        stub = protocol.get_stub(PeerID(a.key.libp2p_id))

        async def find(keys: int) -> Any:
            request = dht.dht_pb2.FindRequest(keys=[KEY.to_bytes()] * keys, peer=protocol.node_info)
            return await stub.rpc_find(request, timeout=LIMIT)

        with pytest.raises(P2PHandlerError, match="names 2 keys: at most 1"):
            await find(2)
        for _ in range(3):
            await find(1)
        a.strangers = {b.key}
        await find(1)
        with pytest.raises(P2PHandlerError, match="strangers ask for too much"):
            await find(1)


async def test_a_whole_table_is_refused_unread_and_a_record_counts_as_work(tmp_path, monkeypatch):
    async with members(2, tmp_path) as (a, b):
        protocol, until = b.swarm.presence.node.protocol, time.time() + 60
        table = DictionaryDHTValue()
        for author in (Author(Identity(sha256(b"%d" % n))) for n in range(50)):
            table.store(author.key.hex(), MSGPackSerializer.dumps(author.heartbeat()), until)
        costs: list[int] = []
        monkeypatch.setattr(a.daemon.limiter, "charge", lambda sender, size, *, work: costs.append(size))
        assert await protocol.call_store(PeerID(a.key.libp2p_id), [KEY], [table], until) == [False]
        assert not a.swarm.presence.node.protocol.storage.get(KEY) and not costs
        assert await b.swarm.publish(b.heartbeat(), 60) and len(costs) == 1 and costs[0] > 4096


def nested(levels: int) -> bytes:
    """Return a value that hivemind's reader unpacks by as many nested calls of C code: a few hundred end a process."""
    packed = b"\xc0"
    for _ in range(levels):
        packed = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + packed))
    return packed


async def test_values_that_nest_deeply_end_nobody_who_is_sent_them(tmp_path):
    async with members(2, tmp_path) as (a, b):
        protocol = b.swarm.presence.node.protocol
        stub, until = protocol.get_stub(PeerID(a.key.libp2p_id)), time.time() + 60
        for subkey in (b"", MSGPackSerializer.dumps(None), nested(3000)):
            request = dht.dht_pb2.StoreRequest(
                keys=[KEY.to_bytes()], subkeys=[subkey], values=[nested(3000)], expiration_time=[until],
                in_cache=[False], peer=protocol.node_info,
            )  # fmt: skip
            assert list((await stub.rpc_store(request, timeout=LIMIT)).store_ok) == [False]
        cached = dht.dht_pb2.StoreRequest(
            keys=[KEY.to_bytes()], subkeys=[MSGPackSerializer.dumps(b.key.hex())], in_cache=[True],
            values=[MSGPackSerializer.dumps(b.heartbeat())], expiration_time=[until], peer=protocol.node_info,
        )  # fmt: skip
        assert list((await stub.rpc_store(cached, timeout=LIMIT)).store_ok) == [False], "it would hide all others"
        named = dht.dht_pb2.PingRequest(peer=dht.dht_pb2.NodeInfo(node_id=bytes(21)))
        with pytest.raises(P2PHandlerError, match="something else than its id"):
            await stub.rpc_ping(named, timeout=LIMIT)
        assert await a.swarm.publish(a.heartbeat(), 60) and await b.swarm.discover() == [a.heartbeat()]


def packed(items: list[Any]) -> bytes:
    """Return a dictionary as hivemind packs it."""
    return msgpack.packb(msgpack.ExtType(dht.DICTIONARY, msgpack.packb([9, 1.0, items])))


def test_a_dictionary_is_read_as_hivemind_packs_it():
    table = DictionaryDHTValue()
    for n in range(3):
        table.store(str(n), b"value %d" % n, time.time() + 1000)
    assert dht.unpack_records(MSGPackSerializer.dumps(table)) == [b"value 0", b"value 1", b"value 2"]
    assert dht.unpack_records(packed([["a", b"1", 1.0], ["b", None, 1.0], ["c", 3, 1.0]])) == [b"1"]


@pytest.mark.parametrize(
    "answer",
    [b"", b"\xc0", nested(3000), msgpack.packb(msgpack.ExtType(dht.DICTIONARY, nested(3000))), b"\x91" * 10**6,
     msgpack.packb(msgpack.ExtType(dht.DICTIONARY, b"\x91" * 10**6)), packed([["a", b"1"]]), packed([1]),
     packed([["a", b"", 1.0]] * (MAX_MEMBERS + 1)), msgpack.packb({"a": 1}), msgpack.packb([9, 1.0, []]),
     packed([["a", b"1" * 2**20, 1.0]] * 3), packed([["a", [b"2"], 1.0]]), packed([["a", b"1", [[]] * 9]])],
    ids=["nothing", "nil", "nested", "nested inside", "arrays", "arrays inside", "a pair", "a number", "too many",
         "a map", "a list", "too long", "a list for a value", "a list for a time"],
)  # fmt: skip
def test_what_is_no_dictionary_of_bounded_records_is_refused(answer: bytes):
    with pytest.raises(MalformedError):
        dht.unpack_records(answer)


NAME = DHTID.generate("a node").to_bytes()


def found(names: list[bytes], peers: list[bytes], *, results: int = 1, name: bytes = NAME) -> Any:
    one = dht.dht_pb2.FindResult(nearest_node_ids=names, nearest_peer_ids=peers)
    return dht.dht_pb2.FindResponse(results=[one] * results, peer=dht.dht_pb2.NodeInfo(node_id=name))


def test_an_answer_that_names_nodes_by_anything_else_than_their_ids_is_refused():
    """hivemind writes each name in base 58: a megabyte takes half an hour, without a pause."""
    other, name = identity(9).key, DHTID.generate().to_bytes()
    for answer in [
        found([name], [bytes(10**6)]), found([name], [other.libp2p_id[:-1]]), found([name * 2], [other.libp2p_id]),
        found([name] * 21, [other.libp2p_id] * 21), found([name], []), found([name], [other.libp2p_id], results=2),
        found([], [], results=0), found([], [], name=b""), found([], [], name=NAME + b"x"),
    ]:  # fmt: skip
        with pytest.raises(MalformedError):
            dht.read_answer(answer)
    good = dht.read_answer(found([name], [other.libp2p_id]))
    assert good.neighbours == {PeerID(other.libp2p_id): DHTID.from_bytes(name)}
    assert good.node_id == DHTID.from_bytes(NAME) and good.packed == b""


class OneNode:
    """Our node of the DHT, which has no records and knows one other: that one gives these."""

    def __init__(self, values: list[bytes]):
        table = DictionaryDHTValue()
        for n, value in enumerate(values):
            table.store(str(n), value, time.time() + 1000)
        self.answer = found([], [])
        self.answer.results[0].type = dht.dht_pb2.FOUND_DICTIONARY
        self.answer.results[0].value = MSGPackSerializer.dumps(table)
        other, self.peer_id = (PeerID(identity(n).key.libp2p_id) for n in (8, 9))
        self.protocol, self.storage, self.node_info, self.wait_timeout = self, self, dht.dht_pb2.NodeInfo(), 1.0
        self.routing_table = RoutingTable(DHTID.generate("us"), bucket_size=20, depth_modulo=5)
        self.routing_table.add_or_update_node(DHTID.from_bytes(NAME), other)

    def get(self, key: DHTID) -> None:
        return None

    def get_stub(self, peer: PeerID) -> OneNode:
        return self

    async def rpc_find(self, request: Any, timeout: float) -> Any:
        return self.answer

    async def update_routing_table(self, node_id: DHTID | None, peer: PeerID, responded: bool) -> None:
        assert responded and node_id is not None


async def test_of_one_nodes_records_those_are_looked_at_that_are_known_and_some_others(monkeypatch):
    monkeypatch.setattr(dht, "NEW_OF_A_NODE", 5)
    values = [record(Author(identity(100 + i))).value for i in range(50)]
    node, seen = OneNode(values), set[bytes]()
    for _ in range(100):
        checks = validator()
        checks.author(values[49])
        here = dht.DhtPresence(cast(Any, node), checks, RUN, lambda text: None)
        found = await here.discover()
        assert unpack(values[49]) in found and len(found) == 6
        seen.update(found)
    assert len(seen) > 40, "not always the same"


async def test_a_search_ends_though_nodes_keep_it_waiting_and_what_others_gave_counts(monkeypatch):
    monkeypatch.setattr(dht, "SEARCH_SECONDS", 0.5)
    values = [record(Author(identity(100))).value]
    node, answering = OneNode(values), PeerID(identity(8).key.libp2p_id)
    silent = [Identity(sha256(b"%d" % n)).key for n in range(20)]
    for key in silent:
        node.routing_table.add_or_update_node(DHTID.generate(key.hex()), PeerID(key.libp2p_id))
    answer = node.answer

    def get_stub(peer: PeerID) -> Any:
        async def rpc_find(request: Any, timeout: float) -> Any:
            return answer if peer == answering else await asyncio.Event().wait()

        return SimpleNamespace(rpc_find=rpc_find)

    monkeypatch.setattr(node, "get_stub", get_stub)
    monkeypatch.setattr(dht, "DRAWN", 21)  # so that the one that answers is asked in any case
    monkeypatch.setattr(dht, "ASKED_AT_ONCE", 21)
    here = dht.DhtPresence(cast(Any, node), validator(), RUN, lambda text: None)
    before = asyncio.all_tasks()
    assert await here.discover() == [unpack(values[0])]
    assert asyncio.all_tasks() == before, "no call outlives its search"


@pytest.mark.parametrize(("ahead", "says"), [(-600, "600 s behind"), (-70, "70 s behind"), (70, "70 s ahead of")])
async def test_a_wrong_clock_is_told_to_the_user_with_its_offset(tmp_path, monkeypatch, ahead, says):
    async with members(3, tmp_path) as (a, b, c):
        monkeypatch.setattr(dht, "time", SimpleNamespace(time=lambda: time.time() + ahead))
        assert not await c.swarm.publish(c.heartbeat(), 60)
        assert len(c.warnings) == 1 and says in c.warnings[0] and "NTP" in c.warnings[0]
        assert c.swarm.clock_offset == pytest.approx(-ahead, abs=1)
        monkeypatch.undo()
        assert await c.swarm.publish(c.heartbeat(), 60)


@pytest.mark.parametrize("ahead", [-50, 50])
async def test_a_clock_that_is_less_than_a_minute_off_keeps_nobody_from_being_found(tmp_path, monkeypatch, ahead):
    async with members(3, tmp_path) as (a, b, c):
        monkeypatch.setattr(dht, "time", SimpleNamespace(time=lambda: time.time() + ahead))
        assert await c.swarm.publish(c.heartbeat(), 60) and not c.warnings


async def test_members_that_do_not_answer_are_a_warning_not_an_error(tmp_path):
    async with members(2, tmp_path) as (a, b):
        await b.swarm.stop()
        assert not await a.swarm.publish(a.heartbeat(), 60)
        assert "others may not find this peer" in a.warnings[0]
        assert await a.swarm.discover() == [a.heartbeat()]
