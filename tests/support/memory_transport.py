"""A transport within one event loop: no daemons, no sockets. Streams have a rate, a delay and a bounded buffer.

Each host's uplink is shared evenly by its streams. Calls have the network's delay, and no rate.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from typing import Any, TypeVar

import base58
from google.protobuf.message import Message

from peer.swarm.errors import PeerBusy, PeerRefused, PeerUnreachable, TooBusy
from peer.swarm.rate_limiter import RateLimiter
from peer.swarm.transport import CallHandler, StreamHandler, Transport
from protocol.errors import CairnError
from protocol.ids import PeerKey, RunId

SEGMENT = 16 * 1024
"""Bytes that leave a host at once."""

BUFFER = 1024 * 1024
"""Bytes of a stream that are on their way out: the daemon's buffers and TCP's."""

M = TypeVar("M", bound=Message)


def address_of(key: PeerKey) -> str:
    """Return the address at which a peer of a `MemoryNetwork` is dialled."""
    host = ".".join(str(b) for b in bytes(key)[:3])
    return f"/ip4/10.{host}/tcp/1/p2p/{base58.b58encode(key.libp2p_id).decode()}"


class MemoryNetwork:
    """Hosts at the same distance from each other, `rtt` seconds there and back."""

    def __init__(self, *, rtt: float = 0.0):
        self.rtt = rtt
        self.hosts: dict[PeerKey, MemoryTransport] = {}
        self.heartbeats: dict[tuple[RunId, PeerKey], tuple[bytes, float]] = {}
        """The records in the DHT, with the time of their end."""
        self._tasks: set[asyncio.Future[None]] = set()

    def host(self, key: PeerKey, *, limiter: RateLimiter | None = None, up: float = inf) -> MemoryTransport:
        """Return a new transport of this key, with an uplink of `up` bytes per second."""
        made = self.hosts[key] = MemoryTransport(self, key, limiter or RateLimiter(), up)
        return made

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until it ends."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class MemoryTransport:
    """One host of a `MemoryNetwork`; see `Transport` for the methods."""

    def __init__(self, network: MemoryNetwork, key: PeerKey, limiter: RateLimiter, up: float):
        self.key = key
        self.up = up
        self.reachable = True
        self.pipes: list[Pipe] = []
        """Its ends of all streams that were opened to it or by it."""
        self._network = network
        self._limiter = limiter
        self._calls: dict[str, tuple[type[Message], CallHandler[Any]]] = {}
        self._streams: dict[str, StreamHandler] = {}
        self._lost: asyncio.Future[str] | None = None
        self._queue: deque[Pipe] = deque()
        self._sending: asyncio.Future[None] | None = None

    @property
    def lost(self) -> asyncio.Future[str]:
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        return self._lost

    # -- Transport ---------------------------------------------------------------------------------------------------

    async def dial(self, peer: PeerKey, addresses: Sequence[str], seconds: float) -> None:
        await self._reach(peer, seconds)

    async def call(self, peer: PeerKey, name: str, request: Message, answer: type[M]) -> M:
        other = await self._reach(peer, inf)
        if name not in other._calls:
            raise PeerRefused(f"peer {peer.short} refused: it accepts no such calls")
        kind, handler = other._calls[name]
        try:
            with other._limiter.admit(self.key, request.ByteSize()):
                reply = await handler(self.key, kind.FromString(request.SerializeToString()))
        except CairnError as e:
            raise (PeerBusy if isinstance(e, TooBusy) else PeerRefused)(f"peer {peer.short} refused: {e}") from None
        return answer.FromString(reply.SerializeToString())

    async def accept_calls(self, name: str, request: type[M], handler: CallHandler[M]) -> None:
        self._calls[name] = (request, handler)

    async def open_stream(self, peer: PeerKey, name: str, seconds: float) -> tuple[Any, Any]:
        other = await self._reach(peer, seconds)
        if name not in other._streams:
            raise PeerUnreachable(f"peer {peer.short} accepts no such streams")
        mine, theirs = asyncio.StreamReader(), asyncio.StreamReader()
        out, back = Pipe(self, theirs, self._delay), Pipe(other, mine, self._delay)
        out.other, back.other = back, out
        self.pipes.append(out)
        other.pipes.append(back)
        self._network.spawn(other._serve(self.key, name, theirs, back))
        return mine, out

    async def accept_streams(self, name: str, handler: StreamHandler) -> None:
        self._streams[name] = handler

    async def addresses(self, seconds: float) -> list[str] | None:
        return [address_of(self.key)]

    async def join_dht(self, run: RunId, warn: Callable[[str], None]) -> MemoryPresence:
        return MemoryPresence(self._network, run)

    async def stop(self) -> None:
        self.reachable = False
        self.break_streams()

    # -- faults ------------------------------------------------------------------------------------------------------

    def break_streams(self) -> None:
        """Close all its streams."""
        for pipe in self.pipes:
            pipe.close()

    def lose_power(self) -> None:
        """Send nothing any more, not even the end of a stream."""
        self.reachable = False
        for pipe in self.pipes:
            pipe.cut = pipe.other.cut = True

    # -- inside ------------------------------------------------------------------------------------------------------

    def _delay(self) -> float:
        return self._network.rtt / 2

    async def _reach(self, peer: PeerKey, seconds: float) -> MemoryTransport:
        """Return a peer's transport after one round trip. Raises PeerUnreachable."""
        other = self._network.hosts.get(peer)
        if not self.reachable or other is None or not other.reachable:
            await asyncio.sleep(seconds if seconds < inf else 0)
            raise PeerUnreachable(f"peer {peer.short} could not be reached in {seconds:.0f} s")
        await asyncio.sleep(self._network.rtt)
        return other

    async def _serve(self, peer: PeerKey, name: str, reader: Any, writer: Any) -> None:
        try:
            await self._streams[name](peer, reader, writer)
        except (CairnError, OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def has_to_send(self, pipe: Pipe) -> None:
        """Send what a pipe has, in turn with the others."""
        if pipe not in self._queue:
            self._queue.append(pipe)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        while self._queue:
            pipe = self._queue.popleft()
            if pipe.segments:
                segment = pipe.segments.popleft()
                await asyncio.sleep(len(segment) / self.up)
                pipe.sent(segment)
                if pipe.segments:
                    self._queue.append(pipe)


class Pipe:
    """One direction of a stream: the writer of the side that sends."""

    def __init__(self, sender: MemoryTransport, reader: asyncio.StreamReader, delay: Callable[[], float]):
        self._sender = sender
        self._reader = reader
        self._delay = delay
        self.segments: deque[bytes] = deque()
        self.waiting = 0
        self._room = asyncio.Event()
        self.other: Pipe
        self.closed = False
        self.cut = False

    def write(self, data: bytes) -> None:
        if self.closed:
            return
        self.segments += (bytes(data[i : i + SEGMENT]) for i in range(0, len(data), SEGMENT))
        self.waiting += len(data)
        self._sender.has_to_send(self)

    def writelines(self, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            self.write(piece)

    async def drain(self) -> None:
        while self.waiting > BUFFER and not self.closed:
            self._room.clear()
            await self._room.wait()

    def sent(self, segment: bytes) -> None:
        """Have a segment arrive after the delay: it has left the host."""
        self.waiting -= len(segment)
        self._room.set()
        asyncio.get_running_loop().call_later(self._delay(), self._arrive, segment)

    def _arrive(self, segment: bytes) -> None:
        if not self.closed and not self.cut:
            self._reader.feed_data(segment)

    def close(self) -> None:
        for end in (self, self.other):
            if not end.closed:
                end.closed = True
                end.segments.clear()
                end._room.set()
                end._reader.feed_eof()


class MemoryPresence:
    """A DHT that keeps every heartbeat until its time is over; see `Presence` for the methods."""

    clock_offset = None

    def __init__(self, network: MemoryNetwork, run: RunId):
        self._network = network
        self._run = run

    async def publish(self, author: PeerKey, envelope: bytes, seconds: float) -> bool:
        until = asyncio.get_running_loop().time() + seconds
        self._network.heartbeats[self._run, author] = (envelope, until)
        return True

    async def discover(self) -> list[bytes]:
        now = asyncio.get_running_loop().time()
        kept = self._network.heartbeats.items()
        return [envelope for (run, _), (envelope, until) in kept if run == self._run and until > now]

    async def meet(self, peer: PeerKey) -> bool:
        return peer in self._network.hosts

    def stop(self) -> None:
        pass


_: Callable[..., Transport] = MemoryTransport  # the type checker sees that it is one
