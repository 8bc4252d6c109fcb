"""The swarm as the node sees it: send packets, request the chain, fetch and serve blobs, be found and find others."""

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
from google.protobuf.message import Message

from peer.store import Store
from peer.swarm.addresses import announceable, dial_addresses
from peer.swarm.errors import PacketTooLarge, PeerRefused, PeerUnreachable, SwarmStartError, short_report
from peer.swarm.libp2p import DAEMON_ERRORS, START_SECONDS, Libp2pTransport
from peer.swarm.pace import Paces
from peer.swarm.rate_limiter import CallLimits, RateLimiter
from peer.swarm.transfer.blob_server import BlobServer, ServeLimits, ServeRefusal
from peer.swarm.transfer.fetch import Fetch, OnBad
from peer.swarm.transfer.streams import StreamLimits, StreamPool
from peer.swarm.transport import ByteCount, Call, Presence, Transport, call_name
from protocol.bounded import BoundedDict
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, RunId
from protocol.messages import MAX_ADDRESSES, MAX_CERTIFICATES, MAX_MESSAGES
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

MAX_PACKET = 4 * 1024 * 1024 - 16 * 1024
"""Bytes of a serialised Packet or ChainReply: what a unary call of the transport carries, less its framing."""

DIAL_SECONDS = REPLY_SECONDS = 10
DHT_SECONDS = 20
DIALS = 16
"""Peers dialled at once."""

MAX_TO_DIAL = 1024
"""Addresses considered in one `connect`."""

CALLS_OUT = 64
"""Calls under way to all peers that answered the last one, and as many to all others.

Anybody can make keys, accept calls, and not answer them."""

ANSWERING = CallLimits().senders
"""Peers that are remembered because they answered."""

CALLS_TO_ONE = CallLimits().concurrent_per_sender // 2
"""Calls under way to one peer: half of what it admits, since the DHT's come on top."""

MESSAGE_COST = 4096
"""Bytes that a message counts for besides its own: checking a signature takes 0.2 ms of a core."""

SIGNED_BYTES = 256
"""Bytes of a record or a certificate for which one more signature is counted: a vote, or a header that it lists."""

RECORD_COST = 8 * MESSAGE_COST
"""The same of a record beside its signatures: checking its author's proof takes 1.3 ms."""

RECORD_FACTOR = 4
"""Records and certificates count four times: one sender takes a fifth of a core by them."""

_RECORD = wire.Envelope(kind="round-record").SerializeToString()
"""The beginning of a record's envelope."""

