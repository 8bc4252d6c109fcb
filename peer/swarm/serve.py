"""The serving side of blob streams: answers in order, within limits, and only what the requester may have."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import async_timeout

from peer.store import BlobMissing, Store, StoreError
from peer.swarm.clock import clock
from peer.swarm.frames import (
    BITS_PER_PAGE,
    LEAVES_PER_PAGE,
    REQUEST_BYTES,
    Op,
    Reply,
    Request,
    Status,
    encode_size,
    parse_request,
    refusal,
)
from peer.swarm.traffic import Traffic
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1

MayServe = Callable[[Digest, PeerKey], "str | None | Awaitable[str | None]"]


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Bounds on what others may have open here. Memory: (streams) x (read_ahead + 2) chunks at the very most."""

    streams_per_peer: int = 8
    strangers: int = 64
    """Streams of all those together who are not known as members: anybody can make keys. Beyond it one of theirs that
    is idle is closed for a new one, as beyond `streams`."""
    streams: int = 256
    """Beyond it the one that was idle the longest is closed for a new one, if it was so for `rest_seconds`; until then
    as many again wait, for `room_seconds`."""
    rest_seconds: float = 0.5
    room_seconds: float = 5
    read_ahead: int = 2
    idle_seconds: float = 1800
    write_seconds: float = 20
    linger_seconds: float = 1
    """How long a stream is kept open after last words, unless the other side hangs up: libp2p's daemon resets a stream
    of QUIC's that is closed, and what is not there yet is lost."""
    lingering: int = 64


@dataclass(eq=False, slots=True)
class _Stream:
    peer: PeerKey
    answers: asyncio.Queue[asyncio.Future[Reply] | None]
    since: float
    """It is idle since then, unless something is unanswered."""
    unanswered: int = 0
    closing: bool = False
    senseless: bool = False
    """It asked for what makes no sense, and is told so before it ends."""


