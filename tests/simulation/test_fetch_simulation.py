"""How blobs spread over lines of every sort, in simulated time: how long it takes, and what a source sends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import async_timeout
import pytest

from peer.store import InProgressBlob
from peer.swarm.errors import BlobFetchError
from peer.swarm.transfer.actions import Action, Answer, EndFetch, Priority, RequestChunk
from peer.swarm.transfer.chunk_stage import PROVED_EARLY
from peer.swarm.transfer.frames import BlobOp, BlobReply, BlobRequest, Lost
from peer.swarm.transfer.scheduler import Scheduler
from peer.swarm.transfer.streams import EARLY_BLOBS, HELD
from protocol.ids import PeerKey
from protocol.merkle import CHUNK
from tests.support.fetch_world import MBIT, Host, SlowDisk, World, simulated
from tests.support.long_cases import long_cases


def data_of(chunks: float, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(int(chunks * CHUNK))


@pytest.mark.parametrize("fetchers", [2, *long_cases(7)])
def test_a_slow_author_sends_each_chunk_about_once(tmp_path: Path, fetchers: int):
    data = data_of(48)

    async def main() -> tuple[float, float]:
        world = World(tmp_path, rtt=0.1)
        author, *others = hosts = [world.host(20 if n == 0 else 100) for n in range(fetchers + 1)]
        digest = author.store.put(data)
        took = await asyncio.gather(*(h.fetch(digest, len(data), hosts) for h in others))
        copies = author.traffic.up / len(data)
        world.close()
        return max(took), copies

    took, copies = simulated(main())
    assert copies <= 1.25
    assert took <= 1.25 * (len(data) / (20 * MBIT) + 0.2)


@pytest.mark.parametrize(("peers", "chunks"), [(4, 2), (4, 8), *long_cases((4, 13), (8, 2), (12, 6))])
def test_updates_of_all_to_all_take_little_longer_than_their_bytes(tmp_path: Path, peers: int, chunks: int):
    async def main() -> tuple[float, float]:
        world = World(tmp_path, rtt=0.1)
        hosts = [world.host(100) for _ in range(peers)]
        took = sent = 0.0
        for round in range(2):  # in the first streams are opened
            began, sent = asyncio.get_running_loop().time(), sum(h.traffic.up for h in hosts)
            digests = [h.store.put(data_of(chunks, 100 * round + i)) for i, h in enumerate(hosts)]
            await asyncio.sleep(world.rtt / 2)  # their headers
            await asyncio.gather(*(
                h.fetch(digest, chunks * CHUNK, [author, *hosts])
                for author, digest in zip(hosts, digests, strict=True) for h in hosts if h is not author
            ))  # fmt: skip
            took = asyncio.get_running_loop().time() - began
            sent = sum(h.traffic.up for h in hosts) - sent
            await asyncio.sleep(1)
        assert all(h.streams.early_blobs == 0 for h in hosts)
        world.close()
        return took, sent / (peers * (peers - 1) * chunks * CHUNK)

    took, copies = simulated(main())
    assert took <= 1.25 * ((peers - 1) * chunks * CHUNK / (100 * MBIT) + 2 * 0.1) + 0.1
    assert copies <= 1.1


@pytest.mark.long
def test_in_rounds_of_all_to_all_a_slow_uplink_is_spared_and_stays_so(tmp_path: Path):
    """From one round to the next peers know whose line is slow: the others pass its chunks on. That it answers quickly
    while it is spared does not have all ask it again in the round after."""
    chunks, peers, slow = 8, 6, 20

    async def main() -> list[tuple[float, float]]:
        world = World(tmp_path, rtt=0.1)
        hosts = [world.host(slow if n == 0 else 100) for n in range(peers)]
        seen = []
        for round in range(8):
            began, sent = asyncio.get_running_loop().time(), hosts[0].traffic.up
            digests = [h.store.put(data_of(chunks, 100 * round + i)) for i, h in enumerate(hosts)]
            await asyncio.sleep(world.rtt / 2)
            await asyncio.gather(*(
                h.fetch(digest, chunks * CHUNK, [author, *hosts])
                for author, digest in zip(hosts, digests, strict=True) for h in hosts if h is not author
            ))  # fmt: skip
            seen.append((asyncio.get_running_loop().time() - began, (hosts[0].traffic.up - sent) / (chunks * CHUNK)))
            await asyncio.sleep(2)
        world.close()
        return seen

    alone = (peers - 1) * chunks * CHUNK / (slow * MBIT)  # the seconds if nothing was passed on
    rounds = simulated(main())
    assert all(took <= 0.85 * alone for took, _ in rounds)
    late = rounds[-3:]  # measured: 1.0 to 1.5 copies, 0.32 of the time
    assert mean(copies for _, copies in late) <= 2
    assert mean(took for took, _ in late) <= 0.42 * alone


def test_who_had_nothing_is_asked_again_and_gives_what_it_has_by_then(tmp_path: Path):
    data = data_of(40)

    async def main() -> tuple[float, float]:
        world = World(tmp_path, rtt=0.05)
        author, late, new = world.host(2), world.host(100), world.host(100)
        digest = author.store.put(data)

        async def comes() -> None:
            await asyncio.sleep(6)
            late.store.put(data)

        coming = asyncio.ensure_future(comes())
        took = await new.fetch(digest, len(data), [author, late])
        await coming
        given = late.traffic.up / len(data)
        world.close()
        return took, given

    took, given = simulated(main())
    assert took <= 12 and given > 0.5


def test_the_likeliest_holder_may_get_the_blob_a_moment_later(tmp_path: Path):
    data = data_of(40)

    async def main() -> float:
        world = World(tmp_path, rtt=0.05)
        first, slow, new = world.host(100), world.host(2), world.host(100)
        digest = slow.store.put(data)

        async def comes() -> None:
            await asyncio.sleep(0.8)
            first.store.put(data)

        coming = asyncio.ensure_future(comes())
        took = await new.fetch(digest, len(data), [first, slow])
        await coming
        world.close()
        return took

    assert simulated(main()) <= 6


def test_more_ask_than_a_server_has_streams_for(tmp_path: Path):
    """Streams that are idle make room; who finds none is asked to wait, and does."""
    data = data_of(2)

    async def main() -> None:
        world = World(tmp_path, rtt=0.05)
        author = world.host(1000)
        author.server.limits = replace(author.server.limits, streams=32)
        others = [world.host(100) for _ in range(60)]
        digest = author.store.put(data)
        await asyncio.gather(*(h.fetch(digest, len(data), [author], 60) for h in others))
        assert all(h.store.has(digest) for h in others)
        world.close()

    simulated(main())


def test_chunks_that_come_before_their_hashes_are_few_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An author that gives chunks at once, and their hashes late."""
    data, blobs = [data_of(6, seed) for seed in range(3 * EARLY_BLOBS)], []

    async def main() -> tuple[int, int]:
        world = World(tmp_path, rtt=0.05)
        author, new = world.host(1000), world.host(1000)
        blobs.extend(author.store.put(d) for d in data)
        given = [0]
        real, request = author.store.read_chunk, new.streams.request

        async def late(peer: PeerKey, priority: Priority, asked: BlobRequest, limit: int) -> BlobReply | Lost:
            if asked.op is BlobOp.LEAVES:
                await asyncio.sleep(10)
            return await request(peer, priority, asked, limit)

        def counted(*args: Any) -> bytes:
            given[0] += 1
            return real(*args)

        monkeypatch.setattr(author.store, "read_chunk", counted)
        monkeypatch.setattr(new.streams, "request", late)
        fetching = [asyncio.ensure_future(new.fetch(b, 6 * CHUNK, [author])) for b in blobs]
        await asyncio.sleep(9)
        before = given[0]
        await asyncio.gather(*fetching)
        assert all(new.store.read(b) == d for b, d in zip(blobs, data, strict=True))
        world.close()
        return before, given[0]

    before, all_in_all = simulated(main())
    assert 0 < before <= EARLY_BLOBS * PROVED_EARLY
    assert all_in_all <= 1.1 * 6 * len(data)


