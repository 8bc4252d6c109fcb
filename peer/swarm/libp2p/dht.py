"""Members' heartbeats in the DHT, each under its author's key: signed, bounded and short-lived.

A record is a hint that somebody may be found, never more: anybody can make keys. hivemind's Kademlia carries them. Its
caches are off and its `get` is not used, since it believes one node's answer. Here every node near the key is asked,
and their records are united, so that one liar hides nobody.

Answers are read here and not by hivemind (version 1.1.12). Its C code unpacks nested values by recursion until the
process ends. It writes names of nodes of any length in base 58, which takes half an hour for a megabyte.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import random
import statistics
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar, cast

import msgpack
from google.protobuf.message import DecodeError
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from peer.swarm.errors import short_report
from peer.swarm.libp2p.daemon import Daemon, sender_key
from protocol.bounded import BoundedDict
from protocol.envelope import open_envelope
from protocol.errors import MalformedError, ProtocolError
from protocol.ids import PeerKey, RunId, sha256
from protocol.version import PROTOCOL
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

T = TypeVar("T")

dht_pb2: Any = importlib.import_module(
    "hivemind.proto.dht_pb2"
)  # built at run time, so type checkers see an empty module

MAX_RECORD = 16 * 1024
MAX_LIFE_SECONDS = 120
MAX_SKEW_SECONDS = 3
MAX_MEMBERS = 4096
MAX_TOTAL = 2 * 1024 * 1024
"""All records together must fit one reply of the transport: 4 MiB, with room for keys and framing."""

NEW_OF_A_NODE = 512
"""Maximum number of records of one node's answer that are checked, besides those checked before.

Anybody can be a node near the key, with any records."""

NEAREST = 8
"""Nodes near the key that keep the records and are asked for them."""

REMEMBERED = 2 * MAX_MEMBERS
"""Maximum number of checked records that are not checked again."""

FRAMING = 128 * MAX_MEMBERS
"""Bytes in which an answer may exceed MAX_TOTAL: each record's key, time and lengths."""

DICTIONARY = 0x50
"""MessagePack's extension type of hivemind's dictionaries: [maximum size, newest expiration, [[key, value, until]]]."""

NEIGHBOURS = 20
"""Nodes that one answer may name: hivemind's size of a bucket."""

OFFSETS = 32
"""Peers whose clocks are compared with ours."""


def members_key(run: RunId) -> str:
    """Return the DHT key of a run's members."""
    return f"cairn/{PROTOCOL}/{run.hex()}/members"


