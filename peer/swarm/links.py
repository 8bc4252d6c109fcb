"""The asking side of blob streams: one stream a peer and lane, shared by all fetches, several requests under way."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from peer.swarm.errors import PeerUnreachable, SwarmError
from peer.swarm.frames import REPLY_HEAD_BYTES, Reply, Request, parse_reply_head
from peer.swarm.traffic import Traffic
from protocol.errors import MalformedError
from protocol.ids import PeerKey

log = logging.getLogger(__name__)

OpenStream = Callable[[PeerKey, float], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """`reply_seconds` is for each reply by itself, so a slow link is no dead one: 256 KiB in 15 s is 140 kbit/s."""

    window: int = 6
    open_seconds: float = 10
    reply_seconds: float = 15
    idle_seconds: float = 20
    links: int = 64


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
        self._window = asyncio.Semaphore(limits.window)
        self._asked: deque[_Asked] = deque()
        self._wake = asyncio.Event()
        self._lost: LinkLost | None = None
        self._task = asyncio.ensure_future(self._read_replies())

    @property
    def alive(self) -> bool:
        return self._lost is None

    @property
    def idle(self) -> bool:
        return not self._asked

    async def ask(self, request: Request, limit: int) -> Reply:
        """The reply, of at most `limit` bytes. Raises LinkLost; _Stale when nothing was sent."""
        async with self._window:
            if self._lost is not None:
                raise _Stale
            answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            self._asked.append(_Asked(limit, answer))
            self._writer.write(request.encode())  # no drain: a window of requests is a few hundred bytes
            self._wake.set()
            return await answer

    def close(self, reason: str = "closed") -> None:
        self._task.cancel()
        self._fail(LinkLost(reason))

    async def _read_replies(self) -> None:
        try:
            while True:
                if not self._asked:
                    self._wake.clear()
                    await asyncio.wait_for(self._wake.wait(), self._limits.idle_seconds)
                asked = self._asked[0]
                reply = await asyncio.wait_for(self._read_reply(asked.limit), self._limits.reply_seconds)
                self._asked.popleft()
                self._traffic.down += len(reply.data)
                if not asked.answer.done():
                    asked.answer.set_result(reply)
        except asyncio.TimeoutError:
            stalled = f"no answer in {self._limits.reply_seconds:.0f} s" if self._asked else "idle"
            self._fail(LinkLost(stalled))
        except MalformedError as e:
            self._fail(LinkLost(str(e), hostile=True))
        except (asyncio.IncompleteReadError, OSError):
            self._fail(LinkLost("the stream broke"))

    async def _read_reply(self, limit: int) -> Reply:
        head = await self._reader.readexactly(REPLY_HEAD_BYTES)
        status, length = parse_reply_head(head, limit)
        return Reply(status, await self._reader.readexactly(length))

    def _fail(self, lost: LinkLost) -> None:
        if self._lost is None:
            self._lost = lost
        self._writer.close()
        while self._asked:
            asked = self._asked.popleft()
            if not asked.answer.done():
                asked.answer.set_exception(self._lost)


@dataclass
class Links:
    """The open streams to all peers. Small blobs have a lane of their own: they need not queue behind big ones."""

    open_stream: OpenStream
    traffic: Traffic
    limits: LinkLimits = field(default_factory=LinkLimits)
    _links: dict[tuple[PeerKey, str], Link] = field(default_factory=dict)
    _opening: dict[tuple[PeerKey, str], asyncio.Lock] = field(default_factory=dict)
    _closed: bool = False

    async def ask(self, peer: PeerKey, lane: str, request: Request, limit: int) -> Reply:
        """One request to a peer. Raises LinkLost, PeerUnreachable."""
        for _ in range(3):
            link = self._links.get((peer, lane))
            if link is None or not link.alive:
                link = await self._open(peer, lane)
            try:
                return await link.ask(request, limit)
            except _Stale:
                continue
        raise LinkLost("the streams to it end as soon as they are open")

    async def _open(self, peer: PeerKey, lane: str) -> Link:
        name = (peer, lane)
        lock = self._opening.setdefault(name, asyncio.Lock())
        async with lock:
            link = self._links.get(name)
            if link is not None and link.alive:
                return link
            self._sweep()
            reader, writer = await self.open_stream(peer, self.limits.open_seconds)
            link = self._links[name] = Link(reader, writer, self.limits, self.traffic)
            if self._closed:
                link.close()
                raise PeerUnreachable("the swarm is stopping")
            return link

    def _sweep(self) -> None:
        """Forget dead links; close idle ones, the oldest first, while there are too many."""
        for name in [n for n, link in self._links.items() if not link.alive]:
            del self._links[name]
        for name in [n for n, link in self._links.items() if link.idle]:
            if len(self._links) < self.limits.links:
                break
            self._links.pop(name).close("too many streams")
        for name in [n for n, lock in self._opening.items() if n not in self._links and not lock.locked()]:
            del self._opening[name]

    def close(self) -> None:
        self._closed = True
        for link in self._links.values():
            link.close("the swarm is stopping")
        self._links.clear()
