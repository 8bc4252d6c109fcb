"""How an update spreads while it is made, over simulated lines: early, each chunk once, and from whom it should be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from peer.store import Ahead
from peer.swarm.ahead import AT_ONCE, FetchAhead
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.merkle import CHUNK, blob_digest, blob_leaves
from tests.fetch_world import Host, World, simulated

NAME = Digest(b"n" * 32)


def data_of(chunks: float, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(int(chunks * CHUNK))


class Making:
    """An author whose update grows by a chunk in so many seconds, and those who fetch it meanwhile."""

    def __init__(self, author: Host, others: list[Host], data: bytes, folder: Path):
        self.author, self.others, self.data = author, others, data
        self.leaves = blob_leaves(data)
        self.path = folder / "update"
        self.path.write_bytes(b"")
        self.made = author.store.made(NAME, len(data), self.path)
        self.aheads = {h.key: h.store.ahead(NAME, len(data)) for h in others}
        self.over = asyncio.Event()
        self.seen: list[tuple[PeerKey, int]] = []
        """How many chunks each had when the last was made."""

    def name(self, first: int, leaves: list[bytes]) -> None:
        for ahead in self.aheads.values():
            assert ahead.hint(first, leaves)

    async def grow(self, seconds: float) -> None:
        for n in range(len(self.leaves)):
            await asyncio.sleep(seconds)
            self.path.write_bytes(self.data[: (n + 1) * CHUNK])
            self.made.grow(min(len(self.data), (n + 1) * CHUNK))
            self.seen = [(key, sum(map(ahead.has, range(n)))) for key, ahead in self.aheads.items()]
            self.name(n, [self.leaves[n]])

    def fetch(self, host: Host, deal: Callable[[int], PeerKey] | None = None) -> Awaitable[None]:
        those = sorted(h.key for h in self.others)

        def of_whom(index: int) -> PeerKey:
            dealt = those[index % len(those)]
            return self.author.key if dealt == host.key else dealt

        fetch = FetchAhead(
            host.links, host.executor, self.aheads[host.key], self.author.key, lambda: deal or of_whom, self.over
        )
        return asyncio.ensure_future(fetch.run())

    async def announced(self, hosts: list[Host]) -> None:
        """The blob has a digest: all get what they lack of it."""
        digest = self.author.store.put(self.data)
        assert digest == blob_digest(self.data)
        for host in self.others:
            host.store.became(NAME, digest)
        await asyncio.gather(*(h.fetch(digest, len(self.data), hosts) for h in self.others))
        for host in self.others:
            assert host.store.read(digest) == self.data


@pytest.mark.parametrize("fetchers", [1, 4])
def test_chunks_are_there_before_the_last_is_made_and_none_comes_twice(tmp_path: Path, fetchers: int):
    data = data_of(20.5)

    async def main() -> tuple[Making, list[int], int]:
        world = World(tmp_path, rtt=0.1)
        author, *others = hosts = [world.host(50 if n == 0 else 100) for n in range(fetchers + 1)]
        making = Making(author, others, data, tmp_path)
        running = [making.fetch(h) for h in others]
        await making.grow(0.2)
        making.over.set()
        await asyncio.gather(*running)
        await making.announced(hosts)
        down, up = [h.traffic.down for h in others], author.traffic.up
        world.close()
        return making, down, up

    making, down, up = simulated(main())
    assert all(had >= 15 for _, had in making.seen)
    assert all(len(data) <= came <= len(data) + 2000 for came in down)  # some maps of what others have
    assert up <= 1.1 * len(data)


def test_a_round_waits_for_less_of_a_slow_authors_update(tmp_path: Path):
    """From the header until all have it: with chunks named while it is made, and without."""
    data = data_of(40)

    async def main(folder: Path, *, early: bool) -> float:
        folder.mkdir()  # noqa: ASYNC240
        world = World(folder, rtt=0.1)
        author, *others = hosts = [world.host(20 if n == 0 else 100) for n in range(6)]
        making = Making(author, others, data, folder)
        running = [making.fetch(h) for h in others if early]
        await making.grow(0.075)  # 3 s for all of it: its uplink could carry 28 chunks meanwhile
        making.over.set()
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*running)
        await making.announced(hosts)
        took = asyncio.get_running_loop().time() - began
        world.close()
        return took

    with_names, without = (simulated(main(tmp_path / str(early), early=early)) for early in (True, False))
    assert with_names < 0.5 * without, (with_names, without)


def one_by_one(tmp_path: Path, after: Callable[[Making, World], None], answer: Callable[[Making], object]) -> object:
    """An author with 8 chunks, all of them named, and one who fetches them; `answer` is asked after 5 s."""

    async def main() -> object:
        world = World(tmp_path, rtt=0.1)
        author, other = hosts = [world.host(50), world.host(50)]
        making = Making(author, [other], data_of(8), tmp_path)
        after(making, world)
        running = making.fetch(other)
        await asyncio.sleep(5)
        found = answer(making)
        making.over.set()
        try:
            await running
        except MalformedError:
            found = "a liar"
        making.author.may_serve = lambda digest, peer: None
        await making.announced(hosts)
        world.close()
        return found

    return simulated(main())


def all_made(making: Making, world: World) -> None:
    making.path.write_bytes(making.data)
    making.made.grow(len(making.data))
    making.name(0, making.leaves)


def chunks_of(making: Making) -> int:
    (ahead,) = making.aheads.values()
    assert isinstance(ahead, Ahead)
    return sum(map(ahead.has, range(8)))


def test_who_names_chunks_that_it_does_not_give_is_asked_a_few_times_and_holds_up_nothing(tmp_path: Path):
    asked: list[Digest] = []

    def refuses(making: Making, world: World) -> None:
        making.name(0, making.leaves)
        making.author.may_serve = lambda digest, peer: asked.append(digest) or "no"

    assert one_by_one(tmp_path, refuses, chunks_of) == 0
    assert 1 <= len(asked) <= 6 * AT_ONCE


def test_a_fellow_that_died_holds_up_the_rest_for_a_moment_only(tmp_path: Path):
    data = data_of(20)

    async def main() -> tuple[float, int]:
        world = World(tmp_path, rtt=0.1)
        author, one, dead = hosts = [world.host(50) for _ in range(3)]
        making = Making(author, [one, dead], data, tmp_path)
        all_made(making, world)
        running = making.fetch(one)
        dead.lose_power()
        making.others = [one]
        making.over.set()
        began = asyncio.get_running_loop().time()
        await running
        waited, had = asyncio.get_running_loop().time() - began, sum(map(making.aheads[one.key].has, range(20)))
        await making.announced(hosts)
        world.close()
        return waited, had

    waited, had = simulated(main())
    assert waited < 2.5 and had == 10  # those that were dealt to it


def test_who_gives_another_chunk_than_it_named_is_a_liar(tmp_path: Path):
    def lies(making: Making, world: World) -> None:
        making.path.write_bytes(bytes(len(making.data)))
        making.made.grow(len(making.data))
        making.name(0, making.leaves)

    assert one_by_one(tmp_path, lies, chunks_of) == "a liar"


def test_no_more_than_a_few_are_asked_of_one_holder_at_once(tmp_path: Path):
    most = [0]

    def counts(making: Making, world: World) -> None:
        all_made(making, world)
        (host,) = making.others
        place = host.links.place

        async def counted(peer: PeerKey, lane: str):
            waiting = sum(t.get_coro().__name__ == "_one" for t in asyncio.all_tasks())  # type: ignore[union-attr]
            most[0] = max(most[0], waiting)
            return await place(peer, lane)

        host.links.place = counted  # type: ignore[method-assign]

    assert one_by_one(tmp_path, counts, chunks_of) == 8
    assert 1 <= most[0] <= AT_ONCE


def test_what_the_store_lets_go_of_is_not_fetched_on(tmp_path: Path):
    def gone(making: Making, world: World) -> None:
        all_made(making, world)
        making.others[0].store.let_go(NAME)

    assert one_by_one(tmp_path, gone, chunks_of) == 0
