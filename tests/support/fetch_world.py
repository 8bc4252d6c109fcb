"""Peers that fetch blobs from each other over simulated lines, in a time of their own: no daemons, sockets, waits.

The fetching and the serving side are the real ones; what lies between is a stream with a rate, a delay and a bounded
buffer. Each host's uplink is shared evenly by its streams.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

from peer.store import Store
from peer.swarm.errors import PeerUnreachable
from peer.swarm.fetch import Fetch
from peer.swarm.links import LinkLimits, Links
from peer.swarm.serve import BlobServer, ServeLimits
from peer.swarm.traffic import Traffic
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey
from protocol.merkle import MAX_BLOB

MBIT = 1e6 / 8
SEGMENT = 16 * 1024
BUFFER = 1024 * 1024
"""Bytes of a stream that are on their way out: the daemon's buffers and TCP's."""

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Instead of waiting, the time moves on."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing is left that could happen")
        if not ready and timeout:
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _Inline(Executor):
    """Threads have a time of their own: none are used."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as e:  # noqa: BLE001  # as an executor does
            done.set_exception(e)
        return done


class SlowDisk(Executor):
    """Everything takes so many seconds, one thing after the other."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._free = 0.0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        loop, done = asyncio.get_running_loop(), Future[Any]()
        self._free = max(self._free, loop.time()) + self._seconds
        loop.call_at(self._free, lambda: _Inline().submit(fn, *args, **kwargs).add_done_callback(
            lambda found: done.set_exception(e) if (e := found.exception()) else done.set_result(found.result())
        ))  # fmt: skip
        return done


def simulated(main: Coroutine[Any, Any, T]) -> T:
    """Run it in simulated time; what is left to chance (which holder is asked first) comes out the same each time."""
    random.seed(0)
    loop = _Loop()
    try:
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()


class _Pipe:
    """One direction of a stream, as its sender writes to it."""

    def __init__(self, sender: Host, reader: asyncio.StreamReader, delay: Callable[[], float]):
        self._sender = sender
        self._reader = reader
        self._delay = delay
        self.segments: deque[bytes] = deque()
        self.waiting = 0
        self._room = asyncio.Event()
        self.other: _Pipe
        self.closed = False
        self.cut = False

    def write(self, data: bytes) -> None:
        if self.closed:
            return
        self.segments += (bytes(data[i : i + SEGMENT]) for i in range(0, len(data), SEGMENT))
        self.waiting += len(data)
        self._sender.has_to_send(self)

    def writelines(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            self.write(part)

    async def drain(self) -> None:
        while self.waiting > BUFFER and not self.closed:
            self._room.clear()
            await self._room.wait()

    def sent(self, segment: bytes) -> None:
        """It has left the host, and arrives after the delay."""
        self.waiting -= len(segment)
        self._room.set()
        asyncio.get_running_loop().call_later(self._delay(), self._arrive, segment)

    def _arrive(self, segment: bytes) -> None:
        if not self.closed and not self.cut:
            self._reader.feed_data(segment)

    def close(self) -> None:
        for end in (self, self.other):
            if not end.closed:
                end.closed = True
                end.segments.clear()
                end._room.set()
                end._reader.feed_eof()


class Host:
    """A peer: a store, the serving side, the asking side, an uplink of so many Mbit/s."""

    def __init__(self, world: World, number: int, folder: Path, up_mbit: float):
        self.key: PeerKey = Identity(bytes([number + 1]) * 32).key
        self.store = Store(folder / str(number), 1 << 40)
        self.up = up_mbit * MBIT
        self.traffic = Traffic()
        self.bad: list[PeerKey] = []
        self.may_serve: Callable[[Digest, PeerKey], str | None] = lambda digest, peer: None
        self.pipes: list[_Pipe] = []
        """Its ends of all streams that were opened to it or by it."""

        self.reachable = True
        self.executor: Executor = _Inline()
        self._world = world
        self._server = BlobServer(
            self.store, lambda d, p: self.may_serve(d, p), _Inline(), self.traffic, ServeLimits(streams_per_peer=4)
        )
        self.links = Links(self._open, self.traffic, LinkLimits())
        self._queue: deque[_Pipe] = deque()
        self._sending: asyncio.Future[None] | None = None

    async def fetch(self, digest: Digest, size: int, holders: Sequence[Host], seconds: float = 600) -> float:
        """Seconds that it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        fetch = Fetch(
            self.links, self.store, self.executor, digest, size, [h.key for h in holders if h is not self],
            me=self.key, max_size=MAX_BLOB, on_bad=lambda peer, reason: self.bad.append(peer),
        )  # fmt: skip
        await fetch.run(seconds)
        return loop.time() - began

    def hang_up(self) -> None:
        """All its streams break."""
        for pipe in self.pipes:
            pipe.close()

    def lose_power(self) -> None:
        """It says nothing any more, not even goodbye."""
        self.reachable = False
        for pipe in self.pipes:
            pipe.cut = pipe.other.cut = True

    def has_to_send(self, pipe: _Pipe) -> None:
        if pipe not in self._queue:
            self._queue.append(pipe)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        while self._queue:
            pipe = self._queue.popleft()
            if pipe.segments:
                segment = pipe.segments.popleft()
                await asyncio.sleep(len(segment) / self.up)
                pipe.sent(segment)
                if pipe.segments:
                    self._queue.append(pipe)

    async def _open(self, peer: PeerKey, seconds: float) -> tuple[Any, Any]:
        other = self._world.hosts[peer]
        if not other.reachable:
            await asyncio.sleep(seconds)
            raise PeerUnreachable(f"peer {peer.short} could not be reached in {seconds:.0f} s")
        await asyncio.sleep(self._world.rtt)
        mine, theirs = asyncio.StreamReader(), asyncio.StreamReader()
        out, back = (
            _Pipe(self, theirs, lambda: self._world.rtt / 2),
            _Pipe(other, mine, lambda: self._world.rtt / 2),
        )
        out.other, back.other = back, out
        self.pipes.append(out)
        other.pipes.append(back)
        self._world.spawn(self._serve(other, theirs, back))
        return mine, out

    async def _serve(self, other: Host, reader: Any, writer: Any) -> None:
        try:
            await other._server.handle(self.key, reader, writer)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class World:
    """All hosts are as far from each other."""

    def __init__(self, folder: Path, *, rtt: float):
        self.hosts: dict[PeerKey, Host] = {}
        self.rtt = rtt
        self._folder = folder
        self._tasks: set[asyncio.Future[None]] = set()

    def host(self, up_mbit: float) -> Host:
        made = Host(self, len(self.hosts), self._folder, up_mbit)
        self.hosts[made.key] = made
        return made

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for host in self.hosts.values():
            host.links.close()
            host.store.close()
