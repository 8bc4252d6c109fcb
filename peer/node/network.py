"""The node's side of the swarm: the peers in it, the messages to and from them, and the blobs that they give.

A `Network` keeps one `Swarm` running for as long as the node lives. Introductions are in `introducer`, forwarding of
messages in `message_relay`, the peers themselves in `peer_table`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from peer.errors import NotInSwarm
from peer.node.compact_records import CompactRecords
from peer.node.downloads import DownloadTable
from peer.node.enrollment import Enrollment
from peer.node.introducer import Introducer
from peer.node.message_relay import MessageRelay
from peer.node.outbox import NETWORK_ERRORS, Outbox
from peer.node.peer_table import News, PeerTable
from peer.node.provider_order import provider_order
from peer.node.tasks import Tasks
from peer.store import StoreError
from peer.swarm import Handlers, Swarm, SwarmStartError
from peer.swarm.addresses import parse_address
from peer.swarm.errors import PeerBusy
from peer.swarm.pace import Paces
from protocol.bounded import BoundedDict
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.messages import MAX_MESSAGES, Certificate, Goodbye, Heartbeat, Signed
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0",)
DISCOVER_SECONDS = 15.0
LONELY_SECONDS = 1.0
"""Seconds between two searches for peers while no peer is known, and before libp2p's daemon is restarted."""

SEARCHED_FOR = 4
"""Number of lost members that are dialled at once. After a long partition both sides may have forgotten each other, and
there may be no third peer that knows both."""

PRESENCE_SECONDS = 4 * DISCOVER_SECONDS
"""Seconds for which a heartbeat stays in the DHT: some attempts to renew it may fail."""

CHAIN_SECONDS, FOLLOWS_SECONDS = 15.0, 3.0
MIN_FORGET_SECONDS = 60.0
MAX_BAD_PROVIDERS = 1024

NONMEMBER_SENDS = 8
"""Packets on their way to non-members: anybody can make keys, accept calls, and not answer them."""

BUSY_SECONDS = 2.0
"""Seconds until a packet is sent again to a peer that was too busy, more or less: its limits refill in this time."""