class HeartbeatValidator(RecordValidatorBase):
    """Accepts heartbeats of this run, signed by the key that they lie under; refuses all else. Never raises.

    There are at most MAX_MEMBERS authors and MAX_TOTAL bytes at a time. A heartbeat older than its author's newest is
    refused. An attacker who fills the table with keys of its own keeps newcomers out of the DHT, not out of the swarm.
    """

    def __init__(self, run: RunId, *, now: Callable[[], float] = time.time):
        self._run = run
        self._now = now
        self._key = DHTID.generate(members_key(run)).to_bytes()
        self._verified: BoundedDict[bytes, tuple[PeerKey, int]] = BoundedDict(REMEMBERED)
        self._live: dict[PeerKey, tuple[int, int, float]] = {}  # sequence, bytes, expiration
        self._total = 0

    def validate(self, record: DHTRecord) -> bool:
        """Return whether the DHT may keep the record."""
        try:
            self._check(record)
            return True
        except (ProtocolError, DecodeError, ValueError, TypeError) as e:
            log.debug("a DHT record is refused: %s", e)
            return False

    def _check(self, record: DHTRecord) -> None:
        now = self._now()
        if record.key != self._key:
            raise MalformedError("its key is not that of this run's members")
        if len(record.value) > MAX_RECORD or len(record.subkey) > 80:
            raise MalformedError(f"its value has {len(record.value)} bytes: at most {MAX_RECORD} are accepted")
        if not now - MAX_SKEW_SECONDS <= record.expiration_time <= now + MAX_LIFE_SECONDS:
            raise MalformedError("it has expired, or would live longer than two minutes")
        author, sequence = self.author(record.value)
        if record.subkey != MSGPackSerializer.dumps(author.hex()):
            raise MalformedError("it does not lie under its author's key")
        self._admit(author, sequence, len(record.value), record.expiration_time, now)

    def knows(self, value: bytes) -> bool:
        """Return whether the value was checked before, and is remembered."""
        return sha256(value) in self._verified

    def author(self, value: bytes) -> tuple[PeerKey, int]:
        """Return the author of the heartbeat in a value, and its sequence. Raises ProtocolError, DecodeError."""
        if len(value) > MAX_RECORD:
            raise MalformedError(f"its value has {len(value)} bytes: at most {MAX_RECORD} are accepted")
        name = sha256(value)
        if (found := self._verified.get(name)) is not None:
            self._verified.move_to_end(name)
            return found
        envelope = open_envelope(unpack(value), "heartbeat", limit=MAX_RECORD)
        heartbeat = wire.Heartbeat.FromString(envelope.payload)
        if heartbeat.run != self._run:
            raise MalformedError("it is of another run")
        found = self._verified[name] = (envelope.author, heartbeat.sequence)
        return found

    def _admit(self, author: PeerKey, sequence: int, size: int, expiration: float, now: float) -> None:
        newest = self._live.get(author)
        if newest is not None and sequence < newest[0] and newest[2] >= now:
            raise MalformedError("its author has sent a newer one")
        if newest is not None and newest[2] >= max(expiration, now):
            # hivemind goes on to keep the one that expires later. It counts, and no older one is taken any more: an
            # expiration is not signed, so anybody may store a heartbeat again that lasts longer than its author's next.
            self._live[author] = (sequence, newest[1], newest[2])
            if newest[2] > expiration:
                raise MalformedError("it expires before the one that is kept")
            return
        if self._exceeds(author, size):
            for expired in [k for k, (_, _, until) in self._live.items() if until < now]:
                self._total -= self._live.pop(expired)[1]
            if self._exceeds(author, size):
                raise MalformedError("there are too many members already")
        newest = self._live.get(author)
        self._live[author] = (sequence, size, expiration)
        self._total += size - (0 if newest is None else newest[1])

    def _exceeds(self, author: PeerKey, size: int) -> bool:
        newest = self._live.get(author)
        if newest is None:
            return len(self._live) >= MAX_MEMBERS or self._total + size > MAX_TOTAL
        return self._total + size - newest[1] > MAX_TOTAL


def unpack(value: bytes) -> bytes:
    """Return the bytes in a value: MessagePack's bin 8 or bin 16, and nothing else. Raises MalformedError."""
    start = {0xC4: 2, 0xC5: 3}.get(value[0] if value else 0)
    if start is None or len(value) < start or int.from_bytes(value[1:start], "big") != len(value) - start:
        raise MalformedError("its value is not bytes")
    return value[start:]


