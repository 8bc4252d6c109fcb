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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import async_timeout
import msgpack
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
from peer.swarm.libp2p.search import Search
from protocol.bounded import BoundedDict
from protocol.checks import PARSE_ERRORS
from protocol.envelope import open_envelope
from protocol.errors import MalformedError, ProtocolError
from protocol.ids import PeerKey, RunId, sha256
from protocol.version import PROTOCOL
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

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

DRAWN = 4
"""Nodes drawn by chance that keep the records as well and are asked for them."""

SEARCH_SECONDS = 10
"""Time of a search, after which the nodes that have answered count."""

PING_SECONDS = 5

ASKED_AT_ONCE = 8
"""Nodes that a search waits for at a time."""

REMEMBERED = 2 * MAX_MEMBERS
"""Maximum number of checked records that are not checked again."""

MAX_PACKED = MAX_TOTAL + 128 * MAX_MEMBERS
"""Bytes of an answer's dictionary: besides the records there are each one's key, time and lengths."""

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
        except (ProtocolError, *PARSE_ERRORS, ValueError, TypeError) as e:
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
        """Return the author of the heartbeat in a value, and its sequence. Raises ProtocolError, or PARSE_ERRORS."""
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
        self._pings: set[asyncio.Task[Any]] = set()  # asyncio itself keeps no reference to a task

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
            ping_task = asyncio.create_task(ping(self._protocol, oldest[1]))
            self._pings.add(ping_task)
            ping_task.add_done_callback(self._pings.discard)

    def _remove(self, node_id: DHTID, peer: PeerID) -> None:
        """Remove a node from all buckets: one that hivemind splits leaves an id on the boundary in the wrong half."""
        for bucket in self._table.buckets:
            bucket.nodes_to_peer_id.pop(node_id, None)
            bucket.replacement_nodes.pop(node_id, None)
            bucket.nodes_requested_for_ping.discard(node_id)
        del self._table.uid_to_peer_id[node_id], self._table.peer_id_to_uid[peer]


def node_name(info: Any) -> DHTID:
    """Return the id that a node gives itself. Raises MalformedError."""
    if len(info.node_id) != DHTID.HASH_NBYTES:
        raise MalformedError("it names itself by something else than its id")
    return DHTID.from_bytes(info.node_id)


def neighbours(result: Any) -> dict[PeerID, DHTID]:
    """Return the nodes that a result of `rpc_find` names. Raises MalformedError."""
    names, peers = result.nearest_node_ids, result.nearest_peer_ids
    if not len(names) == len(peers) <= NEIGHBOURS:
        raise MalformedError(f"it names {len(names)} nodes with {len(peers)} keys: at most {NEIGHBOURS} are accepted")
    if any(len(name) != DHTID.HASH_NBYTES for name in names):
        raise MalformedError("it names nodes by something else than their ids")
    keys = map(PeerKey.from_libp2p_id, peers)
    return {PeerID(key.libp2p_id): DHTID.from_bytes(name) for key, name in zip(keys, names, strict=True)}


async def ping(protocol: Any, peer: PeerID) -> Any | None:
    """Ping a node, and note it in our table; return its answer, or None, with a log line, if it gives none of use.

    hivemind's own lets a node that names itself by anything else keep its place.
    """
    reply: Any = None
    node_id = None
    try:
        request = dht_pb2.PingRequest(peer=protocol.node_info, validate=False)
        reply = await protocol.get_stub(peer).rpc_ping(request, timeout=PING_SECONDS)
        node_id = node_name(reply.peer)
    except Exception as e:  # noqa: BLE001 - whatever a stranger's answer makes hivemind raise, AssertionError too
        why = short_report(str(e)) or type(e).__name__
        log.info("peer %s does not answer in the DHT: %s", sender_key(peer).short, why)
    await protocol.update_routing_table(node_id, peer, responded=node_id is not None)
    return reply if node_id is not None else None


@dataclass(frozen=True)
class NodeAnswer:
    """A node's answer: its id, the nodes near the key that it names, and its packed dictionary, or nothing."""

    node_id: DHTID
    neighbours: dict[PeerID, DHTID]
    packed: bytes