@dataclass(eq=False)
class Network:
    """The network of one node: `start` it, run `discover` and `keep_running`, then `stop`.

    `listen` and `announce` are multiaddresses. `is_banned` says whether the run's owner has banned a peer. `clock`
    gives monotonic seconds. All chance comes from `chance`. `paces` bound the bytes a second of blobs.
    """

    membership: Enrollment
    tasks: Tasks
    listen: Sequence[str] = ()
    announce: Sequence[str] = ()
    is_banned: Callable[[PeerKey], bool] = lambda key: False
    start_swarm: Callable[..., Any] = Swarm.start
    clock: Callable[[], float] = time.monotonic
    chance: random.Random = field(default_factory=random.Random)
    paces: Paces = field(default_factory=Paces)

    def __post_init__(self) -> None:
        membership, tasks, clock = self.membership, self.tasks, self.clock
        round, me = membership.spec.round, membership.identity.key
        self._me = me
        self._handlers: Handlers | None = None
        self._swarm: Swarm | None = None
        self._earlier_bytes = (0, 0)
        """Bytes sent and received by the swarms before this one."""
        # A peer that comes back finds its own address among those that it gave others.
        self._entry_peers = [k for k in _by_peer(membership.addresses) if k != me]
        self._nonmember_sends = asyncio.Semaphore(NONMEMBER_SENDS)
        self._dialling: set[PeerKey] = set()
        self._bad_providers: BoundedDict[PeerKey, None] = BoundedDict(MAX_BAD_PROVIDERS)
        """Peers that served wrong bytes, newest last."""
        forget = max(MIN_FORGET_SECONDS, 3 * round.member_seconds)
        self.downloads = DownloadTable(membership.store, clock)
        self.peers = PeerTable(me, forget_seconds=forget, limit=round.max_members)
        self._compact = CompactRecords(self, tasks)
        self._outbox = Outbox(self._deliver, self._compact.encode, self.is_known)
        self.relay = MessageRelay(me, self.peers, self._outbox, round.heartbeat_seconds, clock)
        self._introducer = Introducer(
            me, self.peers, self._outbox, membership.locator, tasks, round.heartbeat_seconds, clock
        )

    # -- lifecycle ------------------------------------------------------------------------------------------------

    async def start(self, handlers: Handlers) -> None:
        """Listen, and enter the swarm by the addresses of the membership. Raises CairnError."""
        self._handlers = handlers
        m = self.membership
        self._swarm = await self.start_swarm(
            m.identity,
            m.spec.run_id,
            store=m.store,
            listen=self.listen or DEFAULT_LISTEN,
            announce=self.announce,
            initial=m.addresses,
            handlers=replace(
                handlers, on_packet=self.receive, on_header_request=self._compact.answer, is_known=self.is_known
            ),
            paces=self.paces,
        )
        log.info("listening at %s", ", ".join(self.addresses) or "no address that others can dial")

    async def keep_running(self) -> None:
        """Start another libp2p daemon whenever the present one ends by itself, until cancelled."""
        while True:
            cause = await self.swarm.wait_lost()
            log.error("libp2p's daemon ended (%s): starting another", cause)
            await self.swarm.stop()
            self._earlier_bytes, self._swarm = (self.bytes_up, self.bytes_down), None
            pause = LONELY_SECONDS
            while self._swarm is None:
                await asyncio.sleep(pause)
                assert self._handlers is not None
                try:
                    await self.start(self._handlers)
                except SwarmStartError as e:  # memory may be short, which ended the first one
                    log.error("%s", e)
                    pause = DISCOVER_SECONDS

    async def discover(self) -> None:
        """Keep our heartbeat in the DHT and find the peers there, until cancelled."""
        while True:
            try:
                await self._use_dht()
            except NETWORK_ERRORS as e:
                what = str(e) or type(e).__name__
                log.warning("the DHT does not answer: %s; members are still found through each other", what)
            for key in self.peers.forget_silent(self.clock()):
                log.debug("%s is forgotten: it has been silent for too long", key.short)
            await self.save_addresses()
            await asyncio.sleep(DISCOVER_SECONDS if self.peers.keys() else LONELY_SECONDS)

    async def _use_dht(self) -> None:
        swarm = self.swarm
        await self.read_dht()  # first: our record replaces that of another machine with our key, which is reported
        if (heartbeat := self.relay.own_heartbeat) is not None:
            await swarm.publish(heartbeat.encoded, PRESENCE_SECONDS)
        await swarm.refresh_addresses()
        if await self.search():  # a peer that answered may know others
            await self.read_dht()

    async def read_dht(self) -> None:
        """Process the heartbeats in the DHT, unchecked like any other packet."""
        found = await self.swarm.discover()
        for i in range(0, len(found), MAX_MESSAGES):
            await self.receive(self._me, wire.Packet(messages=found[i : i + MAX_MESSAGES]))

    async def search(self) -> list[PeerKey]:
        """Dial a few lost members, and while no peer is known, also all entry peers: those by which we entered the run.

        Return the peers that answered; our heartbeat is sent to them.
        """
        table, lost = self.peers, self.peers.lost()
        known = {self._me, *table.keys()}
        entries = _by_peer(self.membership.addresses)
        away = [k for k in {**lost, **entries} if k not in known and not self.is_banned(k)]
        sought = [k for k in away if not table.has_left(k)]
        chosen = self.chance.sample(sought, min(SEARCHED_FOR, len(sought)))
        if len(known) == 1:  # only we: a peer that left may be back without our knowledge
            chosen = list(dict.fromkeys([*(k for k in away if k in entries), *chosen]))
        addresses = {k: [*entries.get(k, ()), *_by_peer(lost.get(k, ())).get(k, ())] for k in chosen}
        found = await self.swarm.connect(dict.fromkeys(a for each in addresses.values() for a in each), soon=True)
        if (heartbeat := self.relay.own_heartbeat) is not None:
            self._outbox.broadcast(found, heartbeat)
        return found

    async def flush(self, seconds: float) -> None:
        """Wait until the queued messages are sent, at most these seconds."""
        await self._outbox.flush(seconds)

    async def stop(self, seconds: float = 1.0) -> None:
        """Send the queued messages within these seconds, then disconnect."""
        if self._swarm is not None:
            await self._outbox.flush(seconds)
        await self._outbox.close()
        await self.save_addresses()
        if self._swarm is not None:
            await self._swarm.stop()

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def swarm(self) -> Swarm:
        """The running swarm. Raises NotInSwarm when there is none."""
        if self._swarm is None:
            raise NotInSwarm("libp2p's daemon is not running (yet)")
        return self._swarm

    @property
    def addresses(self) -> list[str]:
        """Our own multiaddresses; none before the start."""
        return self._swarm.addresses if self._swarm is not None else []

    @property
    def bytes_up(self) -> int:
        """Bytes sent since the node started."""
        return self._earlier_bytes[0] + (self._swarm.bytes_up if self._swarm is not None else 0)

    @property
    def bytes_down(self) -> int:
        """Bytes received since the node started."""
        return self._earlier_bytes[1] + (self._swarm.bytes_down if self._swarm is not None else 0)

    def providers(self, holders: Sequence[PeerKey] = (), *, state: Digest | None = None) -> list[PeerKey]:
        """Return all peers that may have a blob, the likeliest first; see `provider_order`."""
        entry_peers = [*self._entry_peers, *sorted(self._coordinator_observers() - {self._me})]
        return provider_order(
            holders, self.peers.entries(), entry_peers, self._outbox.failures, self.chance, state=state
        )

    def is_admitted(self, key: PeerKey) -> bool:
        """Return whether a peer was heard from, with an admission: see `PeerTable`."""
        return self.peers.is_admitted(key)

    def is_known(self, key: PeerKey) -> bool:
        """Return whether a peer is admitted, the coordinator's observer, or one that we entered by."""
        return self.peers.is_admitted(key) or key in self._entry_peers or key in self._coordinator_observers()

    def is_alone_with_coordinator(self) -> bool:
        """Return whether the coordinator's observer is here, and no member that holds updates was heard from lately.

        An auditor's node and a newcomer's hold none: they state no state.
        """
        entries, since = self.peers.entries(), self.clock() - self.membership.spec.round.member_seconds
        others = any(e.is_admitted and e.heartbeat.body.state and e.last_direct >= since for e in entries.values())
        return not others and not self._coordinator_observers().isdisjoint(entries)

    def _coordinator_observers(self) -> frozenset[PeerKey]:
        record = self.membership.locator.newest
        return frozenset() if record is None else _named_by(tuple(record.body.addresses))

    # -- messages in -----------------------------------------------------------------------------------------

    async def receive(self, sender: PeerKey, packet: wire.Packet) -> None:
        """Process a packet: compact records in it are reconstructed first."""
        assert self._handlers is not None
        done = self._handlers.on_packet(sender, self._compact.reconstruct(sender, packet))
        if done is not None:
            await done

    def note_message(self, message: Signed, sender: PeerKey) -> None:
        """Learn from a verified message which peers are present; introduce newcomers, and relay to others."""
        direct = sender == message.author
        self._compact.note(message)
        if not isinstance(message.body, Heartbeat):
            if direct:
                self.relay.forward(message)
            if isinstance(message.body, Goodbye):
                self.peers.note_goodbye(message.author, message.body.sequence)
            return
        reserved = message.author in self._coordinator_observers()
        news = self.peers.note_heartbeat(message, self.clock(), direct=direct, reserved=reserved)
        if direct and news is not News.NONE:
            self.relay.forward(message)
        if sender not in (message.author, self._me):
            self._introducer.note_introduction(message.author, sender)
        if news is News.NEW_PEER:
            self._on_new_peer(message, direct)

    def _on_new_peer(self, message: Signed[Heartbeat], direct: bool) -> None:
        # The first newcomer means that we are in the swarm; after that, hundreds may come and go.
        level = logging.INFO if len(self.peers.keys()) == 1 else logging.DEBUG
        log.log(level, "in the swarm: received a heartbeat of %s", message.author.short)
        self._introducer.on_new_peer(message, direct=direct)
        addresses = _by_peer(message.body.addresses).get(message.author)
        # A stranger's heartbeat may name anybody's address, and all would dial it. A stranger has to dial us.
        invited = bool(message.body.admission) or message.author in self._coordinator_observers()
        if addresses and invited and message.author not in self._dialling and len(self._dialling) < self.peers.limit:
            self._dialling.add(message.author)
            self.tasks.spawn(self._dial(message.author, addresses), "dial")

    async def _dial(self, peer: PeerKey, addresses: Sequence[str]) -> None:
        try:
            await self.swarm.connect(addresses)
        except NETWORK_ERRORS as e:
            log.debug("cannot dial: %s", str(e) or type(e).__name__)
        finally:
            self._dialling.discard(peer)

    def charge(self, sender: PeerKey, size: int) -> None:
        """Count bytes against a sender's limit."""
        self.swarm.charge(sender, size)

    # -- messages out ----------------------------------------------------------------------------------------

    def broadcast(self, message: Signed) -> None:
        """Queue our message for all peers; while no peer is known, for the entry peers."""
        if isinstance(message.body, Heartbeat):
            self.relay.note_own(message)
        self._compact.note(message)
        self._outbox.broadcast(self.peers.keys() or self._entry_peers, message)

    def send(self, to: PeerKey, messages: Iterable[Signed] = (), certificates: Iterable[Any] = ()) -> None:
        self._outbox.send(to, messages, certificates)

    def send_to_all(self, message: Signed) -> None:
        """Queue a message of somebody else for all peers of the table."""
        self._outbox.broadcast(self.peers.keys(), message)

    async def _deliver(self, to: PeerKey, packet: wire.Packet, seconds: float) -> None:
        """Send a packet, and once more if the peer was too busy. Raises NETWORK_ERRORS when it cannot be reached."""
        try:
            await self._send_once(to, packet, seconds)
        except PeerBusy:
            await asyncio.sleep(BUSY_SECONDS * self.chance.uniform(0.5, 1.5))  # others were sent away as well
            try:
                await self._send_once(to, packet, seconds)
            except PeerBusy as e:
                log.info("a packet is dropped: %s", e, extra={"file_only": True})

    async def _send_once(self, to: PeerKey, packet: wire.Packet, seconds: float) -> None:
        if self.is_known(to):
            await self.swarm.send(to, packet, seconds)
        else:
            async with self._nonmember_sends:
                await self.swarm.send(to, packet, seconds)

    # -- requests --------------------------------------------------------------------------------------------

    async def request_chain(
        self, to: PeerKey, have: Sequence[Digest], seconds: float = CHAIN_SECONDS
    ) -> wire.ChainReply:
        """Return the certificates after the newest of `have` that the peer knows. Raises NETWORK_ERRORS."""
        request = wire.ChainRequest(run=self.membership.spec.run_id, locator=[bytes(d) for d in have])
        return await self.swarm.request_chain(to, request, timeout=seconds)

    async def coordinator_follows(self, newest: Certificate) -> bool:
        """Return whether the coordinator's observer answers, within FOLLOWS_SECONDS, that its chain has a record."""
        for observer in self._coordinator_observers() & self.peers.entries().keys():
            try:
                reply = await self.request_chain(observer, [newest.record.body.parent], FOLLOWS_SECONDS)
                newer = [self.membership.decoder.decode_certificate(c) for c in reply.certificates[:1]]
            except NETWORK_ERRORS as e:
                log.debug("the coordinator did not say what it follows: %s", str(e) or type(e).__name__)
                continue
            if any(certificate.digest == newest.digest for certificate in newer):
                return True
        return False

    async def request_headers(self, sender: PeerKey, names: wire.Packet) -> wire.Packet:
        """Return headers by their names. Raises NETWORK_ERRORS."""
        return await self.swarm.request_headers(sender, names)

    async def request_coordinator_address(
        self, peer: PeerKey, request: wire.CoordinatorAddressRequest
    ) -> wire.CoordinatorAddressReply:
        """Return a peer's answer about the coordinator, unchecked. Raises NETWORK_ERRORS."""
        return await self.swarm.request_coordinator_address(peer, request)

    async def fetch_blob(
        self,
        digest: Digest,
        size: int,
        holders: Sequence[PeerKey],
        *,
        deadline_seconds: float,
        chunks: Collection[int] | None = None,
        what: str = "",
    ) -> None:
        """Fetch a blob, or these chunks of it, into the store (see `Swarm.fetch_blob`).

        Peers that served wrong bytes of any blob are asked last. `what` names a download that people wait for.
        Raises CairnError.
        """
        if what:
            with self.downloads.noted(what, digest, size):
                await self.fetch_blob(digest, size, holders, deadline_seconds=deadline_seconds, chunks=chunks)
            return
        ordered = sorted(holders, key=lambda h: h in self._bad_providers)
        on_bad = partial(self._note_bad_provider, digest)
        await self.swarm.fetch_blob(
            digest, size, ordered, deadline_seconds=deadline_seconds, on_bad=on_bad, chunks=chunks
        )

    def _note_bad_provider(self, digest: Digest, provider: PeerKey, reason: str) -> None:
        log.warning(
            "peer %s is dropped from blob %s: %s; later fetches ask it last", provider.short, digest.short, reason
        )
        self._bad_providers[provider] = None

    async def save_addresses(self) -> None:
        """Store the addresses of members for the next start."""
        if addresses := self.peers.addresses():
            try:
                await asyncio.to_thread(self.membership.learn, addresses, own=self.addresses)
            except StoreError as e:
                log.warning("addresses of members were not kept: %s", e)


def _by_peer(addresses: Iterable[str]) -> dict[PeerKey, list[str]]:
    """Return multiaddresses by the peer that they name; those that name none are left out."""
    found: dict[PeerKey, list[str]] = {}
    for address in addresses:
        try:
            found.setdefault(parse_address(address)[0], []).append(address)
        except MalformedError:
            continue
    return found


@lru_cache(maxsize=4)
def _named_by(addresses: tuple[str, ...]) -> frozenset[PeerKey]:
    return frozenset(_by_peer(addresses))
