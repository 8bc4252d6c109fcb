"""The node moves its trainer along the chain: what it loads and fetches, and what is given up for what is newer."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from peer.channel import Apply, Load
from peer.errors import PeerError, TrainerDied
from peer.node.round_blob_fetcher import RoundBlobFetcher
from peer.node.state_fetcher import StateFetcher
from peer.node.state_loader import StateLoader
from peer.node.tasks import Tasks
from peer.store import BlobCorrupt, BlobMissing, Store, StoreFull
from protocol.chain import genesis_digest
from protocol.errors import CodecError
from protocol.ids import Digest, PeerKey, Round
from protocol.messages import Rollback
from protocol.rounds.actions import ApplyRecord, SyncState
from protocol.rounds.events import BlobHeld, SyncFailed
from protocol.rounds.policy import RoundPolicy
from protocol.rounds.retention import kept_starts
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.waiting import ended, until

SIZE = 1234
"""Bytes of an update in the tests of a damaged disk."""


class FakeStore:
    def __init__(self):
        self.held: set[Digest] = set()
        self.damaged: set[Digest] = set()
        self.scratch = Path("/scratch")

    def has(self, digest: Digest) -> bool:
        return digest in self.held

    def path(self, digest: Digest) -> Path:
        if digest not in self.held:
            raise BlobMissing("gone")
        return Path("/blobs") / digest.short

    def verify(self, digest: Digest, first: int, most: int) -> bool:
        if digest in self.damaged:
            self.held.discard(digest)
            raise BlobCorrupt("was damaged")
        return first > 0  # of two parts


class Memory:
    """The chain that the loader sees: the certificates of a `ChainMaker`."""

    root = None

    def __init__(self, made: ChainMaker):
        self._made = made

    def _digests(self) -> list[Digest]:
        return [c.record.digest for c in self._made.certificates]

    def __contains__(self, record: Digest) -> bool:
        return record in self._digests()

    def ancestors(self, record: Digest):
        known = self._digests()
        return reversed(known[: known.index(record) + 1])

    def certificate(self, record: Digest):
        return self._made.certificates[self._digests().index(record)]


class World:
    def __init__(self):
        self.spec = make_spec()
        self.chain = ChainMaker(self.spec)
        self.store = FakeStore()
        self.offered: set[Digest] = set()
        self.fetched: list[Digest] = []
        self.asked: list[Any] = []
        self.forgotten: list[Digest] = []
        self.failed: list[SyncFailed] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.sent = asyncio.Event()
        self.kinds: dict[Digest, Any] = {}
        self.missing: set[Digest] = set()
        me, store, blobs = peer(1).key, cast(Any, self.store), cast(RoundBlobFetcher, self)
        files = StateFetcher(self.spec, me, store, cast(Any, self), blobs, cast(Any, self))
        self.states = StateLoader(self.spec, me, store, cast(Any, Memory(self.chain)), blobs, files, post=self._failed)

    def providers(self, holders=(), *, state=None) -> list[PeerKey]:
        return list(holders)

    def format_of(self, contributors: int, shard: int):
        return f"{shard} of {contributors}"

    async def send(self, message) -> None:
        if isinstance(self.error, TrainerDied):
            raise self.error
        self.asked.append(message)
        self.sent.set()

    def _failed(self, event: SyncFailed) -> None:
        self.failed.append(event)
        self.sent.set()

    async def fetch_blob(self, digest, size, holders, *, deadline_seconds, what="") -> None:
        self.fetched.append(digest)
        if digest not in self.offered:
            raise PeerError(f"nobody has {digest.short}")
        self.store.held.add(digest)

    async def ensure(self, blob, holders, kind=None, author=None) -> Path:
        self.kinds[blob] = kind
        if blob in self.missing:
            raise PeerError(f"nobody has {blob.short}")
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None and not isinstance(self.error, TrainerDied):
            raise self.error
        self.store.held.add(blob)
        return self.store.path(blob)

    def forget(self, blobs) -> None:
        self.forgotten.extend(blobs)

    def resync(self, rounds: int, **how) -> SyncState:
        path = tuple(self.chain.certificates[:rounds])
        return SyncState(path, how.get("missed", ()), 7, 70, starts=kept_starts(RoundPolicy.of(self.spec), path))

    async def next(self) -> None:
        await ended(self.sent.wait())
        self.sent.clear()


@asynccontextmanager
async def world(rounds: int = 12):
    w = World()
    for _ in range(rounds):
        w.chain.add({1: 2, 2: 3})
    running = asyncio.create_task(w.states.run(w.send))
    w_running = running
    try:
        yield w, w_running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_run_begins_with_the_genesis():
    async with world() as (w, _):
        w.offered.add(w.spec.genesis.name)
        w.states.sync(SyncState((), (), 0, 0))
        await w.next()
        (load,) = w.asked
        assert isinstance(load, Load) and load.replay == () and load.write_checkpoint is None
        assert (load.record, load.base_state, load.round) == (
            genesis_digest(w.spec.run_id), w.spec.genesis.name, 0,
        )  # fmt: skip


async def test_a_run_that_was_rolled_back_goes_on_from_the_state_that_the_owner_named():
    async with world() as (w, _):
        record = w.chain.certificates[4].digest
        back = Rollback(1, record, Round(5), state(5))
        w.offered.add(state(5))
        w.states.sync(SyncState((), (), 7, 70, start=back))
        await w.next()
        (load,) = w.asked
        assert isinstance(load, Load) and load.replay == () and w.fetched == [state(5)]
        assert (load.record, load.base_state, load.round) == (record, state(5), 5)
        w.states.sync(SyncState((), (), 7, 70, start=replace(back, state=state(6))))
        await w.next()
        assert [f.record for f in w.failed] == [record]


async def test_a_checkpoint_on_disk_costs_nothing_and_the_rest_is_replayed():
    async with world() as (w, _):
        w.store.held.add(state(10))
        w.states.sync(w.resync(12))
        await w.next()
        (load,) = w.asked
        assert w.fetched == [] and load.round == 10 and load.base_state == state(10)
        assert [r.round for r in load.replay] == [10, 11]
        assert load.record == w.chain.certificates[9].record.digest
        assert [u.windows for u in load.replay[0].updates] and load.next_window == 7 and load.accepted_windows == 70


async def test_the_newest_checkpoint_that_members_give_is_taken():
    async with world(12) as (w, _):
        w.offered.add(state(5))  # every 5 rounds one; that of round 10 is nobody's
        w.states.sync(w.resync(12))
        await w.next()
        assert w.fetched == [state(10), state(5)] and w.asked[0].round == 5


async def test_without_any_checkpoint_the_machine_hears_why():
    async with world() as (w, _):
        w.states.sync(w.resync(12))
        await w.next()
        assert w.asked == [] and len(w.failed) == 1
        assert (
            w.failed[0].record == w.chain.head and "a checkpoint to start from is not available" in w.failed[0].reason
        )
        assert w.failed[0].kept  # the trainer has received nothing of it


async def test_a_newer_checkpoint_is_fetched_when_rounds_since_that_on_disk_cannot_be_had():
    async with world() as (w, _):
        w.store.held.add(w.spec.genesis.name)
        w.store.held.add(state(0))
        w.offered |= {state(5), state(10)}
        w.missing = {u.body.blob for u in w.chain.certificates[3].record.body.updates}
        w.states.sync(w.resync(12))
        await w.next()
        assert w.fetched == [state(10)] and w.asked[0].round == 10 and not w.failed
        w.missing |= {u.body.blob for u in w.chain.certificates[11].record.body.updates}
        w.states.sync(w.resync(12))
        await w.next()
        assert w.fetched == [state(10)] and "what leads there" in w.failed[0].reason  # that of 5 would not help


async def test_when_a_blob_cannot_be_had_the_others_of_its_round_are_fetched_no_more():
    async with world() as (w, _):
        w.store.held.add(state(9))
        first, other = (u.body.blob for u in w.chain.certificates[9].record.body.updates)
        w.missing, w.gate = {first}, asyncio.Event()
        w.states.sync(w.resync(10))
        await w.next()
        assert len(w.failed) == 1
        w.gate.set()
        await until(lambda: other in w.kinds)
        await asyncio.sleep(0.02)
        assert other not in w.store.held


async def test_a_checkpoint_is_written_when_the_machine_says_so():
    async with world() as (w, _):
        for i in (3, 4):
            w.states.apply(ApplyRecord(w.chain.certificates[i], (), 0, 50, is_checkpoint=i == 4))
            await w.next()
        fourth, fifth = w.asked
        assert isinstance(fourth, Apply) and fourth.write_checkpoint is None
        assert fifth.write_checkpoint == Path("/scratch/state-5.safetensors")


async def test_a_newer_resync_takes_the_place_of_all_that_was_asked_before_and_nothing_of_that_is_reported():
    async with world() as (w, _):
        w.store.held.add(w.spec.genesis.name)
        w.store.held.add(state(0))
        w.gate = asyncio.Event()
        w.states.sync(w.resync(11))
        await asyncio.sleep(0.01)
        w.states.apply(ApplyRecord(w.chain.certificates[11], (), 0, 0))
        w.states.sync(w.resync(3))
        w.gate.set()
        await w.next()
        await asyncio.sleep(0.01)
        assert [type(m) for m in w.asked] == [Load] and len(w.asked[0].replay) == 3 and w.failed == []


async def test_a_lost_trainer_is_reported_by_who_watches_it_and_not_a_second_time():
    async with world() as (w, running):
        w.store.held.add(state(9))
        w.error = TrainerDied("gone")
        w.states.sync(w.resync(10))
        await asyncio.sleep(0.02)
        assert w.failed == [] and not running.done()


async def test_what_was_asked_of_a_lost_trainer_is_dropped():
    async with world() as (w, _):
        w.store.held.add(state(0))
        w.gate = asyncio.Event()
        w.states.sync(w.resync(3))
        w.states.apply(ApplyRecord(w.chain.certificates[3], (), 0, 0))
        await asyncio.sleep(0.01)
        w.states.drop()
        w.gate.set()
        await asyncio.sleep(0.02)
        assert w.asked == [] and w.failed == []
        w.states.sync(w.resync(2))
        await w.next()
        assert len(w.asked) == 1


async def test_an_update_that_does_not_come_is_reported_and_a_full_disk_ends_the_node():
    async with world() as (w, running):
        w.error = PeerError("nobody gives it")
        w.states.apply(ApplyRecord(w.chain.certificates[0], (), 0, 0))
        await w.next()
        assert [f.record for f in w.failed] == [w.chain.certificates[0].record.digest]
        w.error = StoreFull("the disk is full: free some")
        w.states.apply(ApplyRecord(w.chain.certificates[0], (), 0, 0))
        with pytest.raises(StoreFull):
            await ended(running)
        assert len(w.failed) == 1


async def test_an_own_update_that_the_disk_lost_is_not_put_back_and_that_is_said(caplog):
    async with world() as (w, _):
        w.store.held |= {state(0), Digest(b"h" * 32)}
        w.states.sync(w.resync(1, missed=(Digest(b"h" * 32), Digest(b"l" * 32))))
        await w.next()
        assert len(w.asked[0].restore) == 1
        assert "our update 6c6c6c6c is gone" in caplog.text


async def test_what_is_under_way_ends_with_the_node():
    w = World()
    w.chain.add({1: 1})
    w.store.held.add(w.spec.genesis.name)
    w.store.held.add(state(0))
    w.gate = asyncio.Event()
    running = asyncio.create_task(w.states.run(w.send))
    w.states.sync(w.resync(1))
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    w.gate.set()
    await asyncio.sleep(0.02)
    assert w.asked == []


async def test_a_checkpoint_that_was_damaged_on_disk_is_fetched_at_the_next_try():
    async with world() as (w, _):
        w.store.held.add(state(10))
        w.store.damaged.add(state(10))
        w.offered.add(state(10))
        w.states.sync(w.resync(11))
        await w.next()
        assert w.asked[-1].round == 10 and w.fetched == []
        await w.states.verify_blobs_in_use()  # the trainer has refused it
        assert state(10) in w.forgotten and state(10) not in w.store.held
        w.states.sync(w.resync(11))
        await w.next()
        assert w.asked[-1].round == 10 and w.fetched == [state(10)]


class Codec:
    """Takes what begins with a zero; the update's size is SIZE."""

    size = SIZE

    def check(self, data) -> None:
        if bytes(data[:1]) != b"\0":
            raise CodecError("not an update")

    def author_of(self, data) -> PeerKey:
        return peer(1).key


