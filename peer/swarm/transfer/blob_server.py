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
from peer.swarm.pace import Pace
from peer.swarm.transfer.frames import (
    BITS_PER_PAGE,
    LEAVES_PER_PAGE,
    REQUEST_BYTES,
    SERVER_IDLE_SECONDS,
    BlobOp,
    BlobReply,
    BlobRequest,
    ReplyStatus,
    encode_size,
    parse_request,
    refusal,
)
from peer.swarm.transport import ByteCount
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.merkle import chunk_count
from protocol.token_bucket import TokenBucket

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""Seconds between two checks for room for one more stream."""

STRANGER_REQUEST = 4096
"""Bytes that a request of a non-member counts for besides its answer: a look-up costs, even one that finds nothing."""

ServeRefusal = Callable[[Digest, PeerKey], "str | None | Awaitable[str | None]"]


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Bounds on what others may have open here. Memory: (streams) x (read_ahead + 2) chunks at the very most."""

    streams_per_peer: int = 8
    strangers: int = 64
    """Streams of all peers together that are not known as members: anybody can make keys.

    Beyond it, one of theirs that is idle is closed for a new one, as beyond `streams`."""
    strangers_bytes_per_second: float = 256 * 1024
    """Bytes sent to all those peers together, so that they leave the uplink to the members: 2 Mbit/s."""
    wait_seconds: float = 5
    """A request that a rate would hold up for longer is refused as busy. It is less than a requester waits."""
    streams: int = 256
    """Beyond it, the stream that was idle the longest is closed for a new one, if it was so for `min_idle_seconds`.

    Otherwise the new one waits for `room_seconds`. At most `streams` of members wait, and `strangers` of others."""
    min_idle_seconds: float = 0.5
    room_seconds: float = 5
    read_ahead: int = 2
    idle_seconds: float = SERVER_IDLE_SECONDS
    write_seconds: float = 20
    linger_seconds: float = 1
    """Seconds a stream stays open after its last reply, unless the other side closes it.

    libp2p's daemon resets a QUIC stream that is closed, and what has not arrived by then is lost."""
    lingering: int = 64


@dataclass(eq=False, slots=True)
class _Served:
    """A stream that another peer has opened."""

    peer: PeerKey
    answers: asyncio.Queue[asyncio.Future[BlobReply] | None]
    since: float
    """It is idle since then, unless something is unanswered."""
    unanswered: int = 0
    closing: bool = False
    malformed: bool = False
    """It carried something else than a request, and ends after a reply that says so."""

    @property
    def is_idle(self) -> bool:
        return not self.unanswered and self.answers.empty()

    def end(self) -> None:
        """Close it once what was requested is answered."""
        self.closing = True
        self.answers.put_nowait(None)


