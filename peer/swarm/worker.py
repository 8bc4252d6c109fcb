"""Chunks of one blob from one holder: as many under way as its line takes, until nothing is left or it gives no more.

Which chunk is next says `plan.py`; what becomes of a reply, and of a holder that lies, says `fetch.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

from peer.swarm.clock import clock
from peer.swarm.errors import PeerUnreachable
from peer.swarm.frames import Op, Request, Status
from peer.swarm.holders import Dropped, Holder, Later
from peer.swarm.links import LinkLost, Place
from peer.swarm.plan import Plan
from protocol.merkle import CHUNK, chunk_count

if TYPE_CHECKING:
    from peer.store import Partial
    from peer.swarm.fetch import Fetch

AHEAD, KNOWN_AHEAD = 3, 6
"""Chunks asked for before their hashes are here, which go into memory: so many of one blob, and blobs in all as said in
`Links`. One less than a new stream takes, so that the hashes need not wait; of a holder that gave us others by the same
stream what keeps its line busy until the rest is asked for."""

UNPROVED = 4
"""Chunks asked of a holder at once before one of them has come, unless it gave us others by the same stream."""

IDLE_SECONDS = 0.02
"""How long to wait when there is nothing to ask of a holder."""

MAP_SECONDS = (0.1, 1.0)
"""How often a holder that fetches too is asked what it has: while that changes, and at the least."""

FEW, LAST_SECONDS = 16, 0.02
"""When so few chunks are left, it is asked this often: what one more round trip costs is seen at the end."""


class Worker:
    """Chunks from one holder, as fast as it gives them, until the fetch is complete."""

    def __init__(
        self, fetch: Fetch, plan: Plan, partial: asyncio.Future[Partial], size: int, holder: Holder, lane: str
    ):
        self._fetch = fetch
        self._plan = plan
        self._partial = partial
        self._count = chunk_count(size)
        self._holder = holder
        self._lane = lane
        self._running: set[asyncio.Future[None]] = set()
        self._pause: Later | None = None
        self._failure: BaseException | None = None
        self._map_due = 0.0
        self._map_seconds = MAP_SECONDS[0]

    async def run(self) -> None:
        """Raises Dropped, WrongSize, BlobMissing, StoreError."""
        opening = asyncio.ensure_future(self._open())
        try:
            if self._plan.is_unheard(self._holder.peer):
                await self._learn()
            while not self._fetch.complete.is_set():
                await self._turn()
        finally:
            await cancel({opening, *self._running})

    async def _open(self) -> None:
        """The stream for chunks is there when the first is asked for; if it cannot be had, that is seen then."""
        with contextlib.suppress(LinkLost, PeerUnreachable):
            (await self._fetch.links.place(self._holder.peer, self._lane)).free()

    async def _turn(self) -> None:
        """One more chunk asked for, or a wait."""
        fetch, holder = self._fetch, self._holder
        if self._running and (holder.suspected or len(self._running) >= self._most()):
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            return
        try:
            place = await fetch.links.place(holder.peer, self._lane)
        except (LinkLost, PeerUnreachable) as e:
            await self._rest(self._lost(e))
            return
        index = None
        try:
            if self._failure is not None:
                raise self._failure
            if holder.bad:
                raise Dropped
            if self._pause is None:
                index = self._plan.next(holder.peer, clock())
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

    def _most(self) -> float:
        """Chunks that may be under way from it, whatever its line takes."""
        holder, links = self._holder, self._fetch.links
        known = not holder.counts and (holder.proved or links.has_given(holder.peer, self._lane))
        if not self._partial.done():
            return KNOWN_AHEAD if known else AHEAD
        return inf if known else UNPROVED

    async def _one(self, place: Place, index: int) -> None:
        """Ask for a chunk and keep it."""
        fetch, holder = self._fetch, self._holder
        try:
            try:
                async with place.asking(Request(Op.CHUNK, fetch.digest, index), CHUNK) as reply:
                    ahead = not self._partial.done()
                    if reply.status is not Status.OK and (ahead or self._pause is not None):
                        raise Later(0.0)  # all that was asked at the same time counts once, and nothing ahead at all
                    data = fetch.data_of(holder, reply)
                    if not ahead:
                        await fetch.keep(holder, self._partial.result(), index, data)
            finally:
                place.free()
            if ahead:  # without a hold on the stream: the hashes may be behind it
                await fetch.keep(holder, await asyncio.shield(self._partial), index, data)
            self._plan.came(index, clock(), holder.peer)
            if not self._plan.left:
                fetch.complete.set()
        finally:
            self._plan.over(holder.peer, index)

    def _settled(self, task: asyncio.Future[None]) -> None:
        """A chunk came or did not: what the worker has to know of it."""
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        try:
            if isinstance(error, LinkLost) and self._pause is None:
                error = self._lost(error)  # all that was under way is lost: that counts once
        except Dropped as e:
            error = e
        if isinstance(error, Later):
            self._pause = self._pause or error
        elif not isinstance(error, LinkLost):
            self._failure = self._failure or error

    def _lost(self, error: LinkLost | PeerUnreachable) -> Later:
        """What to do about a stream that broke or could not be had. Raises Dropped."""
        hostile = isinstance(error, LinkLost) and error.hostile
        return self._fetch.lost(self._holder, error) if hostile or self._partial.done() else Later(0.0)

    async def _rest(self, later: Later) -> None:
        """The holder gave nothing: once all that was asked of it is settled, wait.

        While it is asked for the hashes too, its patience is counted there."""
        if self._running:
            await asyncio.wait(self._running)
        self._pause = None
        if not self._partial.done():
            await asyncio.wait({self._partial})
            return
        await asyncio.sleep(later.seconds)
        if later.absent:
            await self._learn()

    async def _idle(self) -> None:
        """There is nothing to ask of it now."""
        self._plan.look(clock())
        if not self._plan.left:
            self._fetch.complete.set()
            return
        if self._plan.has_more_soon(self._holder.peer) and clock() >= self._map_due:
            await self._learn()
        else:
            await asyncio.sleep(IDLE_SECONDS)

    async def _learn(self) -> None:
        """What the holder has."""
        failed = 0
        while True:
            try:
                have = await self._fetch.have_map(self._holder, self._count)
                break
            except Later as later:
                failed += 1
                if failed > 1:  # the first time it may just be about to begin
                    self._plan.gives_nothing(self._holder.peer)
                await asyncio.sleep(later.seconds)
        if self._plan.learn(self._holder.peer, have, clock()):
            self._map_seconds = MAP_SECONDS[0]
        else:
            self._map_seconds = min(MAP_SECONDS[1], 1.5 * self._map_seconds)
        self._map_due = clock() + (self._map_seconds if self._plan.left > FEW else min(LAST_SECONDS, self._map_seconds))


async def cancel(tasks: Iterable[asyncio.Future]) -> None:
    """Cancel, and wait until they have let go of what they hold."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