class BlobServer:
    """Serves the store's blobs, complete or arriving, to whom `may_serve` lets have them."""

    def __init__(
        self,
        store: Store,
        may_serve: MayServe,
        executor: Executor,
        traffic: Traffic,
        limits: ServeLimits,
        is_known: Callable[[PeerKey], bool] = lambda peer: True,
        on_requested: Callable[[Digest, PeerKey], None] = lambda blob, peer: None,
    ):
        self._store = store
        self._may_serve = may_serve
        self._executor = executor
        self._traffic = traffic
        self._limits = limits
        self._is_known = is_known
        self._on_requested = on_requested
        self._streams: Counter[PeerKey] = Counter()
        self._open: set[_Stream] = set()
        self._waiting = 0
        self._lingering = 0

    async def handle(self, peer: PeerKey, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream, until it is idle, breaks, or asks for what makes no sense."""
        limits = self._limits
        if self._streams[peer] >= limits.streams_per_peer or self._waiting >= limits.streams:
            await self._turn_away(reader, writer)
            return
        self._streams[peer] += 1
        try:
            if await self._room(peer):
                await self._serve(peer, reader, writer)
            else:
                await self._turn_away(reader, writer)
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _serve(self, peer: PeerKey, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limits = self._limits
        answers: asyncio.Queue[asyncio.Future[Reply] | None] = asyncio.Queue(limits.read_ahead)
        stream = _Stream(peer, answers, clock())
        self._open.add(stream)
        reading = asyncio.ensure_future(self._read_requests(peer, reader, stream))
        try:
            while (answer := await answers.get()) is not None:
                await self._write(writer, await answer)
                stream.unanswered -= 1
                stream.since = clock()
            if stream.senseless:
                await self._linger(reader)
        finally:
            self._open.discard(stream)
            reading.cancel()
            while not answers.empty():
                if (left := answers.get_nowait()) is not None:
                    left.cancel()

    async def _room(self, peer: PeerKey) -> bool:
        """Wait a little until one more stream of this peer's may be open."""
        self._waiting += 1
        try:
            for _ in range(max(1, int(self._limits.room_seconds / LOOK_SECONDS))):
                if self._has_room(peer):
                    return True
                await asyncio.sleep(LOOK_SECONDS)
            return False
        finally:
            self._waiting -= 1

    def _has_room(self, peer: PeerKey) -> bool:
        """Whether one more stream may be open, which may mean that an idle one is closed."""
        there, limit = [s for s in self._open if not s.closing], self._limits.streams
        if not self._is_known(peer):
            strange = [s for s in there if not self._is_known(s.peer)]
            if len(strange) >= self._limits.strangers:
                there, limit = strange, self._limits.strangers
        if len(there) < limit:
            return True
        resting = [s for s in there if not s.unanswered and s.answers.empty()]
        oldest = min(resting, key=lambda s: s.since, default=None)
        if oldest is None or clock() - oldest.since < self._limits.rest_seconds:
            return False
        oldest.closing = True
        oldest.answers.put_nowait(None)
        return True

    async def _read_requests(self, peer: PeerKey, reader: asyncio.StreamReader, stream: _Stream) -> None:
        answers = stream.answers
        try:
            while True:
                async with async_timeout.timeout(self._limits.idle_seconds):
                    frame = await reader.readexactly(REQUEST_BYTES)
                request = parse_request(frame)
                stream.unanswered += 1
                await answers.put(asyncio.ensure_future(self._answer(peer, request)))
        except MalformedError as e:
            log.warning("peer %s sent what is no request for a blob: its stream is closed", peer.short)
            stream.senseless = True
            bad: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            bad.set_result(refusal(Status.BAD_REQUEST, str(e)))
            await answers.put(bad)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):
            pass  # idle, or closed by the other side: the ordinary ends of a stream
        await answers.put(None)

    async def _write(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        """Raises TimeoutError when the other side does not read."""
        writer.writelines((reply.head(), reply.data))
        async with async_timeout.timeout(self._limits.write_seconds):
            await writer.drain()
        self._traffic.up += len(reply.data)

    async def _turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._write(writer, refusal(Status.BUSY, "too many streams"))
        await self._linger(reader)

    async def _linger(self, reader: asyncio.StreamReader) -> None:
        """Time for last words to get there. What comes meanwhile is not looked at."""
        if self._lingering >= self._limits.lingering:
            return
        self._lingering += 1
        try:
            async with async_timeout.timeout(self._limits.linger_seconds):
                await _drain(reader)
        except (asyncio.TimeoutError, OSError):
            pass
        finally:
            self._lingering -= 1

    async def _answer(self, peer: PeerKey, request: Request) -> Reply:
        try:
            reason = self._may_serve(request.digest, peer)
            if inspect.isawaitable(reason):
                reason = await reason
            if reason is not None:
                return refusal(Status.REFUSED, reason)
            self._on_requested(request.digest, peer)
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._look_up, request)
        except BlobMissing:
            return refusal(Status.MISSING, "not held here")
        except MalformedError as e:
            return refusal(Status.BAD_REQUEST, str(e))
        except StoreError as e:
            log.error("a blob could not be served: %s", e)
            return refusal(Status.BUSY, "the disk fails")
        except Exception:
            log.exception("a blob could not be served")
            return refusal(Status.BUSY, "internal error")

    def _look_up(self, request: Request) -> Reply:
        """In a thread. Raises BlobMissing, MalformedError, StoreError."""
        store, digest, index = self._store, request.digest, request.index
        arriving = store.arriving(digest) if not store.has(digest) else None
        if arriving is None:
            if request.op is Op.SIZE:
                return Reply(Status.OK, encode_size(store.size(digest)))
            if request.op is Op.CHUNK:
                return Reply(Status.OK, store.read_chunk(digest, index))
            leaves = store.leaves(digest)
            if request.op is Op.LEAVES:
                return Reply(Status.OK, b"".join(leaves[index * LEAVES_PER_PAGE : (index + 1) * LEAVES_PER_PAGE]))
            return Reply(Status.OK, _page(b"\xff" * -(-len(leaves) // 8), index))
        if request.op is Op.SIZE:
            return Reply(Status.OK, encode_size(arriving.size))
        if request.op is Op.LEAVES:
            return Reply(Status.OK, b"".join(arriving.leaves[index * LEAVES_PER_PAGE : (index + 1) * LEAVES_PER_PAGE]))
        if request.op is Op.HAVE:
            return Reply(Status.OK, _page(arriving.bitmap(), index))
        if not arriving.has(index):
            return refusal(Status.ABSENT, "not here yet")
        return Reply(Status.OK, arriving.read_chunk(index))


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


def _page(bitmap: bytes, index: int) -> bytes:
    size = BITS_PER_PAGE // 8
    return bitmap[index * size : (index + 1) * size]
