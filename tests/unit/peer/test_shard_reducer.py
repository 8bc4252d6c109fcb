"""A committee member makes its part of what comes in time, says who is missing, and holds no more than the slices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from peer.node.shard_reducer import AT_ONCE, KEPT_ROUNDS
from peer.store import StoreError, StoreFull
from protocol.merkle import CHUNK, blob_digest
from protocol.rounds.events import BlobHeld, BlobInvalid, BlobUnavailable, ShardReduced, ShardUnavailable
from tests.support.coordinator_fakes import peer
from tests.support.open_files import few_files
from tests.support.reducing_world import BAD, PART_SIZE, SIZE, World, changed, with_blob
from tests.support.waiting import ended, until


@pytest.fixture
async def world(tmp_path):
    made: list[World] = []

    def make(authors: int, **how: Any) -> World:
        made.append(World(tmp_path / "store", authors, **how))
        return made[-1]

    yield make
    for w in made:
        await w.close()


async def test_a_part_is_made_of_the_chunks_that_cover_it_and_of_no_others(world):
    w = world(4)
    own = w.store.put(w.data[1])  # ours is here, whole
    committee = (peer(2).key, peer(3).key)
    w.reducing.reduce(w.record, 1, committee)
    w.reducing.reduce(w.record, 1, committee)  # under way: nothing new
    answer = await w.answer()
    assert answer == ShardReduced(w.record.digest, 1, blob_digest(w.expected(1)))
    assert w.store.read(answer.blob) == w.expected(1)
    assert own not in [asked[0] for asked in w.source.asked] and len(w.source.asked) == 3
    for blob, holders, chunks in w.source.asked:
        author = next(a for a, b in w.blobs.items() if b == blob)
        assert chunks == (0, 2, 3) and holders[0] == author and set(holders) == {author, *committee}
        arriving = w.store.in_progress(blob)
        assert arriving is not None and arriving.bitmap() == b"\x0d\x00"  # others of the committee can have it here
    assert w.store.used_bytes == SIZE + 3 * 3 * CHUNK + PART_SIZE
    assert set(w.reducing.retained_blobs()) == {answer.blob}
    # Another part of the record needs only what is not here yet; asked again, a part costs nothing but the sum.
    w.reducing.reduce(w.record, 2, committee)
    assert (await w.answer()).blob == blob_digest(w.expected(2))
    assert w.store.used_bytes == SIZE + 3 * 4 * CHUNK + 2 * PART_SIZE
    before = len(w.source.asked)
    w.reducing.reduce(w.record, 1, committee)
    assert await w.answer() == answer and len(w.source.asked) == before


async def test_a_part_is_made_of_more_slices_than_files_can_be_open(world):
    w = world(30)
    with few_files(24):
        for part in (1, 2):
            w.reducing.reduce(w.record, part, (peer(1).key,))
        answers = [await w.answer() for _ in range(2)]
    assert {a.blob for a in answers} == {blob_digest(w.expected(part)) for part in (1, 2)}


async def test_what_was_made_is_kept_for_some_rounds_also_when_its_record_is_dropped(world):
    w = world(2)
    first = w.record
    w.reducing.reduce(first, 0, ())
    made = (await w.answer()).blob
    w.reducing.drop(first.digest)
    assert w.reducing.retained_blobs() == [made]
    for number in (KEPT_ROUNDS - 1, KEPT_ROUNDS):
        assert made in w.reducing.retained_blobs()
        body = changed(first.body, round=number)
        w.reducing.reduce(changed(first, body=body, digest=blob_digest(bytes([number]))), 1, ())
        await w.answer()
    assert made not in w.reducing.retained_blobs()


async def test_who_gives_nothing_in_time_is_lacking_and_may_be_asked_again(world):
    w = world(3, seconds=3.0)
    late = w.blobs[peer(2).key]
    w.source.silent.add(late)
    w.reducing.reduce(w.record, 0, ())
    assert await w.answer() == ShardUnavailable(w.record.digest, 0, (peer(2).key,))
    assert [asked[0] for asked in w.source.asked].count(late) > 1
    assert w.reducing.retained_blobs() == []
    w.source.silent.clear()
    w.reducing.reduce(w.record, 0, ())
    assert await w.answer() == ShardReduced(w.record.digest, 0, blob_digest(w.expected(0)))


async def test_an_error_of_our_disk_costs_an_attempt_and_names_nobody(world, monkeypatch):
    w = world(3)
    w.store.put(w.data[1])
    read, write = w.store.verify, w.store.put
    errors = [StoreError("reading: too many open files"), StoreError("writing: too many open files")]

    def fails_once(do, error):
        def attempt(*given: Any) -> Any:
            if error in errors:
                errors.remove(error)
                raise error
            return do(*given)

        return attempt

    monkeypatch.setattr(w.store, "verify", fails_once(read, errors[0]))
    monkeypatch.setattr(w.store, "put", fails_once(write, errors[1]))
    w.reducing.reduce(w.record, 0, ())
    assert await w.answer() == ShardUnavailable(w.record.digest, 0, ()) and not errors
    w.reducing.reduce(w.record, 0, ())
    assert await w.answer() == ShardReduced(w.record.digest, 0, blob_digest(w.expected(0)))


async def test_a_full_disk_ends_the_node(world, monkeypatch):
    def full(*_: Any) -> None:
        raise StoreFull("no room")

    w = world(3)
    monkeypatch.setattr(w.store, "put", full)
    w.reducing.reduce(w.record, 0, ())
    with pytest.raises(StoreFull):
        await ended(w.tasks.failure)
    w.tasks.spawned.clear()


async def test_who_sent_what_breaks_the_rules_is_named_at_once_and_nobody_else(world):
    w = world(3)
    data = w.data[3][: 2 * CHUNK] + BAD + w.data[3][2 * CHUNK + 1 :]
    bad = w.source.add(data)
    w.source.silent.add(w.blobs[peer(2).key])  # it may still come
    updates = tuple(with_blob(u, bad) if u.author == peer(3).key else u for u in w.record.body.updates)
    record = changed(w.record, body=changed(w.record.body, updates=updates))
    w.reducing.reduce(record, 1, ())
    assert await w.answer() == BlobInvalid(bad, "a value that is not finite")
    assert await w.answer() == ShardUnavailable(record.digest, 1, (peer(3).key,))


async def test_who_announced_the_update_of_another_is_named_by_the_committee_that_reads_its_author(world):
    w = world(4)
    copied = w.blobs[peer(1).key]
    copiers = {peer(2).key, peer(3).key}
    updates = tuple(with_blob(u, copied) if u.author in copiers else u for u in w.record.body.updates)
    record = changed(w.record, body=changed(w.record.body, updates=updates))
    w.reducing.reduce(record, 0, ())
    assert await w.answer() == ShardUnavailable(record.digest, 0, tuple(sorted(copiers)))
    w.reducing.reduce(record, 1, ())
    assert isinstance(await w.answer(), ShardReduced), "other committees do not have the header"


async def test_what_is_dropped_is_not_answered(world):
    w = world(3)
    w.source.gate = asyncio.Event()
    w.reducing.reduce(w.record, 0, ())
    w.reducing.reduce(w.record, 1, ())
    w.reducing.fetch(blob_digest(b"part"), w.record, 2, ())
    await until(lambda: w.source.at_once >= 7)
    assert w.reducing.retained_blobs() == [blob_digest(b"part")]
    w.reducing.drop(w.record.digest)
    w.source.gate.set()
    await asyncio.gather(*w.tasks.spawned, return_exceptions=True)
    assert w.answers.empty() and w.reducing.retained_blobs() == [] and w.source.at_once == 0
    w.reducing.reduce(w.record, 0, ())
    assert isinstance(await w.answer(), ShardReduced)


async def test_no_more_slices_are_fetched_at_once_than_agreed(world):
    w = world(12)
    w.source.gate = asyncio.Event()
    for part in range(3):
        w.reducing.reduce(w.record, part, ())
    await until(lambda: w.source.at_once >= AT_ONCE)
    await asyncio.sleep(0.05)
    assert w.source.most_at_once == AT_ONCE
    w.source.gate.set()
    answers = [await w.answer() for _ in range(3)]
    assert {a.blob for a in answers} == {blob_digest(w.expected(p)) for p in range(3)}


async def test_parts_that_others_made_are_fetched_and_checked_as_parts(world):
    w = world(3, seconds=3.0)
    good, bad = w.source.add(b"sum".ljust(PART_SIZE, b"=")), w.source.add(b"sum".ljust(PART_SIZE, b"!"))
    w.reducing.fetch(good, w.record, 0, (peer(2).key,))
    assert await w.answer() == BlobHeld(good, None)
    assert w.source.asked[-1][1] == (peer(2).key,)
    w.reducing.fetch(bad, w.record, 1, ())
    assert await w.answer() == BlobInvalid(bad, "no part")
    w.reducing.fetch(blob_digest(b"nobody's"), w.record, 2, ())
    assert await w.answer() == BlobUnavailable(blob_digest(b"nobody's"))
    # The blob of an update that was checked as one is not a part for that.
    own = w.store.put(w.data[1])
    w.updates.trust(own)
    w.reducing.fetch(own, w.record, 0, ())
    assert isinstance(await w.answer(), BlobInvalid)