class BlobServer:
    """Serves the store's blobs, whole or in progress.

    `serve_refusal` returns None if a requester may have a blob, otherwise the reason why not. It is called for every
    request, and `on_requested` for those that are admitted.
    """

    def __init__(
        self,
        store: Store,
        serve_refusal: ServeRefusal,
        executor: Executor,
        traffic: ByteCount,
        limits: ServeLimits,
        is_known: Callable[[PeerKey], bool] = lambda peer: True,
        on_requested: Callable[[Digest, PeerKey], None] = lambda digest, peer: None,
        pace: Pace | None = None,
    ):
        self.store = store
        self._pace = pace or Pace()
        self.serve_refusal = serve_refusal
        self.limits = limits
        self.is_known = is_known
        self._on_requested = on_requested
        self._executor = executor
        self._traffic = traffic
        self._streams: Counter[PeerKey] = Counter()
        self._open: set[_Served] = set()
        rate = limits.strangers_bytes_per_second
        self.strangers_budget = TokenBucket(rate, rate, 0.0)
        """Bytes that may be sent now to peers that are not known as members."""
        self._waiting = {True: 0, False: 0}
        """Streams that wait for room: of members, and of others, who never take the places of members here either."""
        self._lingering = 0

    def unanswered(self) -> list[int]:
        """Return the number of unanswered requests of each open stream."""
        return [s.unanswered for s in self._open]

    async def handle(self, peer: PeerKey, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one stream, until it is idle, breaks, or carries something else than requests."""
        limits = self.limits
        known = self.is_known(peer)
        waiting, limit = self._waiting[known], limits.streams if known else limits.strangers
        if self._streams[peer] >= limits.streams_per_peer or waiting >= limit:
            await self._reject(reader, writer)
            return
        self._streams[peer] += 1
        try:
            if await self._room(peer, known):
                await self._serve(peer, reader, writer)
            else:
                await self._reject(reader, writer)
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _serve(self, peer: PeerKey, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limits = self.limits
        answers: asyncio.Queue[asyncio.Future[BlobReply] | None] = asyncio.Queue(limits.read_ahead)
        stream = _Served(peer, answers, _now())
        self._open.add(stream)
        reading = asyncio.ensure_future(self._read_requests(peer, reader, stream))
        try:
            while (answer := await answers.get()) is not None:
                await self._write(writer, await answer)
                stream.unanswered -= 1
                stream.since = _now()
            if stream.malformed:
                await self._linger(reader)
        finally:
            self._open.discard(stream)
            reading.cancel()
            while not answers.empty():
                if (left := answers.get_nowait()) is not None:
                    left.cancel()

    async def _room(self, peer: PeerKey, known: bool) -> bool:
        """Wait up to `room_seconds` until one more stream of this peer may be open; return whether it may."""
        self._waiting[known] += 1
        try:
            for _ in range(max(1, int(self.limits.room_seconds / POLL_SECONDS))):
                if self._has_room(peer):
                    return True
                await asyncio.sleep(POLL_SECONDS)
            return False
        finally:
            self._waiting[known] -= 1

    def _has_room(self, peer: PeerKey) -> bool:
        """Return whether one more stream may be open; an idle one may be closed for it."""
        there, limit = [s for s in self._open if not s.closing], self.limits.streams
        if not self.is_known(peer):
            strange = [s for s in there if not self.is_known(s.peer)]
            if len(strange) >= self.limits.strangers:
                there, limit = strange, self.limits.strangers
        if len(there) < limit:
            return True
        oldest = min((s for s in there if s.is_idle), key=lambda s: s.since, default=None)
        if oldest is None or _now() - oldest.since < self.limits.min_idle_seconds:
            return False
        oldest.end()
        return True

    async def _read_requests(self, peer: PeerKey, reader: asyncio.StreamReader, stream: _Served) -> None:
        answers = stream.answers
        try:
            while True:
                async with async_timeout.timeout(self.limits.idle_seconds):
                    frame = await reader.readexactly(REQUEST_BYTES)
                request = parse_request(frame)
                stream.unanswered += 1
                await answers.put(asyncio.ensure_future(self._answer(peer, request)))
        except MalformedError as e:
            log.warning("peer %s sent something that is not a request for a blob: its stream is closed", peer.short)
            stream.malformed = True
            bad: asyncio.Future[BlobReply] = asyncio.get_running_loop().create_future()
            bad.set_result(refusal(ReplyStatus.BAD_REQUEST, str(e)))
            await answers.put(bad)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):
            pass  # idle, or closed by the other side: the ordinary ends of a stream
        await answers.put(None)

    async def _write(self, writer: asyncio.StreamWriter, reply: BlobReply) -> None:
        """Send a reply. Raises TimeoutError when the other side does not read it."""
        if reply.status is ReplyStatus.OK:  # a refusal waits for no rate
            if self._pace.wait_seconds() > self.limits.wait_seconds:
                reply = refusal(ReplyStatus.BUSY, "its limit on uploads is reached")
            else:
                await self._pace.take(len(reply.data))
        writer.writelines((reply.prefix(), reply.data))
        async with async_timeout.timeout(self.limits.write_seconds):
            await writer.drain()
        self._traffic.up += len(reply.data)

    async def _reject(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._write(writer, refusal(ReplyStatus.BUSY, "too many streams"))
        await self._linger(reader)

    async def _linger(self, reader: asyncio.StreamReader) -> None:
        """Wait until the last reply has had time to arrive. Nothing that is received meanwhile is handled."""
        if self._lingering >= self.limits.lingering:
            return
        self._lingering += 1
        try:
            async with async_timeout.timeout(self.limits.linger_seconds):
                await _drain(reader)
        except (asyncio.TimeoutError, OSError):
            pass
        finally:
            self._lingering -= 1

    async def _answer(self, peer: PeerKey, request: BlobRequest) -> BlobReply:
        try:
            is_stranger, busy = not self.is_known(peer), refusal(ReplyStatus.BUSY, "too many non-members request blobs")
            if is_stranger:  # before the question whether it may: to answer that takes a while, too
                if self.strangers_wait() > self.limits.wait_seconds:
                    return busy
                self.strangers_budget.charge(STRANGER_REQUEST)
            reason = self.serve_refusal(request.digest, peer)
            if inspect.isawaitable(reason):
                reason = await reason
            if reason is not None:
                return refusal(ReplyStatus.REFUSED, reason)
            self._on_requested(request.digest, peer)
            reply = await asyncio.get_running_loop().run_in_executor(self._executor, self.look_up, request)
            if is_stranger:
                if (wait := self.strangers_wait()) > self.limits.wait_seconds:
                    return busy  # others had their turn meanwhile
                self.strangers_budget.charge(len(reply.data))
                await asyncio.sleep(wait)
            return reply
        except BlobMissing:
            return refusal(ReplyStatus.MISSING, "not held here")
        except MalformedError as e:
            return refusal(ReplyStatus.BAD_REQUEST, str(e))
        except StoreError as e:
            log.error("a blob could not be served: %s", e)
            return refusal(ReplyStatus.BUSY, "the disk fails")
        except Exception:
            log.exception("a blob could not be served")
            return refusal(ReplyStatus.BUSY, "internal error")

    def strangers_wait(self) -> float:
        """Return the seconds until more may be sent to peers that are not known as members."""
        self.strangers_budget.refill(_now())
        return max(0.0, -self.strangers_budget.tokens / self.strangers_budget.rate)

    def look_up(self, request: BlobRequest) -> BlobReply:
        """Return the reply from the store. Called in a thread. Raises BlobMissing, MalformedError, StoreError."""
        store, digest, index = self.store, request.digest, request.index
        blob = store.in_progress(digest)
        match request.op:
            case BlobOp.SIZE:
                return BlobReply(ReplyStatus.OK, encode_size(store.size(digest) if blob is None else blob.size))
            case BlobOp.LEAVES:
                first = index * LEAVES_PER_PAGE
                if blob is None:
                    return BlobReply(ReplyStatus.OK, store.leaves_page(digest, first, LEAVES_PER_PAGE))
                return BlobReply(ReplyStatus.OK, b"".join(blob.leaves[first : first + LEAVES_PER_PAGE]))
            case BlobOp.HAVE:
                have = b"\xff" * -(-chunk_count(store.size(digest)) // 8) if blob is None else blob.bitmap()
                return BlobReply(ReplyStatus.OK, _page(have, index))
            case BlobOp.CHUNK:
                if blob is None:
                    return BlobReply(ReplyStatus.OK, store.read_chunk(digest, index))
                if not blob.has(index):
                    return refusal(ReplyStatus.ABSENT, "not here yet")
                return BlobReply(ReplyStatus.OK, blob.read_chunk(index))


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


def _page(bitmap: bytes, index: int) -> bytes:
    size = BITS_PER_PAGE // 8
    return bitmap[index * size : (index + 1) * size]
