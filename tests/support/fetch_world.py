"""Peers that fetch blobs from each other over simulated network paths, in simulated time.

The fetching and the serving side are the product's; between them is a `MemoryTransport`.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

from peer.store import Store
from peer.swarm.pace import Pace, Paces
from peer.swarm.transfer.blob_server import BlobServer, ServeLimits
from peer.swarm.transfer.fetch import Fetch
from peer.swarm.transfer.streams import StreamLimits, StreamPool
from peer.swarm.transport import ByteCount
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey
from tests.support.memory_transport import MemoryNetwork, Pipe

MBIT = 1e6 / 8
BLOB = "blob"

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
    """A disk on which each operation takes `seconds`, one after the other."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._free = 0.0
        self._waiting = 0
        self.most = 0
        """The most operations that were under way at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        loop, done = asyncio.get_running_loop(), Future[Any]()
        self._free = max(self._free, loop.time()) + self._seconds
        self._waiting += 1
        self.most = max(self.most, self._waiting)

        def finish() -> None:
            self._waiting -= 1
            found = _Inline().submit(fn, *args, **kwargs)
            done.set_exception(e) if (e := found.exception()) else done.set_result(found.result())

        loop.call_at(self._free, finish)
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


def _simulated_time() -> float:
    return asyncio.get_running_loop().time()


class Host:
    """A peer: a store, the serving side, the fetching side, an uplink of some Mbit/s."""

    def __init__(self, network: MemoryNetwork, number: int, folder: Path, up_mbit: float):
        self.key: PeerKey = Identity(bytes([number + 1]) * 32).key
        self.store = Store(folder / str(number), 1 << 40)
        self.traffic = ByteCount()
        self.bad: list[PeerKey] = []
        self.serve_refusal: Callable[[Digest, PeerKey], str | None] = lambda digest, peer: None
        self.executor: Executor = _Inline()
        self.paces = Paces(Pace(_simulated_time), Pace(_simulated_time))
        self.server = BlobServer(
            self.store, lambda d, p: self.serve_refusal(d, p), _Inline(), self.traffic,
            ServeLimits(streams_per_peer=4), pace=self.paces.up,
        )  # fmt: skip
        self.transport = network.host(self.key, up=up_mbit * MBIT)
        self.streams = StreamPool(
            lambda peer, seconds: self.transport.open_stream(peer, BLOB, seconds), self.traffic, StreamLimits(),
            self.paces.down,
        )  # fmt: skip

    @property
    def pipes(self) -> list[Pipe]:
        """Its ends of all streams that were opened to it or by it."""
        return self.transport.pipes

    async def fetch(self, digest: Digest, size: int, holders: Sequence[Host], seconds: float = 600) -> float:
        """Fetch a blob; return the seconds that it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        fetch = Fetch(
            self.streams, self.store, self.executor, digest, size, [h.key for h in holders if h is not self],
            me=self.key, on_bad=lambda peer, reason: self.bad.append(peer),
        )  # fmt: skip
        await fetch.run(seconds)
        return loop.time() - began


class World:
    """Hosts that are as far from each other."""

    def __init__(self, folder: Path, *, rtt: float):
        self.network = MemoryNetwork(rtt=rtt)
        self.rtt = rtt
        self._hosts: list[Host] = []
        self._folder = folder

    def host(self, up_mbit: float) -> Host:
        """Return a new host."""
        made = Host(self.network, len(self._hosts), self._folder, up_mbit)
        self.network.spawn(made.transport.accept_streams(BLOB, made.server.handle))
        self._hosts.append(made)
        return made

    def close(self) -> None:
        """Close all streams and stores."""
        for host in self._hosts:
            host.streams.close()
            host.store.close()