def test_a_newcomer_is_filled_by_many_slow_donors(tmp_path: Path):
    data = data_of(160)

    async def main() -> tuple[float, list[int]]:
        world = World(tmp_path, rtt=0.1)
        rates = [20, 20, 20, 20, 10, 30]
        donors = [world.host(r) for r in rates]
        new = world.host(100)
        digest = [d.store.put(data) for d in donors][0]
        took = await new.fetch(digest, len(data), donors)
        sent = [d.traffic.up for d in donors]
        world.close()
        return took, sent

    took, sent = simulated(main())
    assert took <= 1.25 * (len(data) / (120 * MBIT) + 0.2)
    assert sent[5] > 2 * sent[4]
    assert sum(sent) <= 1.05 * len(data)


def test_a_far_donor_is_asked_for_what_fills_the_line(tmp_path: Path):
    data = data_of(200)

    async def main() -> float:
        world = World(tmp_path, rtt=0.2)
        donor, new = world.host(200), world.host(200)
        digest = donor.store.put(data)
        took = await new.fetch(digest, len(data), [donor])
        world.close()
        return took

    took = simulated(main())
    assert took <= 1.2 * (len(data) / (200 * MBIT) + 0.4) + 0.4


def fetched_from(
    folder: Path,
    data: bytes,
    donors: int,
    spoil: Callable[[World, list[Host], Host], Awaitable[object]],
    seconds: float,
) -> tuple[float, list[Host], Host]:
    """Fetch from donors of 20 Mbit/s, while `spoil` does something to them."""

    async def main() -> tuple[float, list[Host], Host]:
        world = World(folder, rtt=0.05)
        hosts = [world.host(20) for _ in range(donors)]
        new = world.host(100)
        digest = [d.store.put(data) for d in hosts][0]
        spoiling = asyncio.ensure_future(spoil(world, hosts, new))
        await asyncio.sleep(0)
        try:
            took = await new.fetch(digest, len(data), hosts, seconds)
            assert new.store.read(digest) == data
            return took, hosts, new
        finally:
            spoiling.cancel()
            world.close()

    return simulated(main())


