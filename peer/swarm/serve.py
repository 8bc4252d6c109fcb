"""The serving side of blob streams: answers in order, within limits, and only what the requester may have."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from peer.store import BlobMissing, Store, StoreError
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

MayServe = Callable[[Digest, PeerKey], "str | None | Awaitable[str | None]"]


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Bounds on what others may have open here. Memory: (streams) x (read_ahead + 2) chunks at the very most."""

    streams_per_peer: int = 8
    streams: int = 128
    read_ahead: int = 2
    idle_seconds: float = 60
    write_seconds: float = 20


class BlobServer:
    """Serves the store's blobs, complete or arriving, to whom `may_serve` lets have them."""

    def __init__(self, store: Store, may_serve: MayServe, executor: Executor, traffic: Traffic, limits: ServeLimits):
        self._store = store
        self._may_serve = may_serve
        self._executor = executor
        self._traffic = traffic
        self._limits = limits
        self._streams: Counter[PeerKey] = Counter()

    async def handle(self, peer: PeerKey, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream, until it is idle, breaks, or asks for what makes no sense."""
        limits = self._limits
        if self._streams[peer] >= limits.streams_per_peer or self._streams.total() >= limits.streams:
            await self._write(writer, refusal(Status.BUSY, "too many streams"))
            return
        self._streams[peer] += 1
        answers: asyncio.Queue[asyncio.Future[Reply] | None] = asyncio.Queue(limits.read_ahead)
        reading = asyncio.ensure_future(self._read_requests(peer, reader, answers))
        try:
            while (answer := await answers.get()) is not None:
                await self._write(writer, await answer)
        finally:
            reading.cancel()
            while not answers.empty():
                if (left := answers.get_nowait()) is not None:
                    left.cancel()
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _read_requests(
        self, peer: PeerKey, reader: asyncio.StreamReader, answers: asyncio.Queue[asyncio.Future[Reply] | None]
    ) -> None:
        try:
            while True:
                frame = await asyncio.wait_for(reader.readexactly(REQUEST_BYTES), self._limits.idle_seconds)
                request = parse_request(frame)
                await answers.put(asyncio.ensure_future(self._answer(peer, request)))
        except MalformedError as e:
            log.warning("peer %s sent what is no request for a blob: its stream is closed", peer.short)
            bad: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            bad.set_result(refusal(Status.BAD_REQUEST, str(e)))
            await answers.put(bad)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):
            pass  # idle, or closed by the other side: the ordinary ends of a stream
        await answers.put(None)

    async def _write(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        """Raises TimeoutError when the other side does not read."""
        writer.writelines((reply.head(), reply.data))
        await asyncio.wait_for(writer.drain(), self._limits.write_seconds)
        self._traffic.up += len(reply.data)

    async def _answer(self, peer: PeerKey, request: Request) -> Reply:
        try:
            reason = self._may_serve(request.digest, peer)
            if inspect.isawaitable(reason):
                reason = await reason
            if reason is not None:
                return refusal(Status.REFUSED, reason)
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
        arriving = (store.arriving(digest) or store.growing(digest)) if not store.has(digest) else None
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


def _page(bitmap: bytes, index: int) -> bytes:
    size = BITS_PER_PAGE // 8
    return bitmap[index * size : (index + 1) * size]