class KnownNodes:
    """Keeps hivemind's routing table: one id for each key, at most 20 in each of at most 993 buckets, and no spares.

    A ping may state any id, and keys are free. hivemind keeps all ids, and for each new one it may send its whole table
    of records. No member needs that handover: each stores its own record again about every 15 s (DISCOVER_SECONDS of
    peer/node/network.py), at the nodes that are then nearest. Readers ask all of these.
    """

    def __init__(self, protocol: DHTProtocol):
        self._protocol = protocol
        self._table = protocol.routing_table

    async def update(self, node_id: DHTID | None, peer: PeerID, responded: bool = True) -> None:
        """Note that a node called us or answered, or that it did not. Replaces hivemind's `update_routing_table`."""
        table = self._table
        held = table.peer_id_to_uid.get(peer)
        if held is not None and (held != node_id or not responded):
            self._remove(held, peer)
        if not responded or node_id is None or table.uid_to_peer_id.get(node_id, peer) != peer:
            return
        oldest = table.add_or_update_node(node_id, peer)
        if node_id in table.buckets[table.get_bucket_index(node_id)].replacement_nodes:
            self._remove(node_id, peer)  # the bucket is full; when its oldest node is gone, the next caller gets in
        if oldest is not None:
            asyncio.create_task(self._protocol.call_ping(oldest[1]))

    def _remove(self, node_id: DHTID, peer: PeerID) -> None:
        """Remove a node from all buckets: one that hivemind splits leaves an id on the boundary in the wrong half."""
        for bucket in self._table.buckets:
            bucket.nodes_to_peer_id.pop(node_id, None)
            bucket.replacement_nodes.pop(node_id, None)
            bucket.nodes_requested_for_ping.discard(node_id)
        del self._table.uid_to_peer_id[node_id], self._table.peer_id_to_uid[peer]


def neighbours(result: Any) -> dict[DHTID, PeerID]:
    """Return the nodes that a result of `rpc_find` names. Raises MalformedError."""
    names, peers = result.nearest_node_ids, result.nearest_peer_ids
    if not len(names) == len(peers) <= NEIGHBOURS:
        raise MalformedError(f"it names {len(names)} nodes with {len(peers)} keys: at most {NEIGHBOURS} are accepted")
    if any(len(name) != DHTID.HASH_NBYTES for name in names):
        raise MalformedError("it names nodes by something else than their ids")
    keys = map(PeerKey.from_libp2p_id, peers)
    return {DHTID.from_bytes(name): PeerID(key.libp2p_id) for name, key in zip(names, keys, strict=True)}


async def ask(protocol: Any, peer: PeerID, keys: Collection[DHTID], read: Callable[[Any], T]) -> T | None:
    """Ask a node for keys, and return what `read` makes of its answer; None, with a log line, if it gives none of use.

    `read` may raise MalformedError. The answer has a result for each key.
    """
    request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys], peer=protocol.node_info)
    try:
        answer: Any = await protocol.get_stub(peer).rpc_find(request, timeout=protocol.wait_timeout)
        if len(answer.results) != len(keys):
            raise MalformedError(f"it has {len(answer.results)} results for {len(keys)} keys")
        return read(answer)
    except Exception as e:  # noqa: BLE001 - whatever a stranger's answer makes hivemind raise
        why = short_report(str(e)) or type(e).__name__
        log.info("a DHT node gave no usable answer: %s", why, extra={"file_only": True})
        return None


class Search:
    """hivemind's search for the nodes near a key, without the records that come along."""

    def __init__(self, protocol: Any):
        self._protocol = protocol

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> dict[DHTID, tuple[None, Any]] | None:
        """Return each key's nearest nodes, as a node knows them; None for no usable answer.

        Replaces hivemind's `call_find`.
        """

        def read(answer: Any) -> tuple[bytes, dict[DHTID, tuple[None, Any]]]:
            results = zip(keys, answer.results, strict=True)
            return answer.peer.node_id, {key: (None, neighbours(each)) for key, each in results}

        name, found = await ask(self._protocol, peer, keys, read) or (b"", None)
        node_id = DHTID.from_bytes(name) if len(name) == DHTID.HASH_NBYTES else None
        if found is None or node_id is not None:
            await self._protocol.update_routing_table(node_id, peer, responded=found is not None)
        return found