async def test_an_update_that_names_another_author_than_its_record_is_refused_and_the_machine_hears_whose_it_is(
    tmp_path,
):
    answers: list[object] = []
    with Store(tmp_path / "store", 10**8) as store:
        digest = store.put(bytes(SIZE))
        updates = RoundBlobFetcher(
            store, cast(Any, None), cast(Any, Codec()), deadline_seconds=5.0, post=answers.append, tasks=Tasks()
        )
        assert await updates.ensure(digest, [], author=peer(1).key) == store.path(digest) and not answers
        with pytest.raises(CodecError, match="another's"):
            await updates.ensure(digest, [], author=peer(2).key)
    assert answers == [BlobHeld(digest, peer(1).key)]


@pytest.mark.parametrize("bad", [b"\1" * SIZE, b"\1" * 7, b""], ids=["other bytes", "cut off", "empty"])
async def test_an_update_that_the_own_disk_damaged_is_fetched_again_and_its_author_not_blamed(tmp_path, bad):
    good = bytes(SIZE)
    answers: list[object] = []
    fetched: list[Digest] = []
    with Store(tmp_path / "store", 10**8) as store:
        digest = store.put(good)
        store.path(digest).write_bytes(bad)
    with Store(tmp_path / "store", 10**8) as store:  # after a start, as the disk has it

        class Source:
            def providers(self, holders=(), *, state=None) -> list[PeerKey]:
                return list(holders)

            async def fetch_blob(self, blob, size, holders, *, deadline_seconds) -> None:
                fetched.append(blob)
                assert store.put(good) == blob

        updates = RoundBlobFetcher(
            store, cast(Any, Source()), cast(Any, Codec()),
            deadline_seconds=5.0, post=answers.append, tasks=Tasks(),
        )  # fmt: skip
        path = await updates.ensure(digest, [])
        assert fetched == [digest] and path.read_bytes() == good and answers == []


