"""The requesting side of blob streams: one stream per peer and priority, shared by all fetches.

A slot is the right to have one more request under way on a stream. As many slots are given out as the stream's
`CongestionController` allows. Only HELD replies that nobody has dealt with yet are in memory; the others wait at the
other side. A stream that breaks is a value, `Lost`, for everything that was requested on it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import async_timeout

from peer.swarm.errors import PeerUnreachable
from peer.swarm.pace import Pace
from peer.swarm.transfer.actions import Priority
from peer.swarm.transfer.congestion import CongestionController, SentMark
from peer.swarm.transfer.frames import (
    CLIENT_IDLE_SECONDS,
    REPLY_PREFIX_BYTES,
    BlobReply,
    BlobRequest,
    Lost,
    parse_reply_prefix,
)
from peer.swarm.transport import ByteCount
from protocol.bounded import BoundedDict
from protocol.errors import MalformedError
from protocol.ids import PeerKey
from protocol.merkle import CHUNK

OpenStream = Callable[[PeerKey, float], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """When a stream is dead, and how many stay open.

    A stream is dead when less than PIECE arrives in `reply_seconds` while a reply is due. It is dead, too, when one
    reply takes `slow_replies` times that: 256 KiB in 60 s are 35 kbit/s. A stream is kept for the next round, which is
    minutes away: a new one costs a round trip, and the measurements of the network path.
    """

    open_seconds: float = 10
    reply_seconds: float = 15
    slow_replies: float = 4
    idle_seconds: float = CLIENT_IDLE_SECONDS
    streams: int = 192


EARLY_BLOBS = 8
"""Blobs of which a few chunks may be in memory before their hashes are known."""

PIECE = 64 * 1024
"""Bytes read at once. libp2p's daemon gives a few thousand at a time, and a deadline for each of those costs more."""

REMEMBERED = 1024
"""Streams that have ended whose loaded latency is remembered."""

HELD = 2
"""Replies of one stream that are in memory at once, besides the one that is arriving."""

ATTEMPTS = 3
"""Streams opened for one slot, if each ends before the slot is there."""


def _expected(priority: Priority) -> int:
    """Return the bytes that a request will bring."""
    return 0 if priority is Priority.QUERY else CHUNK


@dataclass(slots=True)
class _Pending:
    limit: int
    mark: SentMark
    answer: asyncio.Future[BlobReply | Lost]


