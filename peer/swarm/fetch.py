"""Getting one blob: its leaf hashes from any holder, then its chunks from several at once, each checked as it comes.

A holder that serves one wrong byte is dropped and reported. One that is silent, busy, or not yet willing is asked
again, or others are asked in its place. What has arrived is kept when the fetch fails: the next one goes on from there.
Which chunk is asked of whom says `plan.py`, and how many at once `pace.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

from peer.store import BlobMissing, Partial, Store
from peer.swarm.errors import BlobUnavailable, PeerUnreachable
from peer.swarm.frames import BITS_PER_PAGE, SIZE_BYTES, Op, Reply, Request, Status, encode_size, leaf_pages, parse_size
from peer.swarm.holders import LOST, PATIENCE, Holder, Patience
from peer.swarm.links import LinkLost, Links, Place
from peer.swarm.plan import Plan
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.merkle import CHUNK, check_leaves, chunk_count, chunk_size, leaf_hash

log = logging.getLogger(__name__)

T = TypeVar("T")
OnBad = Callable[[PeerKey, str], None]

BULK = 4 * 1024 * 1024
"""Blobs over this size leave the quick lane to others."""

HOLDERS = 32
ACTIVE = 8
"""Holders that chunks are asked of at the same time."""

RELAYED = 4
"""Of blobs with more chunks than this, fetchers give each other what they have before they ask a scarce source again:
for smaller ones it would only take longer."""

HEDGE_SECONDS = 0.5
"""After so long without leaf hashes another holder is asked for them."""

UNPROVED = 4
"""Chunks asked of a holder at once before one of them has come."""

IDLE_SECONDS = 0.05
"""How long to wait when there is nothing to ask of a holder."""

MAP_SECONDS = (0.1, 1.0)
"""How often a holder that fetches too is asked what it has: while that changes, and at the least."""

AGAIN_SECONDS = 3.0
"""A holder that had nothing of the blob is asked again after so long, while others still give it."""


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
        me: PeerKey,
        max_size: int,
        on_bad: OnBad,
        chunks: Collection[int] | None = None,
    ):
        self._me = me
        self._chunks = None if chunks is None else frozenset(chunks)
        self._links = links
        self._store = store
        self._executor = executor
        self._digest = digest
        self._size = size
        self._max_size = max_size
        self._on_bad = on_bad
        self._holders = [Holder(peer) for peer in _spread(list(dict.fromkeys(holders))[:HOLDERS])]
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
        try:
            reply = await self._links.ask(holder.peer, self._lane("about"), request, limit)
        except (LinkLost, PeerUnreachable) as e:
            raise self._lost(holder, e) from None
        return self._data(holder, reply)

    def _lane(self, lane: str) -> str:
        """Small blobs have one lane, and big ones two: what is asked about them need not queue behind their chunks."""
        return lane if (self._size or self._max_size) > BULK else "quick"

    def _lost(self, holder: Holder, error: LinkLost | PeerUnreachable) -> _Later:
        """What to do about a stream that broke or could not be had. Raises _Dropped."""
        if isinstance(error, LinkLost) and error.hostile:
            self._condemn(holder, str(error))
            raise _Dropped from None
        return self._later(holder, "lost", LOST, str(error))

    def _data(self, holder: Holder, reply: Reply) -> bytes:
        """The data of an OK reply. Raises _Dropped, _Later."""
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
            self._links.hang_up(holder.peer)
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
            missing = partial.missing(self._chunks)
            if missing:
                await self._get_chunks(partial, missing)
            if not partial.left:
                await self._in_thread(partial.finish)
        except BlobMissing:
            raise self._unavailable("it is not wanted any more") from None
        finally:
            partial.close()

    async def _get_chunks(self, partial: Partial, missing: list[int]) -> None:
        self._complete.clear()
        count = chunk_count(partial.size)
        lane = self._lane("bulk")
        plan = Plan(
            self._me,
            [h.peer for h in self._holders],
            missing,
            count,
            relayed=count > RELAYED and self._chunks is None,  # of a slice others want other chunks
            turn=int.from_bytes(bytes(self._digest)[:4], "big"),
            here=partial.has,
            latency=lambda peer: self._links.latency(peer, lane),
        )
        waiting = self._usable()
        again: list[tuple[float, Holder]] = []
        complete = asyncio.ensure_future(self._complete.wait())
        workers: dict[asyncio.Future[Any], Holder] = {}
        try:
            while not complete.done():
                while again and again[0][0] <= _now():
                    waiting.append(again.pop(0)[1])
                while waiting and len(workers) < ACTIVE:
                    holder = waiting.pop(0)
                    workers[asyncio.ensure_future(_Worker(self, plan, partial, holder, lane).run())] = holder
                if not workers:
                    raise self._unavailable("no holder is left" if self._holders else "nobody is known to hold it")
                done, _ = await asyncio.wait(
                    {complete, *workers}, timeout=AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done - {complete}:
                    holder = workers.pop(task)
                    try:
                        task.result()
                    except _Dropped:
                        plan.gives_nothing(holder.peer)
                        if holder.counts.pop(Status.MISSING.name, 0) and not holder.bad:
                            again.append((_now() + AGAIN_SECONDS, holder))
        finally:
            await _cancel({complete, *workers})

    async def _keep(self, holder: Holder, partial: Partial, index: int, data: bytes) -> None:
        try:
            await self._in_thread(partial.write, index, data)
            holder.proved = True
        except MalformedError:
            holder.suspected = True
            if len(data) != chunk_size(partial.size, index) and leaf_hash(data) == partial.leaves[index]:
                raise _WrongSize from None
            await self._suspect(holder, partial.size, f"sent a chunk {index} that is not the blob's")

    async def _get_map(self, holder: Holder, partial: Partial) -> bytes:
        """Which chunks a holder has. Raises _Dropped, _Later."""
        pages = range(-(-chunk_count(partial.size) // BITS_PER_PAGE))
        return b"".join([await self._ask_once(holder, Request(Op.HAVE, self._digest, p), CHUNK) for p in pages])


class _Worker:
    """Chunks from one holder, as fast as it gives them, until the fetch is complete. Internal."""

    def __init__(self, fetch: Fetch, plan: Plan, partial: Partial, holder: Holder, lane: str):
        self._fetch = fetch
        self._plan = plan
        self._partial = partial
        self._holder = holder
        self._lane = lane
        self._running: set[asyncio.Future[None]] = set()
        self._pause: _Later | None = None
        self._failure: BaseException | None = None
        self._map_due = 0.0
        self._map_seconds = MAP_SECONDS[0]

    async def run(self) -> None:
        """Raises _Dropped, _WrongSize, BlobMissing, StoreError."""
        opening = asyncio.ensure_future(self._open())
        try:
            if self._plan.relayed:
                await self._learn()
            while not self._fetch._complete.is_set():
                await self._turn()
        finally:
            await _cancel({opening, *self._running})

    async def _open(self) -> None:
        """The stream for chunks is there when the first is asked for; if it cannot be had, that is seen then."""
        with contextlib.suppress(LinkLost, PeerUnreachable):
            (await self._fetch._links.place(self._holder.peer, self._lane)).free()

    async def _turn(self) -> None:
        """One more chunk asked for, or a wait."""
        fetch, holder = self._fetch, self._holder
        if self._running and (holder.suspected or (not holder.proved and len(self._running) >= UNPROVED)):
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            return
        try:
            place = await fetch._links.place(holder.peer, self._lane)
        except (LinkLost, PeerUnreachable) as e:
            await self._rest(fetch._lost(holder, e))
            return
        index = None
        try:
            if self._failure is not None:
                raise self._failure
            if holder.bad:
                raise _Dropped
            if self._pause is None:
                index = self._plan.next(holder.peer, _now())
                if index is not None:
                    task = asyncio.ensure_future(self._one(place, index))
                    self._running.add(task)
                    task.add_done_callback(self._settled)
        finally:
            if index is None:
                place.free()
        if self._pause is not None:
            await self._rest(self._pause)
        elif index is None:
            await self._idle()

    async def _one(self, place: Place, index: int) -> None:
        """Ask for a chunk and keep it."""
        fetch, holder = self._fetch, self._holder
        try:
            async with place.asking(Request(Op.CHUNK, fetch._digest, index), CHUNK) as reply:
                await fetch._keep(holder, self._partial, index, fetch._data(holder, reply))
            self._plan.came(index, _now())
            if not self._plan.left:
                fetch._complete.set()
        finally:
            place.free()
            self._plan.over(holder.peer, index)

    def _settled(self, task: asyncio.Future[None]) -> None:
        """A chunk came or did not: what the worker has to know of it."""
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        try:
            if isinstance(error, LinkLost) and self._pause is None:
                error = self._fetch._lost(self._holder, error)  # all that was under way is lost: that counts once
        except _Dropped as e:
            error = e
        if isinstance(error, _Later):
            self._pause = self._pause or error
        elif not isinstance(error, LinkLost):
            self._failure = self._failure or error

    async def _rest(self, later: _Later) -> None:
        """The holder gave nothing: once all that was asked of it is settled, wait."""
        if self._running:
            await asyncio.wait(self._running)
        self._pause = None
        await asyncio.sleep(later.seconds)
        if later.absent:
            await self._learn()

    async def _idle(self) -> None:
        """There is nothing to ask of it now."""
        self._plan.look(_now())
        if not self._plan.left:
            self._fetch._complete.set()
            return
        if self._plan.has_more_soon(self._holder.peer) and _now() >= self._map_due:
            await self._learn()
        else:
            await asyncio.sleep(IDLE_SECONDS)

    async def _learn(self) -> None:
        """What the holder has."""
        failed = 0
        while True:
            try:
                have = await self._fetch._get_map(self._holder, self._partial)
                break
            except _Later as later:
                failed += 1
                if failed > 1:  # the first time it may just be about to begin
                    self._plan.gives_nothing(self._holder.peer)
                await asyncio.sleep(later.seconds)
        if self._plan.learn(self._holder.peer, have, _now()):
            self._map_seconds = MAP_SECONDS[0]
        else:
            self._map_seconds = min(MAP_SECONDS[1], 1.5 * self._map_seconds)
        self._map_due = _now() + self._map_seconds


def _now() -> float:
    return asyncio.get_running_loop().time()


def _spread(holders: list[PeerKey]) -> list[PeerKey]:
    """The likeliest first, the others in any order: those who fetch at once shall not all ask the same few."""
    others = holders[1:]
    random.shuffle(others)
    return holders[:1] + others


async def _cancel(tasks: Iterable[asyncio.Future]) -> None:
    """Cancel, and wait until they have let go of what they hold."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