# -- rounds that were reduced --------------------------------------------------------------------------------------


def parts(number: int, count: int = 2) -> tuple[Digest, ...]:
    return tuple(Digest(bytes([number, part]) * 16) for part in range(count))


def reduce(w: World, *rounds: int) -> None:
    """Give these rounds their shards, as if they had been reduced."""
    w.chain.certificates = [
        replace(c, shards=parts(i)) if i in rounds else c for i, c in enumerate(w.chain.certificates)
    ]


def own(w: World, number: int) -> Digest:
    updates = w.chain.certificates[number].record.body.updates
    return next(u.body.blob for u in updates if u.author == peer(1).key)


async def test_of_a_round_that_was_reduced_the_trainer_gets_the_parts_and_our_own_update():
    async with world(3) as (w, _):
        reduce(w, 2)
        w.store.held.add(own(w, 2))
        w.states.apply(ApplyRecord(w.chain.certificates[2], (), 7, 70))
        await w.next()
        update = w.asked[0].update
        assert [f.name for f in update.parts] == [d.short for d in parts(2)]
        assert [(u.author, u.windows) for u in update.updates] == [(peer(1).key, 2)]
        assert [w.kinds[d] for d in parts(2)] == ["0 of 2", "1 of 2"] and len(w.kinds) == 2
        assert w.states.blobs_in_use == parts(2)