class Stream:
    """An open stream to one peer."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: StreamLimits,
        traffic: ByteCount,
        pace: Pace,
        expected: int = 0,
    ):
        """Start to read. `pace` lets the bytes through that a slot stands for (`expected`) before it is given."""
        self._pace = pace
        self._expected = expected
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._traffic = traffic
        self.congestion = CongestionController()
        self.gave = False
        """A correct chunk has arrived on it."""
        self._taken = 0
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._pending: deque[_Pending] = deque()
        self._held = asyncio.Semaphore(HELD)
        self._wake = asyncio.Event()
        self._lost: Lost | None = None
        self._task = asyncio.ensure_future(self._read_replies())

    @property
    def alive(self) -> bool:
        """False once it broke, or the other side closed it while it was idle and nobody read from it."""
        return self._lost is None and not (self.idle and self._reader.at_eof())

    @property
    def idle(self) -> bool:
        """True while nothing is requested and no slot is taken."""
        return not self._pending and not self._taken

    # -- slots -------------------------------------------------------------------------------------------------------

    async def take_slot(self) -> bool:
        """Wait for a slot, first come, first served; return False when the stream has ended. Return it by `free`."""
        if self._lost is not None:
            return False
        if self._taken < self.congestion.window and not self._waiting:
            self._taken += 1
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self._release()  # it was given at the same instant
            raise

    def free(self) -> None:
        """Return a slot. The bytes of its reply were counted when they came."""
        self._pace.give_back(self._expected)
        self._release()

    def _release(self) -> None:
        self._taken -= 1
        self._give_slots()

    def _give_slots(self) -> None:
        while self._waiting and self._taken < self.congestion.window:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(True)

    # -- requests ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def request(self, request: BlobRequest, limit: int) -> AsyncIterator[BlobReply | Lost]:
        """Yield the reply, of at most `limit` bytes. The caller has a slot. Few others are read while it is held."""
        if self._lost is not None:
            yield Lost("the stream broke")
            return
        answer: asyncio.Future[BlobReply | Lost] = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(limit, self._mark(), answer))
        self._writer.write(request.encode())  # no drain: a window of requests is a few kilobytes
        self._wake.set()
        try:
            yield await answer
        finally:
            if not answer.done():
                answer.cancel()
            if answer.cancelled():
                self._close_if_abandoned()
            elif isinstance(answer.result(), BlobReply):
                self._held.release()

    def _mark(self) -> SentMark:
        now, full = asyncio.get_running_loop().time(), self._taken >= self.congestion.window
        return self.congestion.sent(now, len(self._pending) + 1, full)

    def _close_if_abandoned(self) -> None:
        """Close the stream if many replies are to come and nobody waits for any: they would delay later ones."""
        if len(self._pending) > HELD and all(p.answer.done() for p in self._pending):
            self.close("nobody waits for what was asked")

    def close(self, reason: str = "closed") -> None:
        """Close the stream. All requests on it are lost, with this reason."""
        self._task.cancel()
        self._fail(Lost(reason))

    async def _read_replies(self) -> None:
        try:
            while True:
                if not self._pending:
                    self._wake.clear()
                    async with async_timeout.timeout(self._limits.idle_seconds):
                        await self._wake.wait()
                await self._held.acquire()
                pending = self._pending[0]
                reply = await self._read_reply(pending.limit)
                if self._lost is not None:
                    return  # closed at the same instant
                self._pending.popleft()
                self._traffic.down += len(reply.data)
                self._pace.give_back(-len(reply.data))
                self.congestion.received(pending.mark, len(reply.data), asyncio.get_running_loop().time())
                self._give_slots()
                if pending.answer.done():
                    self._held.release()
                else:
                    pending.answer.set_result(reply)
        except asyncio.TimeoutError:
            self._fail(Lost(f"no answer in {self._limits.reply_seconds:.0f} s" if self._pending else "idle"))
        except MalformedError as e:
            self._fail(Lost(str(e), hostile=True))
        except (asyncio.IncompleteReadError, OSError):
            self._fail(Lost("the stream broke"))

    async def _read_reply(self, limit: int) -> BlobReply:
        """Read one reply. Raises TimeoutError, IncompleteReadError, OSError, MalformedError."""
        end = asyncio.get_running_loop().time() + self._limits.slow_replies * self._limits.reply_seconds
        status, length = parse_reply_prefix(await self._read(REPLY_PREFIX_BYTES, end), limit)
        return BlobReply(status, await self._read(length, end))

    async def _read(self, size: int, end: float) -> bytes:
        pieces, left = [], size
        while left:
            within = min(self._limits.reply_seconds, end - asyncio.get_running_loop().time())
            async with async_timeout.timeout(within):
                piece = await self._reader.readexactly(min(left, PIECE))
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _fail(self, lost: Lost) -> None:
        if self._lost is None:
            self._lost = lost
        self._writer.close()
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(False)
        self._waiting.clear()
        while self._pending:
            pending = self._pending.popleft()
            if not pending.answer.done():
                pending.answer.set_result(self._lost)


@dataclass
class StreamPool:
    """The open streams to all peers."""

    open_stream: OpenStream
    traffic: ByteCount
    limits: StreamLimits = field(default_factory=StreamLimits)
    pace: Pace = field(default_factory=Pace)
    _streams: dict[tuple[PeerKey, Priority], Stream] = field(default_factory=dict)
    _opening: dict[tuple[PeerKey, Priority], asyncio.Lock] = field(default_factory=dict)
    _latencies: BoundedDict[tuple[PeerKey, Priority], float] = field(default_factory=lambda: BoundedDict(REMEMBERED))
    early_blobs: int = 0
    """Blobs of which chunks may be in memory before their hashes are known."""
    _closed: bool = False

    def reserve_early(self) -> bool:
        """Return whether chunks of one more blob may be requested before their hashes are known; see `return_early`."""
        free = self.early_blobs < EARLY_BLOBS
        self.early_blobs += free
        return free

    def return_early(self) -> None:
        """Return what `reserve_early` gave."""
        self.early_blobs -= 1

    async def slot(self, peer: PeerKey, priority: Priority) -> Stream | Lost:
        """Wait until one more request to a peer may be under way; return the stream with the slot taken."""
        name, expected = (peer, priority), _expected(priority)
        await self.pace.take(expected)
        slot: Stream | Lost | None = None
        try:
            slot = await self._slot(name)
            return slot
        finally:
            if not isinstance(slot, Stream):
                self.pace.give_back(expected)

    async def _slot(self, name: tuple[PeerKey, Priority]) -> Stream | Lost:
        peer, priority = name
        for _ in range(ATTEMPTS):
            try:
                stream = self._live(peer, priority) or await self._open(peer, priority)
            except PeerUnreachable as e:
                return Lost(str(e))
            if name in self._streams:
                self._streams[name] = self._streams.pop(name)  # now the most recently used
            if await stream.take_slot():
                return stream
        return Lost("the streams to it end as soon as they are open")

    async def request(self, peer: PeerKey, priority: Priority, request: BlobRequest, limit: int) -> BlobReply | Lost:
        """Make one request to a peer; return its reply, of at most `limit` bytes."""
        slot = await self.slot(peer, priority)
        if isinstance(slot, Lost):
            return slot
        try:
            async with slot.request(request, limit) as reply:
                return reply
        finally:
            slot.free()

    def latency(self, peer: PeerKey, priority: Priority) -> float:
        """Return the seconds that a reply of this peer takes on the open stream; 0 when that is not known."""
        stream = self._live(peer, priority)
        return stream.congestion.latency if stream is not None else 0.0

    def loaded_latency(self, peer: PeerKey, priority: Priority) -> float:
        """Return `CongestionController.loaded_latency` of the open stream, or of the last one; 0 when not known."""
        stream = self._live(peer, priority)
        return stream.congestion.loaded_latency if stream is not None else self._latencies.get((peer, priority), 0.0)

    def note_correct_chunk(self, peer: PeerKey, priority: Priority) -> None:
        """Note that a correct chunk has arrived on the open stream."""
        if (stream := self._live(peer, priority)) is not None:
            stream.gave = True

    def has_given(self, peer: PeerKey, priority: Priority) -> bool:
        """Return whether a correct chunk has arrived on the open stream."""
        stream = self._live(peer, priority)
        return stream is not None and stream.gave

    def _live(self, peer: PeerKey, priority: Priority) -> Stream | None:
        stream = self._streams.get((peer, priority))
        if stream is None or stream.alive:
            return stream
        self._drop((peer, priority), "the other side has closed it")
        return None

    def _drop(self, name: tuple[PeerKey, Priority], reason: str) -> None:
        """Close a stream and remember its loaded latency: the streams of slow peers are the ones that end often."""
        stream = self._streams.pop(name)
        stream.close(reason)
        if stream.congestion.loaded_latency:
            self._latencies.renew(name, stream.congestion.loaded_latency)

    def hang_up(self, peer: PeerKey) -> None:
        """Close the streams to a peer: what it still sends is not wanted."""
        for (other, _), stream in self._streams.items():
            if other == peer:
                stream.close("hung up")

    async def _open(self, peer: PeerKey, priority: Priority) -> Stream:
        """Open a stream, unless another task has. Raises PeerUnreachable."""
        name = (peer, priority)
        lock = self._opening.setdefault(name, asyncio.Lock())
        async with lock:
            if (stream := self._live(peer, priority)) is not None:
                return stream
            self._sweep()
            reader, writer = await self.open_stream(peer, self.limits.open_seconds)
            stream = self._streams[name] = Stream(
                reader, writer, self.limits, self.traffic, self.pace, _expected(priority)
            )
            stream.congestion.loaded_latency = self._latencies.get(name, 0.0)
            if self._closed:
                stream.close()
                raise PeerUnreachable("the swarm is stopping")
            return stream

    def _sweep(self) -> None:
        """Forget dead streams, and close the longest unused idle ones while there are too many."""
        for peer, priority in list(self._streams):
            self._live(peer, priority)
        for name in [n for n, stream in self._streams.items() if stream.idle]:
            if len(self._streams) < self.limits.streams:
                break
            self._drop(name, "too many streams")
        for name in [n for n, lock in self._opening.items() if n not in self._streams and not lock.locked()]:
            del self._opening[name]

    def close(self) -> None:
        """Close all streams, and those that are opened later."""
        self._closed = True
        for stream in self._streams.values():
            stream.close("the swarm is stopping")
        self._streams.clear()
