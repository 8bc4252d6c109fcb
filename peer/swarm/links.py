"""The asking side of blob streams: one stream a peer and lane, shared by all fetches.

As many requests are under way as fill the line (see `pace.py`), but only HELD replies are in memory that nobody has
dealt with yet: the rest wait where they come from.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import async_timeout

from peer.swarm.errors import PeerUnreachable, SwarmError
from peer.swarm.frames import REPLY_HEAD_BYTES, Reply, Request, parse_reply_head
from peer.swarm.pace import Mark, Pace
from peer.swarm.traffic import Traffic
from protocol.errors import MalformedError
from protocol.ids import PeerKey

log = logging.getLogger(__name__)

OpenStream = Callable[[PeerKey, float], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """A stream is dead when less than PIECE comes in `reply_seconds` while that is due, or when one reply takes
    `slow_replies` times as long: 256 KiB in 60 s are 35 kbit/s. It is kept for the next round, which is minutes away:
    a new one costs a round trip, and what the old one knows of the line."""

    open_seconds: float = 10
    reply_seconds: float = 15
    slow_replies: float = 4
    idle_seconds: float = 1740
    """Less than the other side waits: who closes it knows that it is closed."""
    links: int = 192


BLOBS_AHEAD = 8
"""Blobs of which a few chunks may be in memory before it is known what they must be."""

PIECE = 64 * 1024
"""Bytes that are read at once: libp2p's daemon gives a few thousand at a time, and a deadline for each costs more."""

REMEMBERED = 1024
"""Streams that have ended, of whose lines something is known."""

HELD = 2
"""Replies of one stream that are in memory at once, besides the one that is coming in."""


class LinkLost(SwarmError):
    """A stream broke or stalled: what was asked on it has to be asked again. `hostile`: it broke the framing."""

    def __init__(self, reason: str, *, hostile: bool = False):
        super().__init__(reason)
        self.hostile = hostile


class _Stale(Exception):
    """The link ended before this was asked on it. Internal."""


@dataclass(slots=True)
class _Asked:
    limit: int
    mark: Mark
    answer: asyncio.Future[Reply]