async def test_a_replay_takes_each_round_as_it_was_made_and_lacks_no_own_update_that_was_lost(caplog):
    async with world(12) as (w, _):
        reduce(w, 11)
        w.store.held.add(state(10))
        w.states.sync(w.resync(12))
        await w.next()
        (load,) = w.asked
        assert [len(r.parts) for r in load.replay] == [0, 2] and [len(r.updates) for r in load.replay] == [2, 0]
        assert "is gone from the store" in caplog.text and load.reduced == ()


async def test_a_reload_says_of_which_rounds_what_was_dropped_may_still_be_outside():
    async with world(12) as (w, _):
        reduce(w, 3, 5, 7, 9)
        w.store.held |= {state(10)} | {own(w, n) for n in range(12)}
        regained = (own(w, 2), own(w, 5))
        w.states.sync(replace(w.resync(12), regained=regained))
        await w.next()
        # Up to the checkpoint, which is after round 9: the last that accepted one, and those that are regained.
        assert [r.round for r in w.asked[0].reduced] == [5, 9]
        assert all(len(r.parts) == 2 and len(r.updates) == 1 for r in w.asked[0].reduced)
        # Parts that nobody has any more cost what was dropped, and nothing else.
        w.missing.update(parts(5))
        w.states.sync(replace(w.resync(12), regained=regained))
        await w.next()
        assert [r.round for r in w.asked[1].reduced] == [9] and w.failed == []
