"""The swarm as the node sees it: send packets, ask for the chain, fetch and serve blobs, be found and find others."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

import async_timeout
from google.protobuf.message import DecodeError, Message
from hivemind.p2p import P2PContext
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from peer.store import Store
from peer.swarm.addresses import dialable, ways_to
from peer.swarm.asking import coordinator_address_call
from peer.swarm.daemon import START_SECONDS, Daemon, sender_key, start_daemon
from peer.swarm.errors import PacketTooLarge, PeerRefused, PeerUnreachable, libp2p_words
from peer.swarm.fetch import Fetch, OnBad
from peer.swarm.limits import Limits
from peer.swarm.links import LinkLimits, Links
from peer.swarm.presence import Presence
from peer.swarm.serve import BlobServer, MayServe, ServeLimits
from peer.swarm.traffic import Traffic
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, RunId
from protocol.merkle import MAX_BLOB
from protocol.messages import MAX_ADDRESSES
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

MAX_PACKET = 4 * 1024 * 1024 - 16 * 1024
"""Bytes of a Packet or ChainReply, serialised: what one unary message of the transport carries, less its framing."""

DIAL_SECONDS = 10
DHT_SECONDS = 20
CALLS_OUT = 64
CALLS_TO_ONE = 8
"""Calls under way to one peer; half of what it admits, since the DHT's come on top."""

MESSAGE_COST = 4096
"""Bytes that a message counts for beside its own: checking a signature takes 0.2 ms of a core."""

STRANGERS_IN = 2
"""Packets of strangers that are looked at at once."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the node does with what comes in. Each may be a coroutine function or a plain function.

    The sender's key is proved by the transport; what is in the message is not checked at all.
    """

    on_packet: Callable[[PeerKey, wire.Packet], Awaitable[None] | None]
    on_chain_request: Callable[[PeerKey, wire.ChainRequest], Awaitable[wire.ChainReply] | wire.ChainReply]
    may_serve: MayServe
    """None: the requester may have the blob; else the reason why not (now). Called for every chunk: keep it cheap."""
    on_blob_requested: Callable[[Digest, PeerKey], None] = lambda blob, requester: None
    """Called for each request for a blob that `may_serve` admits."""
    on_headers_asked: Callable[[wire.Packet], wire.Packet] = lambda names: wire.Packet()
    """Headers that records of ours name (`protocol.compact_record`), by their names. Raises CairnError."""
    on_warning: Callable[[str], None] = log.warning
    """A fault that the user should hear of; the swarm goes on."""
    on_coordinator_address: Callable[[wire.CoordinatorAddressRequest], wire.CoordinatorAddressReply] = lambda _: (
        wire.CoordinatorAddressReply()
    )
    """Anybody's question where the coordinator is."""
    is_known: Callable[[PeerKey], bool] = lambda key: True
    """Whether this is no key that anybody can make: all others together have but a part of the streams."""


@dataclass(frozen=True, slots=True)
class SwarmLimits:
    """All bounds of the network side. The defaults suit a home machine and rounds of up to some hundred members."""

    calls: Limits = field(default_factory=Limits)
    serve: ServeLimits = field(default_factory=ServeLimits)
    links: LinkLimits = field(default_factory=LinkLimits)