class DhtPresence:
    """Our node of the DHT; see `Presence` for the methods."""

    def __init__(self, node: DHTNode, validator: HeartbeatValidator, run: RunId, warn: Callable[[str], None]):
        self.node = node
        self._validator = validator
        self._name = DHTID.generate(members_key(run))
        self._warn = warn
        self._offsets: BoundedDict[PeerKey, float] = BoundedDict(OFFSETS)

    @classmethod
    async def start(cls, daemon: Daemon, run: RunId, warn: Callable[[str], None]) -> DhtPresence:
        """Begin to take part in the DHT. `warn` receives faults that the user should know of."""
        validator = HeartbeatValidator(run)
        node = await DHTNode.create(
            p2p=daemon,
            record_validator=validator,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
        )
        protocol: Any = node.protocol
        protocol.update_routing_table = KnownNodes(protocol).update  # before the first ping is processed
        protocol.call_find = Search(protocol).call_find
        return cls(node, validator, run, warn)

    @property
    def clock_offset(self) -> float | None:
        return statistics.median(self._offsets.values()) if self._offsets else None

    async def meet(self, peer: PeerKey) -> bool:
        node = self.node
        request = dht_pb2.PingRequest(peer=node.protocol.node_info, validate=False)
        began = time.time()
        try:
            reply: Any = await node.protocol.get_stub(PeerID(peer.libp2p_id)).rpc_ping(request, timeout=5)
            if len(reply.peer.node_id) != DHTID.HASH_NBYTES:
                raise MalformedError("it names itself by something else than its id")
            node_id = DHTID.from_bytes(reply.peer.node_id)
        except Exception as e:  # noqa: BLE001 - whatever a stranger's answer makes hivemind raise, AssertionError too
            log.info("peer %s does not answer in the DHT: %s", peer.short, short_report(str(e)) or type(e).__name__)
            return False
        ended = time.time()
        if ended - began < 2:  # of a slower answer the delay may exceed the clock's offset
            self._offsets.renew(peer, reply.dht_time - (began + ended) / 2)
        await node.protocol.update_routing_table(node_id, PeerID(peer.libp2p_id), responded=True)
        return True

    async def publish(self, author: PeerKey, envelope: bytes, seconds: float) -> bool:
        value = MSGPackSerializer.dumps(envelope)
        if len(value) > MAX_RECORD:
            self._warn(f"a heartbeat of {len(value)} bytes is too long for the DHT: at most {MAX_RECORD}")
            return False
        protocol = self.node.protocol
        until = time.time() + min(seconds, MAX_LIFE_SECONDS - 2 * MAX_SKEW_SECONDS)
        subkey = author.hex()
        record = DHTRecord(self._name.to_bytes(), MSGPackSerializer.dumps(subkey), value, until)
        here = protocol._validate_record(record.key, record.subkey, record.value, until) and protocol.storage.store(
            self._name, value, until, subkey=subkey
        )
        near = await self._near()
        answers = await asyncio.gather(
            *(
                protocol.call_store(peer, keys=[self._name], values=[value], expiration_time=until, subkeys=[subkey])
                for peer in near
            )
        )
        taken = sum(bool(a and a[0]) for a in answers)
        if near and not taken:
            for peer in near[:5]:
                with suppress(MalformedError):
                    await self.meet(sender_key(peer))
            self._explain_refusal(len(near), sum(a is not None for a in answers))
        return bool(taken or (here and not near))

    def _explain_refusal(self, asked: int, answered: int) -> None:
        offset = self.clock_offset
        if offset is not None and abs(offset) > MAX_SKEW_SECONDS:
            ahead = "behind" if offset > 0 else "ahead of"
            self._warn(
                f"this machine's clock is {abs(offset):.0f} s {ahead} the other members' clocks, so they do not list "
                "it: set the clock (e.g. turn on NTP: timedatectl set-ntp true)"
            )
        elif not answered:
            self._warn(f"none of {asked} members answered in the DHT: others may not find this peer until they do")
        else:
            self._warn("the members near our place in the DHT did not take our record: others may not find this peer")

    async def discover(self) -> list[bytes]:
        newest: dict[PeerKey, tuple[int, bytes]] = {}
        own = self.node.protocol.storage.get(self._name)
        near = await self._near()
        found = await asyncio.gather(*(self._find(peer) for peer in near))
        # In turn, so that one node's records do not take all places.
        turns = itertools.zip_longest(*map(self._some, found), fillvalue=None)
        theirs = (value for turn in turns for value in turn if value is not None)
        for i, value in enumerate(itertools.chain(_held(own.value if own is not None else None), theirs)):
            if i % 32 == 31:
                await asyncio.sleep(0)  # verifying takes a while: other tasks have a turn
            try:
                author, sequence = self._validator.author(value)
            except (ProtocolError, DecodeError) as e:
                log.info("a record that a DHT node gave is refused: %s", e)
                continue
            other = newest.get(author)
            if (other is None and len(newest) < MAX_MEMBERS) or (other is not None and other[0] < sequence):
                newest[author] = (sequence, unpack(value))
        return [envelope for _, envelope in newest.values()]

    def _some(self, values: list[bytes]) -> list[bytes]:
        """Return one node's values that were checked before, and NEW_OF_A_NODE others at most, drawn by chance."""
        before = [v for v in values if self._validator.knows(v)]
        others = [v for v in values if not self._validator.knows(v)]
        return before + random.sample(others, min(NEW_OF_A_NODE, len(others)))

    async def _find(self, peer: PeerID) -> list[bytes]:
        """Return the values of one node, unchecked. hivemind's own call drops all of them for one that is stale."""

        def read(answer: Any) -> list[bytes]:
            result = answer.results[0]
            return unpack_records(result.value) if result.type == dht_pb2.FOUND_DICTIONARY else []

        return await ask(self.node.protocol, peer, [self._name], read) or []

    async def _near(self) -> list[PeerID]:
        nearest = await self.node.find_nearest_nodes([self._name], k_nearest=NEAREST, exclude_self=True)
        return list(nearest[self._name].values())

    def stop(self) -> None:
        # Not node.shutdown: it waits for the daemon, which may be gone, to unregister handlers that end with it.
        self.node.is_alive = False


