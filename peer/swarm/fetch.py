"""Getting one blob: its leaf hashes from any holder, then its chunks from several at once, each checked as it comes.

A holder that serves one wrong byte is dropped and reported. One that is silent, busy, or not yet willing is asked
again, or others are asked in its place. What has arrived is kept when the fetch fails: the next one goes on from there.
Which chunk is asked of whom says `plan.py`, and how many at once `pace.py`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

import async_timeout

from peer.store import BlobMissing, Partial, Store
from peer.swarm.clock import clock
from peer.swarm.errors import BlobUnavailable, PeerUnreachable
from peer.swarm.frames import BITS_PER_PAGE, SIZE_BYTES, Op, Reply, Request, Status, encode_size, leaf_pages, parse_size
from peer.swarm.holders import LOST, PATIENCE, Dropped, Holder, Later, Patience, WrongSize
from peer.swarm.links import LinkLost, Links
from peer.swarm.plan import Plan
from peer.swarm.worker import Worker, cancel
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

AGAIN_SECONDS = 3.0
"""A holder that had nothing of the blob is asked again after so long, while others still give it."""


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
        self.links = links
        self._store = store
        self._executor = executor
        self.digest = digest
        self._size = size
        self._max_size = max_size
        self._on_bad = on_bad
        self._holders = [Holder(peer) for peer in _spread(list(dict.fromkeys(holders))[:HOLDERS])]
        self.complete = asyncio.Event()

    async def run(self, deadline_seconds: float) -> None:
        if self._store.has(self.digest):
            return
        try:
            async with async_timeout.timeout(deadline_seconds):
                await self._run()
        except asyncio.TimeoutError:
            raise self._unavailable(f"not in {deadline_seconds:g} s") from None

    async def _run(self) -> None:
        if self._size is not None:
            try:
                await self._get(self._size)
            except WrongSize:
                raise self._unavailable(f"its size is not the {self._size:,} bytes that were stated") from None
            return
        # The size is a holder's word. When nothing comes of it, that holder is left out and the next one's is taken.
        while True:
            source, size = await self._first(self._get_size)
            try:
                await self._get(size)
                return
            except WrongSize:
                self._condemn(source, f"stated a wrong size ({size:,} bytes)")
            except BlobUnavailable:
                source.bad = True  # no proof against it, so no report
                if all(h.bad for h in self._holders):
                    raise

    # -- asking --------------------------------------------------------------------------------------------------

    async def _ask(self, holder: Holder, request: Request, limit: int) -> bytes:
        """The data of an OK reply, asking again as patience says. Raises Dropped."""
        while True:
            try:
                return await self._ask_once(holder, request, limit)
            except Later as later:
                await asyncio.sleep(later.seconds)

    async def _ask_once(self, holder: Holder, request: Request, limit: int) -> bytes:
        """The data of an OK reply. Raises Dropped, Later."""
        if holder.bad:
            raise Dropped
        try:
            reply = await self.links.ask(holder.peer, self._about(), request, limit)
        except (LinkLost, PeerUnreachable) as e:
            raise self.lost(holder, e) from None
        return self.data_of(holder, reply)

    def _about(self) -> str:
        """What is asked about a blob need not queue behind its chunks, where these are many."""
        few = self._chunks is not None or chunk_count(self._size or self._max_size) <= RELAYED
        return self._lane() if few else "about"

    def _lane(self) -> str:
        """For chunks: small blobs need not queue behind big ones."""
        return "bulk" if (self._size or self._max_size) > BULK else "quick"

    def lost(self, holder: Holder, error: LinkLost | PeerUnreachable) -> Later:
        """What to do about a stream that broke or could not be had. Raises Dropped."""
        if isinstance(error, LinkLost) and error.hostile:
            self._condemn(holder, str(error))
            raise Dropped from None
        return self._later(holder, "lost", LOST, str(error))

    def data_of(self, holder: Holder, reply: Reply) -> bytes:
        """The data of an OK reply. Raises Dropped, Later."""
        if reply.status is Status.OK:
            holder.counts.clear()
            holder.reason = "was still sending"
            return reply.data
        if reply.status is Status.BAD_REQUEST:
            holder.reason = reply.reason
            raise Dropped
        raise self._later(holder, reply.status.name, PATIENCE[reply.status], reply.reason)

    def _later(self, holder: Holder, what: str, patience: Patience, reason: str) -> Later:
        """One more failure of that sort; Dropped is raised when it was one too many."""
        holder.reason = reason
        attempt = holder.counts[what]
        holder.counts[what] += 1
        if attempt + 1 >= patience.tries:
            raise Dropped
        return Later(patience.wait(attempt), absent=what == Status.ABSENT.name)

    def _usable(self) -> list[Holder]:
        """The holders that are left: those without failures of late first, else in the caller's order."""
        return sorted((h for h in self._holders if not h.bad), key=lambda h: bool(h.counts))

    def _condemn(self, holder: Holder, reason: str) -> None:
        """The holder broke the rules in a way that no fault of the network explains."""
        if not holder.bad:
            holder.bad = True
            holder.reason = reason
            self.links.hang_up(holder.peer)
            log.warning("peer %s is dropped from blob %s: %s", holder.peer.short, self.digest.short, reason)
            self._on_bad(holder.peer, reason)

    async def _suspect(self, holder: Holder, size: int, reason: str) -> None:
        """Bytes that do not fit. It is the holder's doing only if it takes the blob for one of the same size as we do:
        else whoever told us the size may have lied, to set us against honest holders. Raises Dropped in any case."""
        data = await self._ask(holder, Request(Op.SIZE, self.digest), SIZE_BYTES)
        if data == encode_size(size):
            self._condemn(holder, reason)
        else:
            holder.reason = f"takes the blob for one of another size than {size:,} bytes"
        raise Dropped

    def _unavailable(self, why: str) -> BlobUnavailable:
        return BlobUnavailable(self.digest, why, {h.peer: h.reason for h in self._holders})

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
                    except Dropped:
                        continue
        finally:
            await cancel(running)
        raise self._unavailable("no holder is left" if self._holders else "nobody is known to hold it")

    async def _in_thread(self, do: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, do, *args)

    # -- size and leaves -----------------------------------------------------------------------------------------

    async def _get_size(self, holder: Holder) -> tuple[Holder, int]:
        data = await self._ask(holder, Request(Op.SIZE, self.digest), SIZE_BYTES)
        try:
            size = parse_size(data)
        except MalformedError as e:
            self._condemn(holder, str(e))
            raise Dropped from None
        if size > self._max_size:
            holder.reason = f"states a size of {size:,} bytes, and at most {self._max_size:,} are accepted"
            raise Dropped
        return holder, size

    async def _get_leaves(self, holder: Holder, size: int) -> list[bytes]:
        def ask(page: int) -> Awaitable[bytes]:
            return self._ask(holder, Request(Op.LEAVES, self.digest, page), CHUNK)

        first = await ask(0)  # alone: a stream that is gone costs one try
        raw = b"".join([first, *await asyncio.gather(*map(ask, range(1, leaf_pages(size))))])
        leaves = [raw[i : i + 32] for i in range(0, len(raw), 32)]
        try:
            await self._in_thread(check_leaves, self.digest, size, leaves)
        except MalformedError:
            await self._suspect(holder, size, "sent leaf hashes that are not the blob's")
        return leaves

    # -- chunks --------------------------------------------------------------------------------------------------

    async def _get(self, size: int) -> None:
        """Leaves and chunks. Raises BlobUnavailable, WrongSize, StoreError."""
        if chunk_count(size) <= 1:
            leaves = [bytes(self.digest)][: chunk_count(size)]  # the tree of one leaf is that leaf
        else:
            leaves = await self._in_thread(self._store.known_leaves, self.digest, size)
        opening = asyncio.ensure_future(self._open(size, leaves))
        try:
            if leaves is not None:
                await asyncio.wait({opening})
            await self._get_chunks(opening, size)
            partial = await opening
            if not partial.left:
                await self._in_thread(partial.finish)
        except BlobMissing:
            raise self._unavailable("it is not wanted any more") from None
        finally:
            await cancel({opening})
            if not opening.cancelled() and opening.exception() is None:
                opening.result().close()

    async def _open(self, size: int, leaves: list[bytes] | None) -> Partial:
        """Where chunks are kept, once it is known what they must be. Raises BlobUnavailable, WrongSize, StoreError."""
        if leaves is None:
            leaves = await self._first(lambda h: self._get_leaves(h, size))
        opening = asyncio.ensure_future(self._in_thread(self._store.partial, self.digest, size, leaves, self._chunks))
        try:
            return await asyncio.shield(opening)
        except MalformedError:  # an empty blob that is not the empty blob
            raise WrongSize from None
        except asyncio.CancelledError:
            opening.add_done_callback(_close)  # the thread does not stop: nobody else would let go of it
            raise

    async def _get_chunks(self, opening: asyncio.Future[Partial], size: int) -> None:
        """The likeliest holder is asked for the first chunks at once, while their hashes are still on their way."""
        self.complete.clear()
        count = chunk_count(size)
        lane = self._lane()
        missing = list(range(count)) if self._chunks is None else sorted(self._chunks)
        if opening.done():
            missing = opening.result().missing(self._chunks)
        if not missing:
            return
        plan = Plan(
            self._me,
            [h.peer for h in self._holders],
            missing,
            count,
            relayed=count > RELAYED and self._chunks is None,  # of a slice others want other chunks
            turn=int.from_bytes(bytes(self.digest)[:4], "big"),
            here=lambda index: _is_open(opening) and opening.result().has(index),
            latency=lambda peer: self.links.latency(peer, lane),
            laden=lambda peer: self.links.laden(peer, lane),
        )
        later = self._usable()
        ahead = not opening.done() and self.links.take_ahead()
        waiting = [later.pop(0)] if ahead and later else []
        again: list[tuple[float, Holder]] = []
        complete = asyncio.ensure_future(self.complete.wait())
        workers: dict[asyncio.Future[Any], Holder] = {}
        try:
            while not complete.done():
                if opening.done():
                    opening.result()
                    waiting, later = waiting + later, []
                    ahead = ahead and self.links.give_ahead()
                while again and again[0][0] <= clock():
                    waiting.append(again.pop(0)[1])
                while waiting and len(workers) < ACTIVE:
                    holder = waiting.pop(0)
                    workers[asyncio.ensure_future(Worker(self, plan, opening, size, holder, lane).run())] = holder
                if not workers and opening.done():
                    raise self._unavailable("no holder is left" if self._holders else "nobody is known to hold it")
                done, _ = await asyncio.wait(
                    {complete, *workers, *(() if opening.done() else (opening,))},
                    timeout=AGAIN_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done - {complete, opening}:
                    holder = workers.pop(task)
                    try:
                        task.result()
                    except Dropped:
                        plan.gives_nothing(holder.peer)
                        if holder.counts.pop(Status.MISSING.name, 0) and not holder.bad:
                            again.append((clock() + AGAIN_SECONDS, holder))
        finally:
            await cancel({complete, *workers})
            if ahead:
                self.links.give_ahead()

    async def keep(self, holder: Holder, partial: Partial, index: int, data: bytes) -> None:
        try:
            await self._in_thread(partial.write, index, data)
            holder.proved = True
            self.links.gave(holder.peer, self._lane())
        except MalformedError:
            holder.suspected = True
            if len(data) != chunk_size(partial.size, index) and leaf_hash(data) == partial.leaves[index]:
                raise WrongSize from None
            await self._suspect(holder, partial.size, f"sent a chunk {index} that is not the blob's")

    async def have_map(self, holder: Holder, count: int) -> bytes:
        """Which of so many chunks a holder has. Raises Dropped, Later."""
        pages = range(-(-count // BITS_PER_PAGE))
        have = b"".join([await self._ask_once(holder, Request(Op.HAVE, self.digest, p), CHUNK) for p in pages])
        return have[: -(-count // 8)]  # what is beyond would cost us time


def _close(opening: asyncio.Future[Partial]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _is_open(opening: asyncio.Future[Partial]) -> bool:
    return opening.done() and not opening.cancelled() and opening.exception() is None


def _spread(holders: list[PeerKey]) -> list[PeerKey]:
    """The likeliest first, the others in any order: those who fetch at once shall not all ask the same few."""
    others = holders[1:]
    random.shuffle(others)
    return holders[:1] + others