class Swarm:
    """One peer's connection to the other members of one run. Made by `Swarm.start`; lives in its event loop."""

    def __init__(
        self, identity: Identity, run: RunId, daemon: Daemon, store: Store, handlers: Handlers, limits: SwarmLimits
    ):
        self.key = identity.key
        self.run = run
        self._daemon = daemon
        self._store = store
        self._handlers = handlers
        self._traffic = Traffic()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="cairn-blobs")
        self._names = {what: f"cairn/1/{run.hex()[:8]}/{what}" for what in ("packet", "chain", "headers", "blob")}
        self._names["coordinator_address"] = coordinator_address_call(run)
        self._links = Links(self._open_blob_stream, self._traffic, limits.links)
        self._server = BlobServer(
            store,
            handlers.may_serve,
            self._threads,
            self._traffic,
            limits.serve,
            handlers.is_known,
            handlers.on_blob_requested,
        )
        self._calls_out = asyncio.Semaphore(CALLS_OUT)
        self._calls_to: WeakValueDictionary[PeerKey, asyncio.Semaphore] = WeakValueDictionary()
        self._dials, self._dials_soon = asyncio.Semaphore(16), asyncio.Semaphore(16)
        self._strangers_in = asyncio.Semaphore(STRANGERS_IN)
        self._addresses: list[str] = []
        self._presence: Presence | None = None
        self._stopped = False

    @classmethod
    async def start(
        cls,
        identity: Identity,
        run: RunId,
        *,
        store: Store,
        handlers: Handlers,
        listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        announce: Sequence[str] = (),
        initial: Sequence[str] = (),
        folder: Path | None = None,
        limits: SwarmLimits | None = None,
        start_seconds: float = START_SECONDS,
    ) -> Swarm:
        """Listen, join the DHT by the `initial` addresses (as `addresses` of others give them), and take calls.

        `announce` are the addresses to tell others when they are not those that the machine sees itself. `folder` is
        where a private folder for the daemon's sockets is made (default: the system's temporary folder). That nobody
        of `initial` answers is a warning, not an error: `connect` may be called again at any time.
        Raises SwarmStartError.
        """
        limits = limits or SwarmLimits()
        daemon = await start_daemon(
            identity, listen=listen, announce=announce, folder=folder, limits=limits.calls, start_seconds=start_seconds
        )
        daemon.guard.is_known = handlers.is_known
        self = cls(identity, run, daemon, store, handlers, limits)
        try:
            self._presence = await Presence.start(daemon, run, handlers.on_warning)
            await daemon.add_protobuf_handler(self._names["packet"], self._take_packet, wire.Packet)
            await daemon.add_protobuf_handler(self._names["chain"], self._take_chain_request, wire.ChainRequest)
            await daemon.add_protobuf_handler(self._names["headers"], self._take_headers_asked, wire.Packet)
            await daemon.add_protobuf_handler(
                self._names["coordinator_address"],
                self._take_coordinator_address_request,
                wire.CoordinatorAddressRequest,
            )
            await daemon.accept_streams(self._names["blob"], self._server.handle)
            await self.refresh_addresses()
            if initial and not await self.connect(initial):
                handlers.on_warning(
                    "none of the addresses to enter the swarm by answers yet; trying goes on. If it stays so: is this "
                    "machine online, and does a firewall let it out?"
                )
        except BaseException:
            await self.stop()
            raise
        return self

    # -- who and where -------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """Where others can dial this peer: multiaddresses with its /p2p/ id, as of the last look at the daemon."""
        return list(self._addresses)

    async def refresh_addresses(self) -> list[str]:
        """Ask the daemon again: its view changes as others tell it how they see this machine."""
        try:
            async with async_timeout.timeout(DIAL_SECONDS):
                visible = await self._daemon.get_visible_maddrs(latest=True)
        except (P2PDaemonError, OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError) as e:
            log.warning("libp2p's daemon does not tell our addresses: %s", e or type(e).__name__)
        else:
            self._addresses = dialable([str(a) for a in visible])[:MAX_ADDRESSES]
        return self.addresses

    async def peers(self) -> list[PeerKey]:
        """Whom this peer has a connection with now."""
        async with async_timeout.timeout(DIAL_SECONDS):
            infos = await self._daemon.list_peers()
        keys = []
        for info in infos:
            try:
                keys.append(sender_key(info.peer_id))
            except MalformedError:
                continue  # a libp2p host that is none of ours
        return keys

    @property
    def bytes_up(self) -> int:
        return self._traffic.up

    @property
    def bytes_down(self) -> int:
        return self._traffic.down

    @property
    def clock_offset(self) -> float | None:
        """Seconds by which the other members' clocks are ahead of ours, if anybody answered."""
        return self._presence.clock_offset if self._presence is not None else None

    async def connect(self, addresses: Iterable[str], *, soon: bool = False) -> list[PeerKey]:
        """Dial the peers at these addresses (several may be of one peer); bad ones are skipped. Says who answered.
        `soon`: not behind all that are dialled already.
        """
        places = self._dials_soon if soon else self._dials
        by_peer: dict[PeerKey, list[bytes]] = {}
        for text in list(addresses)[:1024]:
            try:
                peer, ways = ways_to(text)
            except MalformedError as e:
                log.info("%s", e)
                continue
            if peer != self.key and len(by_peer.setdefault(peer, [])) < 2 * MAX_ADDRESSES:
                by_peer[peer] += ways

        async def dial(peer: PeerKey) -> PeerKey | None:
            async with places:
                try:
                    await self._daemon.dial(peer, by_peer[peer], DIAL_SECONDS)
                except PeerUnreachable as e:
                    log.debug("%s", e)  # while nobody answers, this is tried each second
                    return None
                if self._presence is not None:
                    await self._presence.meet(peer)
                return peer

        return [peer for peer in await asyncio.gather(*map(dial, by_peer)) if peer is not None]

    # -- messages ------------------------------------------------------------------------------------------------

    async def send(self, to: PeerKey, packet: wire.Packet, timeout: float = 10) -> None:
        """Deliver a packet. Raises PeerUnreachable, PeerRefused, PacketTooLarge."""
        await self._call(to, "packet", packet, wire.Ack, timeout)

    async def request_chain(self, to: PeerKey, request: wire.ChainRequest, timeout: float = 20) -> wire.ChainReply:
        """What a member has after the newest of `have`. The reply is unchecked, at most MAX_PACKET bytes.

        Raises PeerUnreachable, PeerRefused, PacketTooLarge.
        """
        return await self._call(to, "chain", request, wire.ChainReply, timeout)

    async def ask_headers(self, of: PeerKey, names: wire.Packet, timeout: float = 10) -> wire.Packet:
        """Headers of a record that a member sent as a brief. The reply is unchecked, at most MAX_PACKET bytes.

        Raises PeerUnreachable, PeerRefused, PacketTooLarge.
        """
        return await self._call(of, "headers", names, wire.Packet, timeout)

    def charge(self, sender: PeerKey, size: int) -> None:
        """Count bytes against what a sender may send, beside those that it sent."""
        self._daemon.guard.charge(sender, size)

    async def request_coordinator_address(
        self, to: PeerKey, request: wire.CoordinatorAddressRequest, timeout: float = 10
    ) -> wire.CoordinatorAddressReply:
        """What a member knows of the coordinator's address. The reply is unchecked.

        Raises PeerUnreachable, PeerRefused.
        """
        return await self._call(to, "coordinator_address", request, wire.CoordinatorAddressReply, timeout)

    async def _call(self, to: PeerKey, what: str, message: Message, reply: type[M], timeout: float) -> M:
        data_size = message.ByteSize()
        if data_size > MAX_PACKET:
            raise PacketTooLarge(f"a message of {data_size:,} bytes: at most {MAX_PACKET:,} fit into one")

        turn = self._calls_to.setdefault(to, asyncio.Semaphore(CALLS_TO_ONE))

        async def call() -> M:
            async with turn, self._calls_out:
                return await self._daemon.call(to, self._names[what], message, reply)

        if self._stopped or self._daemon.lost.done():
            raise PeerUnreachable("the network side of this peer is not running")
        try:
            async with async_timeout.timeout(timeout):
                answer = await call()
        except asyncio.TimeoutError:
            raise PeerUnreachable(f"peer {to.short} did not answer in {timeout:g} s") from None
        except P2PHandlerError as e:
            raise PeerRefused(f"peer {to.short} refused: {libp2p_words(str(e))}") from None
        except P2PDaemonError as e:
            raise PeerUnreachable(f"peer {to.short}: {libp2p_words(str(e))}") from None
        except DecodeError:
            raise PeerRefused(f"peer {to.short} answered with what is no {reply.__name__}") from None
        self._traffic.up += data_size
        self._traffic.down += answer.ByteSize()
        return answer

    async def _take_packet(self, packet: wire.Packet, context: P2PContext) -> wire.Ack:
        self._traffic.down += packet.ByteSize()
        sender = sender_key(context.remote_id)
        count = len(packet.messages) + len(packet.certificates)
        self._daemon.guard.charge(sender, MESSAGE_COST * count, work=True)
        async with AsyncExitStack() as turn:
            if not self._handlers.is_known(sender):
                await turn.enter_async_context(self._strangers_in)
            done = self._handlers.on_packet(sender, packet)
            if inspect.isawaitable(done):
                await done
        return wire.Ack()

    async def _take_chain_request(self, request: wire.ChainRequest, context: P2PContext) -> wire.ChainReply:
        self._traffic.down += request.ByteSize()
        reply = self._handlers.on_chain_request(sender_key(context.remote_id), request)
        if inspect.isawaitable(reply):
            reply = await reply
        if reply.ByteSize() > MAX_PACKET:
            raise PacketTooLarge(f"the reply has {reply.ByteSize():,} bytes: at most {MAX_PACKET:,} fit into one")
        self._daemon.guard.charge(sender_key(context.remote_id), reply.ByteSize())
        self._traffic.up += reply.ByteSize()
        return reply

    async def _take_headers_asked(self, names: wire.Packet, context: P2PContext) -> wire.Packet:
        self._traffic.down += names.ByteSize()
        reply = self._handlers.on_headers_asked(names)
        self.charge(sender_key(context.remote_id), reply.ByteSize())
        self._traffic.up += reply.ByteSize()
        return reply

    async def _take_coordinator_address_request(
        self, request: wire.CoordinatorAddressRequest, context: P2PContext
    ) -> wire.CoordinatorAddressReply:
        reply = self._handlers.on_coordinator_address(request)
        self.charge(sender_key(context.remote_id), reply.ByteSize())
        self._traffic.up += reply.ByteSize()
        return reply

    # -- blobs ---------------------------------------------------------------------------------------------------

    async def fetch_blob(
        self,
        digest: Digest,
        size: int | None,
        holders: Sequence[PeerKey],
        *,
        deadline_seconds: float,
        on_bad: OnBad = lambda peer, reason: None,
        max_size: int = MAX_BLOB,
        chunks: Collection[int] | None = None,
    ) -> None:
        """Get a blob into the store from these holders, the likeliest first. Returns at once when it is there.

        `size` is the size that somebody signed for; with None the holders state it, and at most `max_size` is taken.
        A holder that is proved to send wrong bytes is dropped, and `on_bad(holder, reason)` called, once. What arrived
        of a blob that could not be had whole is kept for the next attempt. With `chunks` only these are fetched; they
        are then in the store's partial blob (`Store.arriving`), which is served to others like any that arrives.
        Raises BlobUnavailable (with a reason for each holder), StoreError.
        """
        others = [h for h in holders if h != self.key]
        fetch = Fetch(
            self._links, self._store, self._threads, digest, size, others,
            me=self.key, max_size=max_size, on_bad=on_bad, chunks=chunks,
        )  # fmt: skip
        await fetch.run(deadline_seconds)

    async def _open_blob_stream(
        self, peer: PeerKey, seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._daemon.open_stream(peer, self._names["blob"], seconds)

    # -- presence ------------------------------------------------------------------------------------------------

    async def publish(self, heartbeat: bytes, seconds: float = 60) -> bool:
        """Keep our heartbeat (an envelope) in the DHT for a time, at most about two minutes.

        False when others are there and none took it; `on_warning` then says why, as far as it can be known.
        """
        try:
            async with async_timeout.timeout(DHT_SECONDS):
                return await self._dht().publish(self.key, heartbeat, seconds)
        except asyncio.TimeoutError:
            self._handlers.on_warning("the DHT did not answer: others may not find this peer until it does")
            return False

    async def discover(self) -> list[bytes]:
        """Heartbeat envelopes of the members that the DHT knows: signed by their authors, of this run, mere hints."""
        try:
            async with async_timeout.timeout(DHT_SECONDS):
                return await self._dht().discover()
        except asyncio.TimeoutError:
            self._handlers.on_warning("the DHT did not answer: new members may not be found until it does")
            return []

    def _dht(self) -> Presence:
        if self._presence is None:
            raise PeerUnreachable("the network side of this peer is not running")
        return self._presence

    # -- the end -------------------------------------------------------------------------------------------------

    async def wait_lost(self) -> str:
        """Returns, with the cause, when libp2p's daemon has ended by itself: this Swarm is done for, start another."""
        return await asyncio.shield(self._daemon.lost)

    async def stop(self) -> None:
        """Hang up, end the daemon, remove its files; within 5 s. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._links.close()
        if self._presence is not None:
            self._presence.stop()
        await self._daemon.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