def read_answer(answer: Any) -> NodeAnswer:
    """Read the answer to `rpc_find` of one key. Raises MalformedError."""
    if len(answer.results) != 1:
        raise MalformedError(f"it has {len(answer.results)} results for one key")
    result = answer.results[0]
    packed = result.value if result.type == dht_pb2.FOUND_DICTIONARY else b""
    if len(packed) > MAX_PACKED:
        raise MalformedError(f"a dictionary of {len(packed):,} bytes: at most {MAX_PACKED:,} are accepted")
    return NodeAnswer(node_name(answer.peer), neighbours(result), packed)


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
        return cls(node, validator, run, warn)

    @property
    def clock_offset(self) -> float | None:
        return statistics.median(self._offsets.values()) if self._offsets else None

    async def meet(self, peer: PeerKey) -> bool:
        began = time.time()
        reply = await ping(self.node.protocol, PeerID(peer.libp2p_id))
        ended = time.time()
        if reply is not None and ended - began < 2:  # of a slower answer the delay may exceed the clock's offset
            self._offsets.renew(peer, reply.dht_time - (began + ended) / 2)
        return reply is not None

    async def publish(self, author: PeerKey, envelope: bytes, seconds: float) -> bool:
        value = MSGPackSerializer.dumps(envelope)
        if len(value) > MAX_RECORD:
            self._warn(f"a heartbeat of {len(value)} bytes is too long for the DHT: at most {MAX_RECORD}")
            return False
        protocol = self.node.protocol
        life = min(seconds, MAX_LIFE_SECONDS - 2 * MAX_SKEW_SECONDS)
        until = time.time() + life
        subkey = author.hex()
        record = DHTRecord(self._name.to_bytes(), MSGPackSerializer.dumps(subkey), value, until)
        here = protocol._validate_record(record.key, record.subkey, record.value, until) and protocol.storage.store(
            self._name, value, until, subkey=subkey
        )
        asked, near = await self._search()
        answers = await asyncio.gather(
            *(
                protocol.call_store(peer, keys=[self._name], values=[value], expiration_time=until, subkeys=[subkey])
                for peer in near
            )
        )
        taken = sum(bool(a and a[0]) for a in answers)
        if asked and not taken:
            for peer in list(near)[:5]:
                await self.meet(sender_key(peer))
            self._explain_refusal(asked, sum(a is not None for a in answers), life)
        return bool(taken or (here and not asked))

    def _explain_refusal(self, asked: int, answered: int, life: float) -> None:
        offset = self.clock_offset or 0.0
        has_expired, is_too_long = offset > life - MAX_SKEW_SECONDS, life - offset > MAX_LIFE_SECONDS - MAX_SKEW_SECONDS
        if has_expired or is_too_long:  # at the others, by their clocks
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
        found = []
        _, near = await self._search()
        for packed in near.values():
            found.append(self._some(packed))
            await asyncio.sleep(0)  # to unpack 2 MiB takes a while: other tasks have a turn
        # In turn, so that one node's records do not take all places.
        turns = itertools.zip_longest(*found, fillvalue=None)
        theirs = (value for turn in turns for value in turn if value is not None)
        for i, value in enumerate(itertools.chain(_held(own.value if own is not None else None), theirs)):
            if i % 32 == 31:
                await asyncio.sleep(0)  # verifying takes a while: other tasks have a turn
            try:
                author, sequence = self._validator.author(value)
            except (ProtocolError, *PARSE_ERRORS) as e:
                log.info("a record that a DHT node gave is refused: %s", e)
                continue
            other = newest.get(author)
            if (other is None and len(newest) < MAX_MEMBERS) or (other is not None and other[0] < sequence):
                newest[author] = (sequence, unpack(value))
        return [envelope for _, envelope in newest.values()]

    def _some(self, packed: bytes) -> list[bytes]:
        """Return one node's values that were checked before, and NEW_OF_A_NODE others at most, drawn by chance."""
        try:
            values = unpack_records(packed) if packed else []
        except MalformedError as e:
            log.info("a DHT node gave no usable records: %s", e, extra={"file_only": True})
            return []
        before = [v for v in values if self._validator.knows(v)]
        others = [v for v in values if not self._validator.knows(v)]
        return before + random.sample(others, min(NEW_OF_A_NODE, len(others)))

    async def _search(self) -> tuple[int, dict[PeerID, bytes]]:
        """Return how many nodes were asked, and those near the key: each with its packed dictionary, or nothing."""
        table = self.node.protocol.routing_table
        known = {peer: node_id for node_id, peer in table.get_nearest_neighbors(self._name, NEIGHBOURS)}
        drawn = random.sample(list(table.peer_id_to_uid), min(DRAWN, len(table.peer_id_to_uid)))
        search = Search(self._name, known=known, drawn=drawn, me=self.node.peer_id)
        packed: dict[PeerID, bytes] = {}
        asking: set[asyncio.Task[None]] = set()

        async def ask(peer: PeerID) -> None:
            nonlocal packed
            answer = await self._ask(peer)
            if answer is None:
                search.note_silence(peer)
                return
            search.note_answer(peer, answer.node_id, answer.neighbours)
            packed[peer] = answer.packed
            packed = {node: packed[node] for node in search.found()}  # only these: one may have 2 MiB

        try:
            async with async_timeout.timeout(SEARCH_SECONDS):
                while True:
                    asking |= {asyncio.create_task(ask(peer)) for peer in search.next(ASKED_AT_ONCE - len(asking))}
                    if not asking:
                        break
                    _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.TimeoutError:
            log.debug("a search in the DHT ended before all nodes had answered")
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return search.asked, packed

    async def _ask(self, peer: PeerID) -> NodeAnswer | None:
        """Ask a node for the run's records, and note it in our table; None, with a log line, for no usable answer."""
        protocol: Any = self.node.protocol
        request = dht_pb2.FindRequest(keys=[self._name.to_bytes()], peer=protocol.node_info)
        answer = None
        try:
            answer = read_answer(await protocol.get_stub(peer).rpc_find(request, timeout=protocol.wait_timeout))
        except Exception as e:  # noqa: BLE001 - whatever a stranger's answer makes hivemind raise
            why = short_report(str(e)) or type(e).__name__
            log.info("a DHT node gave no usable answer: %s", why, extra={"file_only": True})
        node_id = None if answer is None else answer.node_id
        await protocol.update_routing_table(node_id, peer, responded=answer is not None)
        return answer

    def stop(self) -> None:
        # Not node.shutdown: it waits for the daemon, which may be gone, to unregister handlers that end with it.
        self.node.is_alive = False


def unpack_records(packed: bytes) -> list[bytes]:
    """Return the values in a packed DHT dictionary that may be records of ours. Raises MalformedError."""
    if len(packed) > MAX_PACKED:
        raise MalformedError(f"a dictionary of {len(packed):,} bytes: at most {MAX_PACKED:,} are accepted")
    try:  # without a hook extensions are not unpacked, and only the arrays that belong there are entered
        outer = msgpack.unpackb(packed, max_array_len=0, max_map_len=0)
        if not isinstance(outer, msgpack.ExtType) or outer.code != DICTIONARY:
            raise MalformedError("a value that is no dictionary of the DHT")
        reader = msgpack.Unpacker(raw=True, max_array_len=0, max_map_len=0, max_buffer_size=MAX_PACKED)
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