def test_a_donor_is_dropped_at_its_first_bad_chunk_and_sends_little_more(tmp_path: Path):
    data = data_of(60)

    async def spoil(world: World, donors: list[Host], new: Host) -> None:
        real = donors[0].store.read_chunk
        donors[0].store.read_chunk = lambda digest, index: bytes(1) + real(digest, index)[1:]

    took, donors, new = fetched_from(tmp_path, data, 3, spoil, 60)
    assert new.bad == [donors[0].key]
    assert donors[0].traffic.up <= 6 * CHUNK
    assert new.traffic.down <= len(data) + 4 * CHUNK
    assert took <= 1.25 * (len(data) / (40 * MBIT) + 0.3)


def test_after_a_stream_broke_it_goes_on_where_it_was(tmp_path: Path):
    data = data_of(60)

    async def spoil(world: World, donors: list[Host], new: Host) -> None:
        for _ in range(4):
            await asyncio.sleep(1)
            donors[0].transport.break_streams()

    took, _, new = fetched_from(tmp_path, data, 1, spoil, 60)
    assert new.traffic.down <= len(data) + 10 * CHUNK
    assert took <= len(data) / (20 * MBIT) + 5
    assert new.bad == []


def test_streams_that_were_closed_between_two_rounds_cost_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also of a blob with many pages of leaf hashes, all of which are asked for by one of them."""
    monkeypatch.setattr("peer.swarm.transfer.frames.LEAVES_PER_PAGE", 8)
    monkeypatch.setattr("peer.swarm.transfer.blob_server.LEAVES_PER_PAGE", 8)

    async def main() -> list[float]:
        world = World(tmp_path, rtt=0.1)
        author, new = world.host(100), world.host(100)
        took = []
        for seed, chunks in enumerate((24, 1, 1, 24)):
            blob = author.store.put(data_of(chunks, seed))
            took.append(await new.fetch(blob, chunks * CHUNK, [author]))
            if seed != 1:
                author.transport.break_streams()
                await asyncio.sleep(1)
        world.close()
        return took

    first, _, again, pages = simulated(main())
    assert again <= 0.3  # a stream is opened, no more
    assert pages <= first + 0.1


def test_of_more_streams_than_are_kept_the_longest_unused_is_closed(tmp_path: Path):
    async def main() -> list[int]:
        world = World(tmp_path, rtt=0.01)
        new, *authors = (world.host(1000) for _ in range(5))
        new.streams.limits = replace(new.streams.limits, streams=3)
        for number, author in enumerate(authors[n] for n in (0, 1, 0, 2, 3, 0, 1)):
            blob = author.store.put(data_of(1, number))
            await new.fetch(blob, CHUNK, [author])
        opened = [sum(pipe.other in author.pipes for pipe in new.pipes) for author in authors]
        world.close()
        return opened

    assert simulated(main()) == [1, 2, 1, 1]


def test_what_was_asked_of_a_donor_that_lost_power_comes_from_others(tmp_path: Path):
    data = data_of(60)

    async def spoil(world: World, donors: list[Host], new: Host) -> None:
        await asyncio.sleep(1)
        donors[0].transport.lose_power()

    took, donors, new = fetched_from(tmp_path, data, 3, spoil, 60)
    assert took <= len(data) / (40 * MBIT) + 2
    assert new.bad == []


def test_a_refusal_and_a_blob_that_comes_later_are_waited_for(tmp_path: Path):
    data = data_of(10)

    async def spoil(world: World, donors: list[Host], new: Host) -> None:
        donors[0].serve_refusal = lambda blob, peer: "not announced"
        await asyncio.sleep(3)
        donors[0].serve_refusal = lambda blob, peer: None

    took, _, _ = fetched_from(tmp_path, data, 1, spoil, 60)
    assert 3 <= took <= 6


def test_who_gives_nothing_at_all_is_told_at_the_deadline(tmp_path: Path):
    async def spoil(world: World, donors: list[Host], new: Host) -> None:
        donors[0].serve_refusal = lambda blob, peer: "not announced"

    with pytest.raises(BlobFetchError, match="not announced"):
        fetched_from(tmp_path, data_of(10), 1, spoil, 5)


def test_with_a_slow_disk_few_chunks_are_in_memory(tmp_path: Path):
    data, disk = data_of(30), SlowDisk(0.2)

    async def spoil(world: World, donors: list[Host], new: Host) -> None:
        new.executor = disk

    fetched_from(tmp_path, data, 2, spoil, 60)
    assert 1 < disk.most <= 2 * HELD + PROVED_EARLY


def test_one_blob_fetched_twice_at_once_comes_once(tmp_path: Path):
    data = data_of(30)

    async def spoil(world: World, donors: list[Host], new: Host) -> None:
        digest = donors[0].store.put(data)
        await new.fetch(digest, len(data), donors[1:])

    _, _, new = fetched_from(tmp_path, data, 2, spoil, 60)
    assert new.traffic.down <= 1.3 * len(data)


def test_a_fetch_that_is_cancelled_as_it_ends_passes_that_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = data_of(2)

    async def main() -> None:
        world = World(tmp_path, rtt=0.1)
        donor, new = world.host(100), world.host(100)
        digest = donor.store.put(data)

        async def work() -> None:
            await new.fetch(digest, len(data), [donor])
            await asyncio.sleep(3600)

        finish = InProgressBlob.finish

        def cancelled_as_it_ends(blob: InProgressBlob) -> None:
            finish(blob)
            working.cancel()

        monkeypatch.setattr(InProgressBlob, "finish", cancelled_as_it_ends)
        working = asyncio.ensure_future(work())
        await asyncio.wait({working}, timeout=60)
        assert working.cancelled() and new.store.has(digest)
        world.close()

    simulated(main())


def test_a_slot_for_a_request_that_is_cancelled_before_it_begins_is_returned(tmp_path: Path, monkeypatch):
    """As when a chunk that two holders are asked for arrives from one, and completes the blob."""
    data = data_of(6)
    real = Scheduler.step

    def step(scheduler: Scheduler, answer: Answer | None, now: float) -> list[Action]:
        actions = real(scheduler, answer, now)
        return [*actions, EndFetch("over")] if any(isinstance(a, RequestChunk) for a in actions) else actions

    async def main() -> None:
        world = World(tmp_path, rtt=0.1)
        donor, new = world.host(100), world.host(100)
        digest = donor.store.put(data)
        monkeypatch.setattr(Scheduler, "step", step)
        with pytest.raises(BlobFetchError, match="over"):
            await new.fetch(digest, len(data), [donor])
        for priority in (Priority.SMALL, Priority.BULK):
            stream = await new.streams.slot(donor.key, priority)
            assert not isinstance(stream, Lost)
            stream.free()
            assert stream.idle
        world.close()

    simulated(main())


@pytest.mark.parametrize("way", ["up", "down"])
def test_the_rate_that_a_user_allows_is_kept_and_used(tmp_path: Path, way: str):
    """For several fetches at once; a second's worth may go at first."""
    data, rate = [data_of(12, seed) for seed in range(4)], 1_000_000

    async def main() -> float:
        world = World(tmp_path, rtt=0.05)
        author, other = world.host(100), world.host(100)
        (author.paces.up if way == "up" else other.paces.down).set_rate(rate)
        digests = [author.store.put(each) for each in data]
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(other.fetch(d, len(e), [author]) for d, e in zip(digests, data, strict=True)))
        took = asyncio.get_running_loop().time() - began
        assert author.traffic.up <= 1.1 * sum(map(len, data)) and not other.bad
        world.close()
        return took

    size = sum(map(len, data))
    assert (size - rate - 2 * CHUNK) / rate <= simulated(main()) <= 1.1 * size / rate


def test_a_rate_that_many_share_goes_into_chunks_that_arrive(tmp_path: Path):
    """Each of these fetchers would give up a chunk that waited for its turn behind those of all the others."""
    data, rate, fetchers = data_of(1), 100_000, 12

    async def main() -> tuple[float, float]:
        world = World(tmp_path, rtt=0.05)
        author, *others = [world.host(100) for _ in range(fetchers + 1)]
        author.paces.up.set_rate(rate)
        digest = author.store.put(data)

        async def fetch_until_here(host: Host) -> None:
            while not host.store.has(digest):
                try:
                    await host.fetch(digest, len(data), [author])
                except BlobFetchError:
                    await asyncio.sleep(1)

        began = asyncio.get_running_loop().time()
        async with async_timeout.timeout(1000):
            await asyncio.gather(*map(fetch_until_here, others))
        took, sent = asyncio.get_running_loop().time() - began, author.traffic.up
        world.close()
        return took, sent

    took, sent = simulated(main())
    assert sent <= 1.1 * fetchers * len(data) and took <= 1.1 * fetchers * len(data) / rate
