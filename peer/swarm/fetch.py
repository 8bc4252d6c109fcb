"""Getting one blob: its leaf hashes from any holder, then its chunks from several at once, each checked as it comes.

A holder that serves one wrong byte is dropped and reported. One that is silent, busy, or not yet willing is asked
again, or others are asked in its place. What has arrived is kept when the fetch fails: the next one goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import Executor
from typing import TypeVar

from peer.store import BlobMissing, Partial, Store
from peer.swarm.errors import BlobUnavailable, PeerUnreachable
from peer.swarm.frames import BITS_PER_PAGE, SIZE_BYTES, Op, Request, Status, encode_size, leaf_pages, parse_size
from peer.swarm.holders import LOST, PATIENCE, Holder, Patience
from peer.swarm.links import LinkLost, Links
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.merkle import CHUNK, check_leaves, chunk_count, chunk_size, leaf_hash

log = logging.getLogger(__name__)

T = TypeVar("T")
OnBad = Callable[[PeerKey, str], None]

BULK = 4 * 1024 * 1024
"""Blobs over this size use the other lane."""

HOLDERS = 32
ACTIVE = 6
SLOTS = 4
HEDGE_SECONDS = 0.5
"""After so long without an answer another holder is asked the same."""


class _Dropped(Exception):
    """This holder is of no more use to this attempt. Internal."""


class _Later(Exception):
    """The holder does not give this now: worth asking again after a wait. Internal."""

    def __init__(self, seconds: float, *, absent: bool = False):
        self.seconds = seconds
        self.absent = absent
        """It may have other chunks."""


class _WrongSize(Exception):
    """The chunk is the blob's own, and shows that the blob's stated size is wrong. Internal."""


class Fetch:
    """One attempt at one blob. `run` returns when the blob is in the store, or raises BlobUnavailable, StoreError.

    With `chunks`, when these are there: in the store's partial blob, unless they are all of it.
    """

    def __init__(
        self,
        links: Links,
        store: Store,
        executor: Executor,
        digest: Digest,
        size: int | None,
        holders: Iterable[PeerKey],
        *,
        max_size: int,
        on_bad: OnBad,
        chunks: Collection[int] | None = None,
    ):
        self._chunks = None if chunks is None else frozenset(chunks)
        self._links = links
        self._store = store
        self._executor = executor
        self._digest = digest
        self._size = size
        self._max_size = max_size
        self._on_bad = on_bad
        self._holders = [Holder(peer) for peer in list(dict.fromkeys(holders))[:HOLDERS]]
        self._todo: list[int] = []
        self._asked: dict[int, list[tuple[PeerKey, float]]] = {}
        self._complete = asyncio.Event()

    async def run(self, deadline_seconds: float) -> None:
        if self._store.has(self._digest):
            return
        try:
            await asyncio.wait_for(self._run(), deadline_seconds)
        except asyncio.TimeoutError:
            raise self._unavailable(f"not in {deadline_seconds:g} s") from None

    async def _run(self) -> None:
        if self._size is not None:
            try:
                await self._get(self._size)
            except _WrongSize:
                raise self._unavailable(f"its size is not the {self._size:,} bytes that were stated") from None
            return
        # The size is a holder's word. When nothing comes of it, that holder is left out and the next one's is taken.
        while True:
            source, size = await self._first(self._get_size)
            try:
                await self._get(size)
                return
            except _WrongSize:
                self._condemn(source, f"stated a wrong size ({size:,} bytes)")
            except BlobUnavailable:
                source.bad = True  # no proof against it, so no report
                if all(h.bad for h in self._holders):
                    raise

    # -- asking --------------------------------------------------------------------------------------------------

    async def _ask(self, holder: Holder, request: Request, limit: int) -> bytes:
        """The data of an OK reply, asking again as patience says. Raises _Dropped."""
        while True:
            try:
                return await self._ask_once(holder, request, limit)
            except _Later as later:
                await asyncio.sleep(later.seconds)

    async def _ask_once(self, holder: Holder, request: Request, limit: int) -> bytes:
        """The data of an OK reply. Raises _Dropped, _Later."""
        if holder.bad:
            raise _Dropped
        lane = "bulk" if (self._size or self._max_size) > BULK else "quick"
        try:
            reply = await self._links.ask(holder.peer, lane, request, limit)
        except LinkLost as e:
            if e.hostile:
                self._condemn(holder, str(e))
                raise _Dropped from None
            raise self._later(holder, "lost", LOST, str(e)) from None
        except PeerUnreachable as e:
            raise self._later(holder, "lost", LOST, str(e)) from None
        if reply.status is Status.OK:
            holder.counts.clear()
            holder.reason = "was still sending"
            return reply.data
        if reply.status is Status.BAD_REQUEST:
            holder.reason = reply.reason
            raise _Dropped
        raise self._later(holder, reply.status.name, PATIENCE[reply.status], reply.reason)

    def _later(self, holder: Holder, what: str, patience: Patience, reason: str) -> _Later:
        """One more failure of that sort; _Dropped is raised when it was one too many."""
        holder.reason = reason
        attempt = holder.counts[what]
        holder.counts[what] += 1
        if attempt + 1 >= patience.tries:
            raise _Dropped
        return _Later(patience.wait(attempt), absent=what == Status.ABSENT.name)

    def _usable(self) -> list[Holder]:
        """The holders that are left: those without failures of late first, else in the caller's order."""
        return sorted((h for h in self._holders if not h.bad), key=lambda h: bool(h.counts))

    def _condemn(self, holder: Holder, reason: str) -> None:
        """The holder broke the rules in a way that no fault of the network explains."""
        if not holder.bad:
            holder.bad = True
            holder.reason = reason
            log.warning("peer %s is dropped from blob %s: %s", holder.peer.short, self._digest.short, reason)
            self._on_bad(holder.peer, reason)

    async def _suspect(self, holder: Holder, size: int, reason: str) -> None:
        """Bytes that do not fit. It is the holder's doing only if it takes the blob for one of the same size as we do:
        else whoever told us the size may have lied, to set us against honest holders. Raises _Dropped in any case."""
        data = await self._ask(holder, Request(Op.SIZE, self._digest), SIZE_BYTES)
        if data == encode_size(size):
            self._condemn(holder, reason)
        else:
            holder.reason = f"takes the blob for one of another size than {size:,} bytes"
        raise _Dropped

    def _unavailable(self, why: str) -> BlobUnavailable:
        return BlobUnavailable(self._digest, why, {h.peer: h.reason for h in self._holders})

    async def _first(self, get: Callable[[Holder], Awaitable[T]]) -> T:
        """The first answer of any holder: one is asked, the next when it fails or lets us wait."""
        waiting = self._usable()
        running: set[asyncio.Future[T]] = set()
        try:
            while waiting or running:
                if waiting:
                    running.add(asyncio.ensure_future(get(waiting.pop(0))))
                done, running = await asyncio.wait(
                    running, timeout=HEDGE_SECONDS if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    try:
                        return task.result()
                    except _Dropped:
                        continue
        finally:
            await _cancel(running)
        raise self._unavailable("no holder is left" if self._holders else "nobody is known to hold it")

    async def _in_thread(self, do: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, do, *args)

    # -- size and leaves -----------------------------------------------------------------------------------------

    async def _get_size(self, holder: Holder) -> tuple[Holder, int]:
        data = await self._ask(holder, Request(Op.SIZE, self._digest), SIZE_BYTES)
        try:
            size = parse_size(data)
        except MalformedError as e:
            self._condemn(holder, str(e))
            raise _Dropped from None
        if size > self._max_size:
            holder.reason = f"states a size of {size:,} bytes, and at most {self._max_size:,} are accepted"
            raise _Dropped
        return holder, size

    async def _get_leaves(self, holder: Holder, size: int) -> list[bytes]:
        ask = [self._ask(holder, Request(Op.LEAVES, self._digest, page), CHUNK) for page in range(leaf_pages(size))]
        raw = b"".join(await asyncio.gather(*ask))
        leaves = [raw[i : i + 32] for i in range(0, len(raw), 32)]
        try:
            await self._in_thread(check_leaves, self._digest, size, leaves)
        except MalformedError:
            await self._suspect(holder, size, "sent leaf hashes that are not the blob's")
        return leaves

    # -- chunks --------------------------------------------------------------------------------------------------

    async def _get(self, size: int) -> None:
        """Leaves, then chunks. Raises BlobUnavailable, _WrongSize, StoreError."""
        if chunk_count(size) <= 1:
            leaves = [bytes(self._digest)][: chunk_count(size)]  # the tree of one leaf is that leaf
        else:
            leaves = await self._in_thread(self._store.known_leaves, self._digest, size)
            if leaves is None:
                leaves = await self._first(lambda h: self._get_leaves(h, size))
        try:
            partial = await self._in_thread(self._store.partial, self._digest, size, leaves, self._chunks)
        except MalformedError:  # an empty blob that is not the empty blob
            raise _WrongSize from None
        try:
            self._todo = partial.missing(self._chunks)
            self._asked.clear()
            # Each fetcher in its own order, so that those who fetch at the same time have something for each other.
            random.shuffle(self._todo)
            if self._todo:
                await self._get_chunks(partial)
            if not partial.left:
                await self._in_thread(partial.finish)
        except BlobMissing:
            raise self._unavailable("it is not wanted any more") from None
        finally:
            partial.close()

    async def _get_chunks(self, partial: Partial) -> None:
        self._complete.clear()
        waiting = self._usable()
        complete = asyncio.ensure_future(self._complete.wait())
        workers: set[asyncio.Future[None]] = set()
        try:
            while not complete.done():
                while waiting and len(workers) < ACTIVE:
                    workers.add(asyncio.ensure_future(self._work(waiting.pop(0), partial)))
                if not workers:
                    raise self._unavailable("no holder is left" if self._holders else "nobody is known to hold it")
                done, _ = await asyncio.wait({complete, *workers}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {complete}:
                    workers.discard(task)
                    try:
                        task.result()
                    except _Dropped:
                        continue
        finally:
            await _cancel({complete, *workers})

    async def _work(self, holder: Holder, partial: Partial) -> None:
        """Chunks from one holder, as fast as it gives them: one to see if it is willing, then SLOTS at a time."""
        await self._slot(holder, partial, once=True)
        slots = {asyncio.ensure_future(self._slot(holder, partial)) for _ in range(SLOTS)}
        try:
            done, _ = await asyncio.wait(slots, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            await _cancel(slots)

    async def _slot(self, holder: Holder, partial: Partial, *, once: bool = False) -> None:
        while not self._complete.is_set():
            index = self._take(holder, partial)
            if index is None:
                if not partial.lacks(self._chunks):
                    self._complete.set()
                    return
                await asyncio.sleep(0.1)  # only faults of others will give us something to do
                if holder.have is not None:
                    await self._refresh(holder, partial)
                continue
            try:
                data = await self._ask_once(holder, Request(Op.CHUNK, self._digest, index), CHUNK)
                await self._keep(holder, partial, index, data)
            except _Later as later:
                self._give_back(holder, index, partial)  # somebody else may have it now
                await asyncio.sleep(later.seconds)
                if later.absent:
                    await self._refresh(holder, partial)
                continue
            except BaseException:
                self._give_back(holder, index, partial)
                raise
            self._asked.pop(index, None)
            if not partial.lacks(self._chunks):
                self._complete.set()
            if once:
                return

    async def _keep(self, holder: Holder, partial: Partial, index: int, data: bytes) -> None:
        try:
            await self._in_thread(partial.write, index, data)
        except MalformedError:
            if len(data) != chunk_size(partial.size, index) and leaf_hash(data) == partial.leaves[index]:
                raise _WrongSize from None
            await self._suspect(holder, partial.size, f"sent a chunk {index} that is not the blob's")

    async def _refresh(self, holder: Holder, partial: Partial) -> None:
        """Which chunks a holder has whose own copy is still arriving."""
        pages = range(-(-chunk_count(partial.size) // BITS_PER_PAGE))
        holder.have = b"".join([await self._ask(holder, Request(Op.HAVE, self._digest, p), CHUNK) for p in pages])

    def _take(self, holder: Holder, partial: Partial) -> int | None:
        """The next chunk to ask this holder for: one that nobody was asked for, else one that is late."""
        now = time.monotonic()
        while self._todo and partial.has(self._todo[-1]):  # another fetch of the same blob got it
            self._todo.pop()
        if holder.have is None and self._todo:
            index = self._todo.pop()
        else:
            index = next((i for i in reversed(self._todo) if holder.may_have(i)), None)
            if index is not None:
                self._todo.remove(index)
            else:
                index = self._late(holder, now)
        if index is not None:
            self._asked.setdefault(index, []).append((holder.peer, now))
        return index

    def _late(self, holder: Holder, now: float) -> int | None:
        for index, asked in self._asked.items():
            if len(asked) < 3 and now - asked[-1][1] > HEDGE_SECONDS and holder.may_have(index):
                if all(peer != holder.peer for peer, _ in asked):
                    return index
        return None

    def _give_back(self, holder: Holder, index: int, partial: Partial) -> None:
        asked = [a for a in self._asked.pop(index, []) if a[0] != holder.peer]
        if asked:
            self._asked[index] = asked
        elif not partial.has(index) and index not in self._todo:
            self._todo.append(index)


async def _cancel(tasks: Iterable[asyncio.Future]) -> None:
    """Cancel, and wait until they have let go of what they hold."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
