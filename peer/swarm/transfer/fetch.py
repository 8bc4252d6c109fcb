"""The driver of one fetch: carries out what its `Scheduler` decides, over the streams of a pool, into the store."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

import async_timeout

from peer.store import BlobMissing, InProgressBlob, Store
from peer.swarm.errors import BlobFetchError
from peer.swarm.transfer.actions import (
    Action,
    CancelRequest,
    CheckLeaves,
    CloseBlob,
    DropProvider,
    FailFetch,
    FinishFetch,
    LoadLeaves,
    OpenBlob,
    OpenChunkStream,
    QueryProvider,
    RequestChunk,
    RequestSlot,
    ReserveEarly,
)
from peer.swarm.transfer.events import (
    BlobMismatch,
    BlobOpened,
    ChunkChecked,
    EarlyReserved,
    Event,
    LeavesChecked,
    LeavesLoaded,
    Replied,
    SlotLost,
    SlotReady,
)
from peer.swarm.transfer.frames import BlobOp, BlobRequest
from peer.swarm.transfer.outcomes import ChunkCheck, Given, Lost, outcome_of
from peer.swarm.transfer.scheduler import Scheduler
from peer.swarm.transfer.streams import Slot, StreamPool
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.merkle import CHUNK, check_leaves, chunk_size, leaf_hash

log = logging.getLogger(__name__)

T = TypeVar("T")
OnBad = Callable[[PeerKey, str], None]


class Fetch:
    """One attempt at one blob.

    The data that arrive are in the store, also if the fetch fails: the next one continues from there. With `chunks`,
    only these are fetched; they are then in the store's in-progress blob, unless they are all of it.
    """

    def __init__(
        self,
        streams: StreamPool,
        store: Store,
        executor: Executor,
        digest: Digest,
        size: int | None,
        providers: Iterable[PeerKey],
        *,
        me: PeerKey,
        max_size: int,
        on_bad: OnBad,
        chunks: Collection[int] | None = None,
    ):
        self._streams = streams
        self._store = store
        self._executor = executor
        self._digest = digest
        self._size = size
        self._providers = list(providers)
        self._me = me
        self._max_size = max_size
        self._on_bad = on_bad
        self._chunks = None if chunks is None else frozenset(chunks)
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unnumbered: set[asyncio.Task[None]] = set()
        self._slots: dict[int, Slot] = {}
        self._blob: asyncio.Future[InProgressBlob] = asyncio.get_running_loop().create_future()
        self._early = False
        self._end: FinishFetch | FailFetch | None = None

    async def run(self, deadline_seconds: float) -> None:
        """Fetch the blob; return when it is in the store. Raises BlobFetchError, StoreError."""
        if self._store.has(self._digest):
            return
        scheduler = self._scheduler = Scheduler(
            self._me, self._providers, self._digest, self._size, max_size=self._max_size, chunks=self._chunks,
            deadline_seconds=deadline_seconds, streams=self._streams, has=self._has,
            chance=random.Random(random.getrandbits(64)),
        )  # fmt: skip
        try:
            await self._drive(scheduler)
            if isinstance(self._end, FailFetch):
                raise BlobFetchError(self._digest, self._end.why, scheduler.reasons())
            if self._blob.done() and not self._blob.result().left:
                await self._in_thread(self._blob.result().finish)
        except BlobMissing:
            raise BlobFetchError(self._digest, "it is not wanted any more", scheduler.reasons()) from None
        finally:
            await self._stop()

    async def _drive(self, scheduler: Scheduler) -> None:
        clock = asyncio.get_running_loop().time
        actions = scheduler.start(clock())
        while True:
            for action in actions:
                self._carry_out(action)
            if self._end is not None:
                return
            event, now = None, scheduler.wake_at
            try:
                async with async_timeout.timeout_at(scheduler.wake_at):
                    event = await self._events.get()
                now = clock()
            except asyncio.TimeoutError:
                now = max(now, clock())
            if isinstance(event, BaseException):
                raise event
            actions = scheduler.step(event, now)

    async def _stop(self) -> None:
        """End everything that was begun, and release what it held."""
        tasks = [*self._tasks.values(), *self._unnumbered]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot in self._slots.values():
            slot.free()
        self._slots.clear()
        self._close_blob()

    def _has(self, index: int) -> bool:
        return self._blob.done() and self._blob.result().has(index)

    # -- actions -----------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case QueryProvider():
                self._spawn(self._query(action), action.number)
            case RequestSlot():
                self._spawn(self._request_slot(action), action.number)
            case RequestChunk():
                self._spawn(self._request_chunk(action, self._slots.pop(action.slot)), action.number)
            case OpenChunkStream():
                self._spawn(self._open_stream(action))
            case CancelRequest(number):
                self._cancel(number)
            case LoadLeaves():
                self._spawn(self._load_leaves(action), action.number)
            case CheckLeaves():
                self._spawn(self._check_leaves(action), action.number)
            case OpenBlob():
                self._spawn(self._open_blob(action), action.number)
            case CloseBlob():
                self._close_blob()
            case ReserveEarly():
                if not self._early and self._streams.reserve_early():
                    self._early = True
                    self._events.put_nowait(EarlyReserved())
            case DropProvider(peer, reason):
                self._streams.hang_up(peer)
                log.warning("peer %s is dropped from blob %s: %s", peer.short, self._digest.short, reason)
                self._on_bad(peer, reason)
            case FinishFetch() | FailFetch():
                self._end = action

    def _spawn(self, work: Coroutine[Any, Any, None], number: int | None = None) -> None:
        task = asyncio.ensure_future(work)
        if number is None:
            self._unnumbered.add(task)
        else:
            self._tasks[number] = task
        task.add_done_callback(lambda done: self._note_end(done, number))

    def _note_end(self, task: asyncio.Task[None], number: int | None) -> None:
        self._unnumbered.discard(task)
        if number is not None:
            self._tasks.pop(number, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.put_nowait(error)

    def _cancel(self, number: int) -> None:
        if (slot := self._slots.pop(number, None)) is not None:
            slot.free()
        elif (task := self._tasks.get(number)) is not None:
            task.cancel()

    async def _in_thread(self, do: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, do, *args)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _query(self, action: QueryProvider) -> None:
        request = BlobRequest(action.op, self._digest, action.index)
        reply = await self._streams.request(action.peer, action.priority, request, action.limit)
        self._events.put_nowait(Replied(action.number, outcome_of(reply)))

    async def _open_stream(self, action: OpenChunkStream) -> None:
        slot = await self._streams.slot(action.peer, action.priority)
        if isinstance(slot, Slot):
            slot.free()

    async def _request_slot(self, action: RequestSlot) -> None:
        slot = await self._streams.slot(action.peer, action.priority)
        if isinstance(slot, Lost):
            self._events.put_nowait(SlotLost(action.number, slot))
        else:
            self._slots[action.number] = slot
            self._events.put_nowait(SlotReady(action.number))

    async def _request_chunk(self, action: RequestChunk, slot: Slot) -> None:
        """Request a chunk and write it. While it is written its reply is held, and few others are read."""
        check = None
        try:
            async with slot.request(BlobRequest(BlobOp.CHUNK, self._digest, action.index), CHUNK) as reply:
                outcome = outcome_of(reply, with_data=False)
                self._events.put_nowait(Replied(action.number, outcome))
                if isinstance(reply, Lost) or not isinstance(outcome, Given):
                    return
                data = reply.data
                if self._blob.done():
                    check = await self._write(action, data)
        finally:
            slot.free()
        if check is None:  # early: without a hold on the stream, since the hashes may be behind it
            await asyncio.shield(self._blob)
            check = await self._write(action, data)
        self._events.put_nowait(ChunkChecked(action.number, check))

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

    async def _load_leaves(self, action: LoadLeaves) -> None:
        leaves = await self._in_thread(self._store.known_leaves, self._digest, action.size)
        self._events.put_nowait(LeavesLoaded(action.number, leaves))

    async def _check_leaves(self, action: CheckLeaves) -> None:
        try:
            await self._in_thread(check_leaves, self._digest, action.size, action.leaves)
            valid = True
        except MalformedError:
            valid = False
        self._events.put_nowait(LeavesChecked(action.number, valid))

    async def _open_blob(self, action: OpenBlob) -> None:
        opening = asyncio.ensure_future(
            self._in_thread(self._store.receive, self._digest, action.size, action.leaves, self._chunks)
        )
        try:
            blob = await asyncio.shield(opening)
        except MalformedError:  # an empty blob that is not the empty blob
            self._events.put_nowait(BlobMismatch(action.number))
            return
        except asyncio.CancelledError:
            opening.add_done_callback(_close)  # the thread does not stop, and nobody else would close it
            raise
        missing: list[int] = []
        if blob is not None:  # otherwise the whole blob is here by now
            self._blob.set_result(blob)
            self._return_early()
            missing = blob.missing(self._chunks)
        self._events.put_nowait(BlobOpened(action.number, missing))

    def _close_blob(self) -> None:
        self._return_early()
        if self._blob.done():
            self._blob.result().close()
            self._blob = asyncio.get_running_loop().create_future()

    def _return_early(self) -> None:
        if self._early:
            self._early = False
            self._streams.return_early()


def _close(opening: asyncio.Future[InProgressBlob | None]) -> None:
    if not opening.cancelled() and opening.exception() is None and (blob := opening.result()) is not None:
        blob.close()
