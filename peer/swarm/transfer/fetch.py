"""The driver of one fetch: carries out what its `Scheduler` decides, over the streams of a pool, into the store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

import async_timeout

from peer.store import BlobMissing, InProgressBlob, Store
from peer.swarm.errors import BlobFetchError
from peer.swarm.transfer.actions import (
    Action,
    Answer,
    CancelAll,
    CancelRequest,
    ChunkCheck,
    DropProvider,
    EndFetch,
    OpenBlob,
    QueryProvider,
    RequestChunk,
    RequestSlot,
    ReserveEarly,
)
from peer.swarm.transfer.frames import SIZE_BYTES, BlobOp, BlobReply, BlobRequest, Lost, ReplyStatus
from peer.swarm.transfer.scheduler import Scheduler
from peer.swarm.transfer.streams import Stream, StreamPool
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.merkle import CHUNK, chunk_size, leaf_hash

T = TypeVar("T")
OnBad = Callable[[PeerKey, str], None]


class Fetch:
    """One attempt at one blob.

    The data that arrive are in the store, even if the fetch fails: the next one continues from there. With `chunks`,
    only these are fetched; they are then in the store's in-progress blob, unless they are all of it.
    """

    def __init__(
        self,
        streams: StreamPool,
        store: Store,
        executor: Executor,
        digest: Digest,
        size: int,
        providers: Iterable[PeerKey],
        *,
        me: PeerKey,
        on_bad: OnBad,
        chunks: Collection[int] | None = None,
    ):
        self._streams = streams
        self._store = store
        self._executor = executor
        self._digest = digest
        self._on_bad = on_bad
        self._chunks = None if chunks is None else frozenset(chunks)
        self._scheduler = Scheduler(
            me, providers, digest, size, chunks=self._chunks, streams=streams, has=self._has,
            here=self._here, chance=random.Random(random.getrandbits(64)),
        )  # fmt: skip
        self._answers: asyncio.Queue[Answer | BaseException] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._slots: dict[int, Stream] = {}
        self._blob: asyncio.Future[InProgressBlob] = asyncio.get_running_loop().create_future()
        self._early = False
        self._end: EndFetch | None = None

    async def run(self, deadline_seconds: float) -> None:
        """Fetch the blob; return when it is in the store. Raises BlobFetchError, StoreError."""
        if self._store.has(self._digest):
            return
        reasons = self._scheduler.reasons
        try:
            end = await self._drive(deadline_seconds)
            if end.failure is not None:
                raise BlobFetchError(self._digest, end.failure, reasons())
            if self._blob.done() and not self._blob.result().left:
                await self._in_thread(self._blob.result().finish)
        except BlobMissing:
            raise BlobFetchError(self._digest, "it is not wanted any more", reasons()) from None
        finally:
            tasks = self._cancel_all()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._cancel_all()  # a task may have got a slot or the blob meanwhile

    async def _drive(self, deadline_seconds: float) -> EndFetch:
        clock, scheduler = asyncio.get_running_loop().time, self._scheduler
        actions = scheduler.start(clock(), deadline_seconds)
        while True:
            for action in actions:
                self._carry_out(action)
            if self._end is not None:
                return self._end
            answer, now = None, scheduler.wake_at
            try:
                async with async_timeout.timeout_at(scheduler.wake_at):
                    answer = await self._answers.get()
                now = clock()
            except asyncio.TimeoutError:
                now = max(now, clock())
            if isinstance(answer, BaseException):
                raise answer
            actions = scheduler.step(answer, now)

    def _has(self, index: int) -> bool:
        return self._blob.done() and self._blob.result().has(index)

    def _here(self) -> int:
        return self._blob.result().here if self._blob.done() else 0

    # -- actions -----------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case QueryProvider(number):
                self._spawn(number, self._query(action))
            case RequestSlot(number):
                self._spawn(number, self._request_slot(action))
            case RequestChunk(number, slot):
                self._slots[number] = self._slots.pop(slot)
                self._spawn(number, self._request_chunk(action))
            case OpenBlob(number):
                self._spawn(number, self._open_blob(action))
            case ReserveEarly(number):
                if self._streams.reserve_early():
                    self._early = True
                    self._answers.put_nowait(Answer(number, None))
            case CancelRequest(number):
                self._free(number)  # here, since a task that is cancelled before it begins frees nothing
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case CancelAll():
                self._cancel_all()
            case DropProvider(peer, reason):
                self._streams.hang_up(peer)
                self._on_bad(peer, reason)
            case EndFetch():
                self._end = action

    def _spawn(self, number: int, work: Coroutine[Any, Any, object]) -> None:
        task = self._tasks[number] = asyncio.ensure_future(work)
        task.add_done_callback(partial(self._answer, number))

    def _answer(self, number: int, task: asyncio.Task[object]) -> None:
        del self._tasks[number]
        if not task.cancelled():
            self._answers.put_nowait(task.exception() or Answer(number, task.result()))

    def _cancel_all(self) -> list[asyncio.Task[Any]]:
        """End everything that was begun, and release what it held; return the tasks that are ending."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        for number in list(self._slots):
            self._free(number)
        self._return_early()
        if self._blob.done():
            self._blob.result().close()
            self._blob = asyncio.get_running_loop().create_future()
        return tasks

    def _free(self, number: int) -> None:
        if (slot := self._slots.pop(number, None)) is not None:
            slot.free()

    async def _in_thread(self, do: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, do, *args)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _query(self, action: QueryProvider) -> BlobReply | Lost:
        request = BlobRequest(action.op, self._digest, action.index)
        limit = SIZE_BYTES if action.op is BlobOp.SIZE else CHUNK
        return await self._streams.request(action.peer, self._scheduler.query_priority, request, limit)

    async def _request_slot(self, action: RequestSlot) -> Lost | None:
        slot = await self._streams.slot(action.peer, self._scheduler.chunk_priority)
        if isinstance(slot, Lost):
            return slot
        self._slots[action.number] = slot
        return None

    async def _request_chunk(self, action: RequestChunk) -> ChunkCheck | BlobReply | Lost:
        """Request a chunk and write it. While it is written its reply is held, and few others are read."""
        try:
            request = BlobRequest(BlobOp.CHUNK, self._digest, action.index)
            async with self._slots[action.number].request(request, CHUNK) as reply:
                if isinstance(reply, Lost) or reply.status is not ReplyStatus.OK:
                    return reply
                if self._blob.done():
                    return await self._write(action, reply.data)
        finally:
            self._free(action.number)
        await asyncio.shield(self._blob)  # early: without a hold on the stream, since the hashes may be behind it
        return await self._write(action, reply.data)

    async def _write(self, action: RequestChunk, data: bytes) -> ChunkCheck:
        """Write a chunk to the open blob. Raises BlobMissing, StoreError."""
        blob, index = self._blob.result(), action.index
        try:
            await self._in_thread(blob.write, index, data)
        except MalformedError:
            is_of_other_size = len(data) != chunk_size(blob.size, index) and leaf_hash(data) == blob.leaves[index]
            return ChunkCheck.WRONG_SIZE if is_of_other_size else ChunkCheck.WRONG
        self._streams.note_correct_chunk(action.peer, self._scheduler.chunk_priority)
        return ChunkCheck.STORED

    # -- the store ---------------------------------------------------------------------------------------------------

    async def _open_blob(self, action: OpenBlob) -> Sequence[int] | None:
        leaves = action.leaves
        if leaves is None:
            leaves = await self._in_thread(self._store.known_leaves, self._digest, action.size)
            if leaves is None:
                return None
        opening = asyncio.ensure_future(
            self._in_thread(self._store.receive, self._digest, action.size, leaves, self._chunks)
        )
        try:
            blob = await asyncio.shield(opening)
        except MalformedError:
            return None
        except asyncio.CancelledError:
            opening.add_done_callback(_close)  # the thread does not stop, and nobody else would close it
            raise
        if blob is None:  # the whole blob is here by now
            return []
        if self._blob.done():  # other leaf hashes, of another provider, were right too
            blob.close()
        else:
            self._blob.set_result(blob)
            self._return_early()
        return blob.missing(self._chunks)

    def _return_early(self) -> None:
        if self._early:
            self._early = False
            self._streams.return_early()


def _close(opening: asyncio.Future[InProgressBlob | None]) -> None:
    if not opening.cancelled() and opening.exception() is None and (blob := opening.result()) is not None:
        blob.close()