STRANGER_PACKETS = 2
"""Packets of strangers handled at once."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Handlers:
    """The node's handling of what arrives.

    `on_packet`, `on_chain_request` and `serve_refusal` may be coroutine functions or plain ones.

    The transport has proved the sender's key. Nothing in a message has been checked.
    """

    on_packet: Callable[[PeerKey, wire.Packet], Awaitable[None] | None]
    on_chain_request: Callable[[PeerKey, wire.ChainRequest], Awaitable[wire.ChainReply] | wire.ChainReply]
    serve_refusal: ServeRefusal
    """Returns None if the requester may have the blob, otherwise the reason. Called for every chunk: keep it cheap."""
    on_blob_requested: Callable[[Digest, PeerKey], None] = lambda blob, requester: None
    """Called for every request for a blob that `serve_refusal` admitted."""
    on_header_request: Callable[[wire.Packet], wire.Packet] = lambda names: wire.Packet()
    """Returns headers that our compact records name, by their ids. Raises CairnError."""
    on_warning: Callable[[str], None] = log.warning
    """A fault that the user should know of; the swarm continues."""
    on_coordinator_address_request: Callable[[wire.CoordinatorAddressRequest], wire.CoordinatorAddressReply] = (
        lambda _: wire.CoordinatorAddressReply()
    )
    """Answers anybody's request for the coordinator's address."""
    is_known: Callable[[PeerKey], bool] = lambda key: True
    """Says if a key belongs to a known member. All other senders share small limits: anybody can make keys."""


@dataclass(frozen=True, slots=True)
class SwarmLimits:
    """All bounds of the network side. The defaults suit a home machine and rounds of up to some hundred members."""

    calls: CallLimits = field(default_factory=CallLimits)
    serve: ServeLimits = field(default_factory=ServeLimits)
    streams: StreamLimits = field(default_factory=StreamLimits)


class Swarm:
    """One peer's connection to the other members of one run. Made by `start` or `over`; lives in its event loop."""

    def __init__(
        self,
        key: PeerKey,
        run: RunId,
        transport: Transport,
        limiter: RateLimiter,
        store: Store,
        handlers: Handlers,
        limits: SwarmLimits,
        paces: Paces,
    ):
        self.key = key
        self.run = run
        self.transport = transport
        self._limiter = limiter
        self._store = store
        self._handlers = handlers
        self._traffic = ByteCount()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="cairn-blobs")
        self._streams = StreamPool(self.open_blob_stream, self._traffic, limits.streams, paces.down)
        self.server = BlobServer(
            store, handlers.serve_refusal, self._threads, self._traffic, limits.serve, handlers.is_known,
            handlers.on_blob_requested, paces.up,
        )  # fmt: skip
        self._calls_out = {answers: asyncio.Semaphore(CALLS_OUT) for answers in (True, False)}
        self._answering: BoundedDict[PeerKey, None] = BoundedDict(ANSWERING)
        """Peers that answered the last call."""
        self._calls_to: WeakValueDictionary[PeerKey, asyncio.Semaphore] = WeakValueDictionary()
        self._dials, self._dials_soon = asyncio.Semaphore(DIALS), asyncio.Semaphore(DIALS)
        self._stranger_packets = asyncio.Semaphore(STRANGER_PACKETS)
        self._fetches: set[asyncio.Task[None]] = set()
        self._entering: set[asyncio.Task[PeerKey | None]] = set()
        """Dials of the `initial` addresses."""
        self._addresses: list[str] = []
        self.presence: Presence | None = None
        """Our place in the DHT, once it is joined."""
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
        paces: Paces | None = None,
        start_seconds: float = START_SECONDS,
    ) -> Swarm:
        """Listen by libp2p, join the DHT by the `initial` addresses (those of other peers), and accept calls.

        `announce` replaces the addresses that the machine sees itself. A private folder for the daemon's sockets is
        made in `folder` (default: the system's temporary folder). `paces` bound the bytes a second of blobs. The start
        ends at the first answer of `initial`; the other dials go on. It is a warning, not an error, if nobody answers:
        `connect` may be called again at any time. Raises SwarmStartError.
        """
        limits = limits or SwarmLimits()
        paces = paces or Paces()
        limiter = RateLimiter(limits.calls, handlers.is_known, lambda: paces.up.rate)
        transport = await Libp2pTransport.start(
            identity, listen=listen, announce=announce, folder=folder, limiter=limiter, start_seconds=start_seconds
        )
        return await cls.over(
            transport, limiter, identity.key, run, store=store, handlers=handlers, initial=initial, limits=limits,
            paces=paces,
        )  # fmt: skip

    @classmethod
    async def over(
        cls,
        transport: Transport,
        limiter: RateLimiter,
        key: PeerKey,
        run: RunId,
        *,
        store: Store,
        handlers: Handlers,
        initial: Sequence[str] = (),
        limits: SwarmLimits | None = None,
        paces: Paces | None = None,
    ) -> Swarm:
        """Join the swarm over a transport of this key, whose incoming calls `limiter` admits. See `start`."""
        self = cls(key, run, transport, limiter, store, handlers, limits or SwarmLimits(), paces or Paces())
        try:
            async with async_timeout.timeout(START_SECONDS):  # hivemind waits for ever for a daemon that ends now
                await self._begin(handlers.on_warning)
            if initial and not await self._enter(initial):
                handlers.on_warning(
                    "none of the addresses to enter the swarm by answers yet; trying goes on. If it stays so: is this "
                    "machine online, and does a firewall let it out?"
                )
        except asyncio.TimeoutError:
            await self.stop()
            raise SwarmStartError(f"libp2p's daemon did not answer for {START_SECONDS:.0f} s: try again") from None
        except DAEMON_ERRORS as e:
            await self.stop()
            why = short_report(str(e)) or type(e).__name__
            raise SwarmStartError(
                f"libp2p's daemon ended during the start, or refused a request: {why}; try again"
            ) from None
        except BaseException:
            await self.stop()
            raise
        return self

    async def _begin(self, warn: Callable[[str], None]) -> None:
        """Take part in the DHT, and accept calls and streams."""
        run, transport = self.run, self.transport
        self.presence = await transport.join_dht(run, warn)
        await transport.accept_calls(call_name(run, "packet"), wire.Packet, self._take_packet)
        await transport.accept_calls(call_name(run, "chain"), wire.ChainRequest, self._take_chain_request)
        await transport.accept_calls(call_name(run, "headers"), wire.Packet, self._take_header_request)
        await transport.accept_calls(
            call_name(run, "coordinator-address"),
            wire.CoordinatorAddressRequest,
            self._take_coordinator_address_request,
        )
        await transport.accept_streams(call_name(run, "blob"), self.server.handle)
        await self.refresh_addresses()

    # -- addresses and connections -------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """The multiaddresses (with /p2p/) at which others can dial this peer, as of the last `refresh_addresses`."""
        return list(self._addresses)

    async def refresh_addresses(self) -> list[str]:
        """Ask the transport again: its view changes as other peers report how they see this machine."""
        visible = await self.transport.addresses(DIAL_SECONDS)
        if visible is not None:
            self._addresses = announceable(visible)[:MAX_ADDRESSES]
        return self.addresses

    @property
    def bytes_up(self) -> int:
        return self._traffic.up

    @property
    def bytes_down(self) -> int:
        return self._traffic.down

    @property
    def clock_offset(self) -> float | None:
        """Seconds by which the other members' clocks are ahead of ours; None before anybody answered."""
        return self.presence.clock_offset if self.presence is not None else None

    async def connect(self, addresses: Iterable[str], *, soon: bool = False) -> list[PeerKey]:
        """Dial the peers at these addresses (several may be of one peer); return those that answered.

        Malformed addresses are skipped. With `soon`, the dials do not queue behind those of other calls.
        """
        dials = self._dials_soon if soon else self._dials
        found = await asyncio.gather(*(self._dial(peer, at, dials) for peer, at in self._by_peer(addresses).items()))
        return [peer for peer in found if peer is not None]

    async def _enter(self, addresses: Iterable[str]) -> bool:
        """Dial the peers at these addresses until one answers, and return whether one does.

        The other dials go on until `stop`. Those of `connect` do not queue behind them.
        """
        dials = asyncio.Semaphore(DIALS)
        self._entering = {asyncio.create_task(self._dial(p, at, dials)) for p, at in self._by_peer(addresses).items()}
        while self._entering:
            done, self._entering = await asyncio.wait(self._entering, return_when=asyncio.FIRST_COMPLETED)
            if any(await asyncio.gather(*done)):
                for dial in self._entering:
                    dial.add_done_callback(self._dial_ended)
                return True
        return False

    def _dial_ended(self, dial: asyncio.Task[PeerKey | None]) -> None:
        self._entering.discard(dial)
        if not dial.cancelled() and (error := dial.exception()) is not None:
            why = str(error) or type(error).__name__
            self._handlers.on_warning(f"dialling a peer to enter the swarm failed: {why}; the other dials go on")

    def _by_peer(self, addresses: Iterable[str]) -> dict[PeerKey, list[str]]:
        """Return the addresses to dial of each other peer, without the malformed ones."""
        by_peer: dict[PeerKey, list[str]] = {}
        for text in list(addresses)[:MAX_TO_DIAL]:
            try:
                peer, to_dial = dial_addresses(text)
            except MalformedError as e:
                log.info("%s", e)
                continue
            if peer != self.key and len(by_peer.setdefault(peer, [])) < 2 * MAX_ADDRESSES:
                by_peer[peer] += to_dial
        return by_peer

    async def _dial(self, peer: PeerKey, addresses: Sequence[str], dials: asyncio.Semaphore) -> PeerKey | None:
        """Dial a peer, and return it; None when it does not answer."""
        async with dials:
            try:
                await self.transport.dial(peer, addresses, DIAL_SECONDS)
            except PeerUnreachable as e:
                log.debug("%s", e)  # while nobody answers, this is tried each second
                return None
            if self.presence is not None:
                await self.presence.meet(peer)
            return peer

    # -- messages ------------------------------------------------------------------------------------------------

    async def send(self, to: PeerKey, packet: wire.Packet, timeout: float = 10) -> None:
        """Deliver a packet. Raises PeerUnreachable, PeerRefused, PacketTooLarge."""
        await self._call(to, "packet", packet, wire.Ack, timeout)

    async def request_chain(self, to: PeerKey, request: wire.ChainRequest, timeout: float = 20) -> wire.ChainReply:
        """Return a member's certificates after the newest of `have`: unchecked, at most MAX_PACKET bytes.

        Raises PeerUnreachable, PeerRefused, PacketTooLarge.
        """
        return await self._call(to, "chain", request, wire.ChainReply, timeout)

    async def request_headers(self, of: PeerKey, names: wire.Packet) -> wire.Packet:
        """Return headers of a compact record that a member sent: unchecked, at most MAX_PACKET bytes.

        Raises PeerUnreachable, PeerRefused, PacketTooLarge.
        """
        return await self._call(of, "headers", names, wire.Packet, REPLY_SECONDS)

    async def request_coordinator_address(
        self, to: PeerKey, request: wire.CoordinatorAddressRequest
    ) -> wire.CoordinatorAddressReply:
        """Return the coordinator's address as a member has it, unchecked. Raises PeerUnreachable, PeerRefused."""
        return await self._call(to, "coordinator-address", request, wire.CoordinatorAddressReply, REPLY_SECONDS)

    def charge(self, sender: PeerKey, size: int) -> None:
        """Count work that stands for these bytes against a sender's limit, besides those that it sent."""
        self._limiter.charge(sender, size, work=True)

    async def _call(self, to: PeerKey, call: Call, message: Message, reply: type[M], timeout: float) -> M:
        data_size = message.ByteSize()
        if data_size > MAX_PACKET:
            raise PacketTooLarge(f"a message of {data_size:,} bytes: at most {MAX_PACKET:,} fit into one")
        self._check_running()
        turn = self._calls_to.setdefault(to, asyncio.Semaphore(CALLS_TO_ONE))
        try:
            async with async_timeout.timeout(timeout), turn, self._calls_out[to in self._answering]:
                answer = await self.transport.call(to, call_name(self.run, call), message, reply)
            self._answering.renew(to, None)
        except PeerRefused:
            self._answering.renew(to, None)
            raise
        except asyncio.TimeoutError:
            self._answering.pop(to, None)
            raise PeerUnreachable(f"peer {to.short} did not answer in {timeout:g} s") from None
        self._traffic.up += data_size
        self._traffic.down += answer.ByteSize()
        return answer

    def _check_running(self) -> None:
        if self._stopped or self.transport.lost.done():
            raise PeerUnreachable("the network side of this peer is not running")

    async def _take_packet(self, sender: PeerKey, packet: wire.Packet) -> wire.Ack:
        self._traffic.down += packet.ByteSize()
        messages, certificates = len(packet.messages), len(packet.certificates)
        if messages > MAX_MESSAGES or certificates > MAX_CERTIFICATES:
            raise MalformedError(
                f"a packet of {messages:,} messages and {certificates:,} certificates: "
                f"at most {MAX_MESSAGES:,} and {MAX_CERTIFICATES:,} are accepted"
            )
        cost = sum(checking_cost(m, has_record=m.startswith(_RECORD)) for m in packet.messages)
        cost += sum(checking_cost(c, has_record=True) for c in packet.certificates)
        self._limiter.charge(sender, cost, work=True)
        async with AsyncExitStack() as turn:
            if not self._handlers.is_known(sender):
                await turn.enter_async_context(self._stranger_packets)
            done = self._handlers.on_packet(sender, packet)
            if inspect.isawaitable(done):
                await done
        return wire.Ack()

    async def _take_chain_request(self, sender: PeerKey, request: wire.ChainRequest) -> wire.ChainReply:
        self._limiter.check_answers(sender)
        reply = self._handlers.on_chain_request(sender, request)
        if inspect.isawaitable(reply):
            try:
                reply = await reply
            except asyncio.CancelledError:
                self._limiter.charge(sender, MAX_PACKET, work=True)  # it was read, perhaps, and nobody takes it
                raise
            self._limiter.check_answers(sender)  # others of its answers may have been charged meanwhile
        if reply.ByteSize() > MAX_PACKET:
            raise PacketTooLarge(f"the reply has {reply.ByteSize():,} bytes: at most {MAX_PACKET:,} fit into one")
        self._limiter.charge_answer(sender, reply.ByteSize())
        self._count(request, reply)
        return reply

    async def _take_header_request(self, sender: PeerKey, names: wire.Packet) -> wire.Packet:
        self._limiter.check_answers(sender)
        reply = self._handlers.on_header_request(names)
        self._limiter.charge_answer(sender, reply.ByteSize())
        self._count(names, reply)
        return reply

    async def _take_coordinator_address_request(
        self, sender: PeerKey, request: wire.CoordinatorAddressRequest
    ) -> wire.CoordinatorAddressReply:
        self._limiter.check_answers(sender)
        reply = self._handlers.on_coordinator_address_request(request)
        self._limiter.charge_answer(sender, reply.ByteSize())
        self._count(request, reply)
        return reply

    def _count(self, request: Message, reply: Message) -> None:
        self._traffic.down += request.ByteSize()
        self._traffic.up += reply.ByteSize()

    # -- blobs ---------------------------------------------------------------------------------------------------

    async def fetch_blob(
        self,
        digest: Digest,
        size: int,
        providers: Sequence[PeerKey],
        *,
        deadline_seconds: float,
        on_bad: OnBad = lambda peer, reason: None,
        chunks: Collection[int] | None = None,
    ) -> None:
        """Fetch a blob into the store from these providers, the likeliest first. Return at once if it is there.

        `size` is the size in bytes that somebody signed for. A provider that is proved to send wrong bytes is dropped,
        and `on_bad(provider, reason)` called once. The chunks of a blob that could not be had whole are kept for the
        next attempt.

        With `chunks` only these are fetched. They are then in the store's in-progress blob (`Store.in_progress`), which
        is served to others like any that arrives. Raises BlobFetchError (with a reason for each provider), StoreError,
        and PeerUnreachable when the swarm stops.
        """
        self._check_running()
        fetch = Fetch(
            self._streams, self._store, self._threads, digest, size, [p for p in providers if p != self.key],
            me=self.key, on_bad=on_bad, chunks=chunks,
        )  # fmt: skip
        running = asyncio.ensure_future(fetch.run(deadline_seconds))
        self._fetches.add(running)
        try:
            await asyncio.wait([running])
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self._fetches.discard(running)
        if running.cancelled():
            raise PeerUnreachable("the network side of this peer is stopping")
        running.result()

    async def open_blob_stream(
        self, peer: PeerKey, seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to a peer's blob server. Raises PeerUnreachable."""
        return await self.transport.open_stream(peer, call_name(self.run, "blob"), seconds)

    # -- presence ------------------------------------------------------------------------------------------------

    async def publish(self, heartbeat: bytes, seconds: float = 60) -> bool:
        """Keep our heartbeat (an envelope) in the DHT for a time, at most about two minutes.

        Return False when there are other members and none accepted it; `on_warning` then gets the reason, if known.
        """
        try:
            async with async_timeout.timeout(DHT_SECONDS):
                return await self._dht().publish(self.key, heartbeat, seconds)
        except asyncio.TimeoutError:
            self._handlers.on_warning("the DHT did not answer: others may not find this peer until it does")
            return False

    async def discover(self) -> list[bytes]:
        """Return heartbeat envelopes of members in the DHT: signed by their authors, of this run, mere hints."""
        try:
            async with async_timeout.timeout(DHT_SECONDS):
                return await self._dht().discover()
        except asyncio.TimeoutError:
            self._handlers.on_warning("the DHT did not answer: new members may not be found until it does")
            return []

    def _dht(self) -> Presence:
        if self.presence is None:
            raise PeerUnreachable("the network side of this peer is not running")
        return self.presence

    # -- the end -------------------------------------------------------------------------------------------------

    async def wait_lost(self) -> str:
        """Return the cause when the transport has ended by itself. This Swarm cannot be used any more."""
        return await asyncio.shield(self.transport.lost)

    async def stop(self) -> None:
        """Close all connections and the transport, and remove its files, within 5 s. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        first = {*self._fetches, *self._entering}  # they use the streams, the threads and the transport
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        self._streams.close()
        if self.presence is not None:
            self.presence.stop()
        await self.transport.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)


def checking_cost(message: bytes, *, has_record: bool) -> int:
    """Return the bytes that a message counts for besides its own, by the time that it takes to check it."""
    if not has_record:
        return MESSAGE_COST
    return RECORD_FACTOR * (RECORD_COST + MESSAGE_COST * (len(message) // SIGNED_BYTES))
