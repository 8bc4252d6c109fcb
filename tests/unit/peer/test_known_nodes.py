"""The DHT's routing table stays small whatever ids and keys strangers make, and nobody is sent the members' records."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import get_dht_time

from peer.swarm.libp2p.dht import DhtPresence, dht_pb2, members_key
from protocol.identity import Identity
from protocol.ids import RunId, sha256

RUN = RunId(b"r" * 32)
KEY = DHTID.generate(members_key(RUN))


def peer(n: int) -> PeerID:
    return PeerID(b"\x00\x24\x08\x01\x12\x20" + sha256(b"%d" % n))


class Daemon:
    """A daemon that counts the calls through it: all peers accept stores, and those in `answering` answer pings."""

    def __init__(self):
        self.peer_id = PeerID(Identity(bytes(32)).key.libp2p_id)
        self.called: Counter[str] = Counter()
        self.pinged: list[PeerID] = []
        self.answering: dict[PeerID, DHTID] = {}

    async def add_protobuf_handler(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def call_protobuf_handler(self, to: PeerID, name: str, request: Any, answer: type) -> Any:
        kind = name.split(".")[-1]
        self.called[kind] += 1
        if kind == "rpc_store":
            return dht_pb2.StoreResponse(store_ok=[True])
        self.pinged.append(to)
        if to not in self.answering:
            raise P2PDaemonError("nobody there")
        node = dht_pb2.NodeInfo(node_id=self.answering[to].to_bytes())
        return dht_pb2.PingResponse(peer=node, dht_time=get_dht_time(), available=False)


class World:
    """A node of the DHT that holds a record."""

    def __init__(self, daemon: Daemon, presence: DhtPresence):
        self.daemon = daemon
        self.protocol = presence.node.protocol
        self.table = self.protocol.routing_table
        self.protocol.storage.store(KEY, b"a record", get_dht_time() + 60, subkey="a member")

    async def ping(self, node_id: int, sender: PeerID) -> None:
        """Receive a ping, and wait until all that it causes is over."""
        request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=DHTID(node_id).to_bytes()), validate=False)
        await self.protocol.rpc_ping(request, P2PContext("ping", self.daemon.peer_id, sender))
        for _ in range(5):
            await asyncio.sleep(0)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    def check(self) -> None:
        table = self.table
        for bucket in table.buckets:
            assert len(bucket.nodes_to_peer_id) <= 20 and not bucket.replacement_nodes
            assert bucket.nodes_requested_for_ping <= set(bucket.nodes_to_peer_id)
        assert {p: node for node, p in table.uid_to_peer_id.items()} == table.peer_id_to_uid


@pytest.fixture
async def world() -> World:
    daemon = Daemon()
    return World(daemon, await DhtPresence.start(cast(Any, daemon), RUN, lambda text: None))


async def test_five_thousand_ids_of_one_key_are_one_node_and_send_nobody_the_records(world: World):
    for n in range(5000):
        await world.ping(DHTID.generate(b"%d" % n), peer(1))
    assert world.table.uid_to_peer_id == {DHTID.generate(b"4999"): peer(1)}
    assert not world.daemon.called
    world.check()


async def test_ids_of_fresh_keys_fill_buckets_and_no_more(world: World):
    own = int(world.protocol.node_id)
    for n in range(2000):
        near = own ^ int(DHTID.generate(b"%d" % n)) >> n % 40  # as many at each distance from us
        world.daemon.answering[peer(n)] = DHTID(near)
        await world.ping(near, peer(n))
    assert len(world.table.uid_to_peer_id) > 500 and len(world.table.buckets) <= 993
    assert not world.daemon.called["rpc_store"]
    world.check()


async def test_one_id_at_a_time_belongs_to_one_key_and_a_key_that_restarts_has_its_new_one(world: World):
    await world.ping(5, peer(1))
    await world.ping(5, peer(2))
    assert world.table.uid_to_peer_id == {5: peer(1)}
    await world.ping(6, peer(1))
    await world.ping(5, peer(2))
    assert world.table.uid_to_peer_id == {6: peer(1), 5: peer(2)}
    world.check()


async def test_in_a_full_bucket_the_oldest_stays_if_it_answers_and_gives_way_if_not(world: World):
    answering, far = world.daemon.answering, int(world.protocol.node_id) ^ 1 << 159
    for n in range(20):
        answering[peer(n)] = DHTID(far ^ n)
        await world.ping(far ^ n, peer(n))
    await world.ping(far ^ 20, peer(20))
    assert world.daemon.pinged == [peer(0)] and peer(0) in world.table and peer(20) not in world.table
    del answering[peer(1)]
    await world.ping(far ^ 20, peer(20))
    assert world.daemon.pinged == [peer(0), peer(1)] and peer(1) not in world.table
    await world.ping(far ^ 20, peer(20))
    assert len(world.table.uid_to_peer_id) == 20 and peer(20) in world.table
    world.check()


async def test_an_id_on_the_boundary_of_two_buckets_is_removed_too(world: World):
    await world.ping(1 << 159, peer(0))
    for n in range(1, 40):
        await world.ping((1 << 159) + n * (-1) ** n, peer(n))
    assert len(world.table.buckets) > 1
    await world.ping(7, peer(0))
    assert not any(1 << 159 in bucket.nodes_to_peer_id for bucket in world.table.buckets)
    world.check()