def unpack_records(packed: bytes) -> list[bytes]:
    """Return the values in a packed DHT dictionary that may be records of ours. Raises MalformedError."""
    if len(packed) > MAX_TOTAL + FRAMING:
        raise MalformedError(f"a dictionary of {len(packed):,} bytes: at most {MAX_TOTAL + FRAMING:,} are accepted")
    try:  # without a hook extensions are not unpacked, and only the arrays that belong there are entered
        outer = msgpack.unpackb(packed, max_array_len=0, max_map_len=0)
        if not isinstance(outer, msgpack.ExtType) or outer.code != DICTIONARY:
            raise MalformedError("a value that is no dictionary of the DHT")
        reader = msgpack.Unpacker(raw=True, max_array_len=0, max_map_len=0, max_buffer_size=MAX_TOTAL + FRAMING)
        reader.feed(outer.data)
        shape = reader.read_array_header()
        reader.skip()
        reader.skip()
        records = reader.read_array_header()
        if shape != 3 or records > MAX_MEMBERS:
            raise MalformedError(f"a dictionary of the DHT with {records:,} records: at most {MAX_MEMBERS:,} are read")
        return [value for _ in range(records) if isinstance(value := _value(reader), bytes)]
    except (msgpack.UnpackException, ValueError, TypeError) as e:
        raise MalformedError(f"a dictionary of the DHT that cannot be unpacked: {short_report(str(e))}") from None


def _value(reader: Any) -> object:
    """Return the value of a record: [key, value, expiration]. Raises what `msgpack` does, ValueError."""
    if reader.read_array_header() != 3:
        raise ValueError("a record that is no triple")
    reader.unpack()
    value = reader.unpack()
    reader.unpack()
    return value


def _held(dictionary: object) -> list[bytes]:
    """Return the values in a DHT dictionary of our own storage."""
    if not isinstance(dictionary, DictionaryDHTValue):
        return []
    items = itertools.islice(cast(Any, dictionary).items(), MAX_MEMBERS)
    return [item.value for _, item in items if isinstance(item.value, bytes)]