class Link:
    """An open stream to one peer."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: LinkLimits, traffic: Traffic
    ):
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._traffic = traffic
        self.pace = Pace()
        self.gave = False
        """A chunk that came by it was the right one."""
        self._places = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._asked: deque[_Asked] = deque()
        self._held = asyncio.Semaphore(HELD)
        self._wake = asyncio.Event()
        self._lost: LinkLost | None = None
        self._task = asyncio.ensure_future(self._read_replies())

    @property
    def alive(self) -> bool:
        """An idle one may have been closed by the other side, which nobody reads."""
        return self._lost is None and not (self.idle and self._reader.at_eof())

    @property
    def idle(self) -> bool:
        return not self._asked and not self._places

    # -- places: who may have a request under way --------------------------------------------------------------------

    async def take_place(self) -> None:
        """Wait until one more request may be under way; first come, first served. To be given back with `free`.
        Raises _Stale."""
        if self._lost is not None:
            raise _Stale
        if self._places < self.pace.window and not self._waiting:
            self._places += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.free()  # it came at the same instant
            raise

    def free(self) -> None:
        """A place is not needed any more."""
        self._places -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._places < self.pace.window:
            turn = self._waiting.popleft()
            if not turn.done():
                self._places += 1
                turn.set_result(None)

    # -- requests ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def asking(self, request: Request, limit: int) -> AsyncIterator[Reply]:
        """For who has a place: the reply, of at most `limit` bytes. While it is held, few others are read.

        Raises LinkLost; _Stale when nothing was sent.
        """
        if self._lost is not None:
            raise _Stale
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked.append(_Asked(limit, self._mark(), answer))
        self._writer.write(request.encode())  # no drain: a window of requests is a few kilobytes
        self._wake.set()
        try:
            yield await answer
        finally:
            if not answer.done():
                answer.cancel()
            if answer.cancelled():
                self._hang_up_if_abandoned()
            elif answer.exception() is None:
                self._held.release()

    def _mark(self) -> Mark:
        now, full = asyncio.get_running_loop().time(), self._places >= self.pace.window
        return self.pace.sent(now, len(self._asked) + 1, full)

    def _hang_up_if_abandoned(self) -> None:
        """Much is to come that nobody waits for: it would only be in the way."""
        if len(self._asked) > HELD and all(a.answer.done() for a in self._asked):
            self.close("nobody waits for what was asked")

    def close(self, reason: str = "closed") -> None:
        self._task.cancel()
        self._fail(LinkLost(reason))

    async def _read_replies(self) -> None:
        try:
            while True:
                if not self._asked:
                    self._wake.clear()
                    async with async_timeout.timeout(self._limits.idle_seconds):
                        await self._wake.wait()
                await self._held.acquire()
                asked = self._asked[0]
                reply = await self._read_reply(asked.limit)
                if self._lost is not None:
                    return  # closed at the same instant
                self._asked.popleft()
                self._traffic.down += len(reply.data)
                self.pace.came(asked.mark, len(reply.data), asyncio.get_running_loop().time())
                self._admit()
                if asked.answer.done():
                    self._held.release()
                else:
                    asked.answer.set_result(reply)
        except asyncio.TimeoutError:
            stalled = f"no answer in {self._limits.reply_seconds:.0f} s" if self._asked else "idle"
            self._fail(LinkLost(stalled))
        except MalformedError as e:
            self._fail(LinkLost(str(e), hostile=True))
        except (asyncio.IncompleteReadError, OSError):
            self._fail(LinkLost("the stream broke"))

    async def _read_reply(self, limit: int) -> Reply:
        """Raises TimeoutError, IncompleteReadError, OSError, MalformedError."""
        end = asyncio.get_running_loop().time() + self._limits.slow_replies * self._limits.reply_seconds
        status, length = parse_reply_head(await self._read(REPLY_HEAD_BYTES, end), limit)
        return Reply(status, await self._read(length, end))

    async def _read(self, size: int, end: float) -> bytes:
        pieces, left = [], size
        while left:
            within = min(self._limits.reply_seconds, end - asyncio.get_running_loop().time())
            async with async_timeout.timeout(within):
                piece = await self._reader.readexactly(min(left, PIECE))
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _fail(self, lost: LinkLost) -> None:
        if self._lost is None:
            self._lost = lost
        self._writer.close()
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(_Stale())
        self._waiting.clear()
        while self._asked:
            asked = self._asked.popleft()
            if not asked.answer.done():
                asked.answer.set_exception(self._lost)


@dataclass(frozen=True, slots=True)
class Place:
    """Room for one request on a stream. Give it back with `free`, whatever became of it."""

    _link: Link

    @asynccontextmanager
    async def asking(self, request: Request, limit: int) -> AsyncIterator[Reply]:
        """The reply, for as long as its data are needed. Raises LinkLost."""
        try:
            async with self._link.asking(request, limit) as reply:
                yield reply
        except _Stale:
            raise LinkLost("the stream broke") from None

    def free(self) -> None:
        self._link.free()


@dataclass
class Links:
    """The open streams to all peers. Small blobs have a lane of their own: they need not queue behind big ones."""

    open_stream: OpenStream
    traffic: Traffic
    limits: LinkLimits = field(default_factory=LinkLimits)
    _links: dict[tuple[PeerKey, str], Link] = field(default_factory=dict)
    _opening: dict[tuple[PeerKey, str], asyncio.Lock] = field(default_factory=dict)
    _laden: dict[tuple[PeerKey, str], float] = field(default_factory=dict)
    _closed: bool = False
    _ahead: int = 0

    def take_ahead(self) -> bool:
        """Whether chunks of one more blob may be asked for before their hashes are here. To be given back."""
        free = self._ahead < BLOBS_AHEAD
        self._ahead += free
        return free

    def give_ahead(self) -> bool:
        """What was taken is free again. Returns False."""
        self._ahead -= 1
        return False

    async def place(self, peer: PeerKey, lane: str) -> Place:
        """Wait until one more request to a peer may be under way. Raises LinkLost, PeerUnreachable."""
        for _ in range(3):
            link = self._live(peer, lane) or await self._open(peer, lane)
            if (peer, lane) in self._links:
                self._links[peer, lane] = self._links.pop((peer, lane))  # the last that would be closed for another
            with suppress(_Stale):
                await link.take_place()
                return Place(link)
        raise LinkLost("the streams to it end as soon as they are open")

    async def ask(self, peer: PeerKey, lane: str, request: Request, limit: int) -> Reply:
        """One request to a peer. Raises LinkLost, PeerUnreachable."""
        place = await self.place(peer, lane)
        try:
            async with place.asking(request, limit) as reply:
                return reply
        finally:
            place.free()

    def latency(self, peer: PeerKey, lane: str) -> float:
        """Seconds that a reply of this peer takes of late; 0 when that is not known."""
        link = self._live(peer, lane)
        return link.pace.latency if link is not None else 0.0

    def laden(self, peer: PeerKey, lane: str) -> float:
        """The same, with what was slow forgotten slowly (`Pace.laden`), also of the last stream when there is none."""
        link = self._live(peer, lane)
        return link.pace.laden if link is not None else self._laden.get((peer, lane), 0.0)

    def gave(self, peer: PeerKey, lane: str) -> None:
        """A right chunk came from it."""
        if (link := self._live(peer, lane)) is not None:
            link.gave = True

    def has_given(self, peer: PeerKey, lane: str) -> bool:
        """Whether right chunks have come by the stream that is open to it."""
        link = self._live(peer, lane)
        return link is not None and link.gave

    def _live(self, peer: PeerKey, lane: str) -> Link | None:
        link = self._links.get((peer, lane))
        if link is None or link.alive:
            return link
        self._drop((peer, lane), "the other side has closed it")
        return None

    def _drop(self, name: tuple[PeerKey, str], reason: str) -> None:
        """Close a stream. It is slow peers' streams that end often: what is known of their lines stays."""
        link = self._links.pop(name)
        link.close(reason)
        if link.pace.laden:
            self._laden.pop(name, None)  # to its end: the oldest goes first
            self._laden[name] = link.pace.laden
        while len(self._laden) > REMEMBERED:
            del self._laden[next(iter(self._laden))]

    def hang_up(self, peer: PeerKey) -> None:
        """Close the streams to a peer: what it still sends is not wanted."""
        for (other, _), link in self._links.items():
            if other == peer:
                link.close("hung up")

    async def _open(self, peer: PeerKey, lane: str) -> Link:
        name = (peer, lane)
        lock = self._opening.setdefault(name, asyncio.Lock())
        async with lock:
            if (link := self._live(peer, lane)) is not None:
                return link
            self._sweep()
            reader, writer = await self.open_stream(peer, self.limits.open_seconds)
            link = self._links[name] = Link(reader, writer, self.limits, self.traffic)
            link.pace.laden = self._laden.get(name, 0.0)
            if self._closed:
                link.close()
                raise PeerUnreachable("the swarm is stopping")
            return link

    def _sweep(self) -> None:
        """Forget dead links; close idle ones, the longest unused first, while there are too many."""
        for peer, lane in list(self._links):
            self._live(peer, lane)
        for name in [n for n, link in self._links.items() if link.idle]:
            if len(self._links) < self.limits.links:
                break
            self._drop(name, "too many streams")
        for name in [n for n, lock in self._opening.items() if n not in self._links and not lock.locked()]:
            del self._opening[name]

    def close(self) -> None:
        self._closed = True
        for link in self._links.values():
            link.close("the swarm is stopping")
        self._links.clear()
