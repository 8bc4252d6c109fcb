"""Updates that travel while they are made, one node by itself: who is told what, and what of others is believed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peer.channel import UpdateGrows
from peer.node import streaming as module
from peer.node.streaming import BEGINNINGS, CROWD, STREAMS, Rules, Streaming, stream_name
from peer.store import Ahead, Store
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey, Round
from protocol.merkle import CHUNK, blob_leaves
from protocol.messages import KeySigner, Leaves, Signed
from tests.signed import RUN
from tests.specs import digest, identity

DATA = random.Random(1).randbytes(8 * CHUNK + 5)
LEAVES = tuple(blob_leaves(DATA))
PARENT = digest("parent")
ME, ADA, ALAN, GRACE = (identity(n) for n in ("me", "ada", "alan", "grace"))
NUMBER = Round(3)


class Place:
    """Around one `Streaming`: what the round says, what it sends, and what it fetches."""

    def __init__(self, store: Store):
        self.store = store
        self.have_announced: set[PeerKey] = {ME.key, ALAN.key}
        self.strangers: set[PeerKey] = set()
        self.reduced: set[Digest] = set()
        self.sent: list[tuple[PeerKey, Leaves]] = []
        self.wrong = asyncio.Event()
        self.fetching: list[Ahead] = []
        self.tasks: list[asyncio.Task[None]] = []
        rules = Rules(
            RUN,
            lambda parent: self.have_announced if parent == PARENT else (),
            lambda parent: parent not in self.reduced,
            lambda blob, requester: "as the machine says",
            lambda key: key not in self.strangers,
        )
        self.streaming = Streaming(
            KeySigner(ME), store, len(DATA), rules, source=lambda: self, send=self._send, spawn=self._spawn
        )

    def _send(self, to: PeerKey, messages: tuple[Signed, ...]) -> None:
        self.sent += [(to, m.body) for m in messages]

    def _spawn(self, work: Any, what: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def fetch_ahead(self, ahead: Ahead, author: PeerKey, deal: Any, over: asyncio.Event) -> None:
        self.fetching.append(ahead)
        self.of_whom = deal
        either = [asyncio.ensure_future(e.wait()) for e in (over, self.wrong)]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.wrong.is_set():
            raise MalformedError("another chunk than it had named")

    def hears(self, first: int = 0, count: int = 1, by=ADA, sender: PeerKey | None = None, **fields: Any) -> None:
        word = Leaves(RUN, NUMBER, PARENT, 7, first, LEAVES[first : first + count])
        word = KeySigner(by).sign(replace(word, **fields))
        assert self.streaming.takes(word, sender or by.key)

    async def settled(self) -> None:
        await asyncio.sleep(0.01)

    @property
    def named(self) -> list[list[int]]:
        """Of each update of others that is on its way, the chunks that are known and not here."""
        return [g.missing() for g in self.store._growing.values() if isinstance(g, Ahead)]


@pytest.fixture
async def place(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TELL_SECONDS", 0.01)
    with Store(tmp_path / "store", 1 << 40) as store:
        made = Place(store)
        yield made
        made.streaming.turn(None)
        await asyncio.gather(*made.tasks, return_exceptions=True)


async def until(true: Any) -> None:
    end = asyncio.get_running_loop().time() + 20
    while not true():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.005)


# -- an own update ------------------------------------------------------------------------------------------


def grows(place: Place, path: Path, size: int, parent: Digest = PARENT) -> None:
    with open(path, "ab") as file:
        file.write(DATA[file.tell() : size])
    place.streaming.grows(UpdateGrows(parent, path, size), NUMBER)


async def test_those_who_have_announced_are_told_each_leaf_once_and_in_order(place, tmp_path):
    path = tmp_path / "u"
    grows(place, path, CHUNK + 9)
    await until(lambda: place.sent)
    assert [(to, w.first, w.leaves) for to, w in place.sent] == [(ALAN.key, 0, LEAVES[:1])]
    grows(place, path, 3 * CHUNK)
    await until(lambda: len(place.sent) == 2)
    place.have_announced.add(GRACE.key)  # she learns all of it at once
    await until(lambda: len(place.sent) == 3)
    grows(place, path, len(DATA))
    await until(lambda: sum(len(w.leaves) for _, w in place.sent) == 2 * len(LEAVES))
    for key in (ALAN.key, GRACE.key):
        said = [w for to, w in place.sent if to == key]
        assert tuple(leaf for w in said for leaf in w.leaves) == LEAVES
        assert [w.first for w in said] == [sum(len(w.leaves) for w in said[:n]) for n in range(len(said))]
    place.streaming.announced()
    await asyncio.gather(*place.tasks)


async def test_it_is_served_to_who_has_announced_until_its_round_is_over(place, tmp_path):
    grows(place, tmp_path / "u", 2 * CHUNK)
    await until(lambda: place.sent)
    name = stream_name(RUN, ME.key, PARENT, place.sent[0][1].sequence)
    assert place.streaming.may_serve(name, ALAN.key) is None
    assert "not announced" in place.streaming.may_serve(name, GRACE.key)
    assert place.streaming.may_serve(digest("a blob"), GRACE.key) == "as the machine says"
    place.streaming.announced()
    assert place.store.growing(name).read_chunk(1) == DATA[CHUNK : 2 * CHUNK]
    place.streaming.turn(PARENT)
    assert place.store.growing(name) is not None
    place.streaming.turn(digest("the next record"))
    assert place.store.growing(name) is None


async def test_an_update_that_is_begun_anew_has_another_name(place, tmp_path):
    grows(place, tmp_path / "u", CHUNK)
    await until(lambda: place.sent)
    place.streaming.give_up()
    grows(place, tmp_path / "v", CHUNK)
    await until(lambda: len(place.sent) == 2)
    assert place.sent[1][1].sequence > place.sent[0][1].sequence and len(place.store._growing) == 1


async def test_a_file_that_is_gone_is_not_named(place, tmp_path):
    place.streaming.grows(UpdateGrows(PARENT, tmp_path / "nowhere", CHUNK), NUMBER)
    await place.settled()
    assert not place.sent and not place.store._growing


async def test_a_crowd_is_told_more_rarely(place, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TELL_SECONDS", 1000.0 / CROWD)
    waits: list[float] = []

    def waited(seconds: float) -> Any:
        waits.append(seconds)
        place.streaming.announced()
        raise asyncio.TimeoutError

    monkeypatch.setattr(module.async_timeout, "timeout", waited)
    place.have_announced |= {identity(f"peer {n}").key for n in range(999)}
    grows(place, tmp_path / "u", CHUNK)
    await asyncio.gather(*place.tasks)
    assert waits == [pytest.approx(1000.0 / CROWD * 1000 / CROWD)] and len(place.sent) == 1000


# -- those of others ----------------------------------------------------------------------------------------


async def test_what_is_named_is_fetched_and_becomes_the_blob(place):
    place.hears(0, 2)
    place.hears(2, 1)
    place.hears(1, 2)  # again
    await place.settled()
    assert place.named == [[0, 1, 2]] and place.fetching == list(place.store._growing.values())
    place.fetching[0].write(1, DATA[CHUNK : 2 * CHUNK])
    blob = digest("the blob")
    await place.streaming.became(blob, ADA.key)()
    assert not place.store._growing and place.store.used_bytes == CHUNK and blob in place.store._waiting
    await place.streaming.became(digest("another"), ADA.key)()  # there is nothing more of it


async def test_each_chunk_is_dealt_to_one_of_those_who_may_have_it(place):
    place.have_announced |= {GRACE.key}
    place.hears()
    await place.settled()
    of_whom = place.of_whom()
    dealt = [of_whom(i) for i in range(9)]
    assert {dealt.count(k) for k in (ADA.key, ALAN.key, GRACE.key)} == {3} and ME.key not in dealt


@pytest.mark.parametrize(
    "fields",
    [{"parent": digest("another")}, {"sender": ALAN.key}, {"by": ALAN}, {"by": GRACE},
     {"first": 9, "leaves": LEAVES[:1]}],
)  # fmt: skip
async def test_words_out_of_place_are_nothing(place, fields):
    """Of another round, second-hand, of one that has a header already, of a stranger, of chunks that no update has."""
    place.strangers.add(GRACE.key)
    place.hears(**fields)
    await place.settled()
    assert not place.named


async def test_who_has_not_announced_itself_fetches_nothing(place):
    place.have_announced.remove(ME.key)
    place.hears()
    assert not place.named
    place.have_announced.add(ME.key)
    place.reduced.add(PARENT)
    place.hears()
    assert not place.named


async def test_who_contradicts_itself_or_serves_other_chunks_is_not_listened_to_in_this_round(place):
    place.hears(0, 2)
    place.hears(1, leaves=LEAVES[2:3])
    assert not place.named
    place.hears(sequence=8)
    assert not place.named
    place.streaming.turn(PARENT)
    place.hears(sequence=9)
    await place.settled()
    assert place.named == [[0]]
    place.wrong.set()
    await until(lambda: not place.named)
    place.hears(sequence=10)
    assert not place.named and place.store.used_bytes == 0


async def test_the_newest_beginning_counts_and_there_are_only_a_few(place):
    place.hears(0, 3)
    place.hears(0, 1, sequence=6)
    assert place.named == [[0, 1, 2]]
    for n in range(1, BEGINNINGS):
        place.hears(0, n, sequence=7 + n)
        assert place.named == [list(range(n))]
    place.hears(sequence=100)
    assert not place.named


async def test_there_are_only_so_many_at_once_and_a_round_that_is_over_leaves_none(place):
    for n in range(STREAMS + 5):
        place.hears(by=identity(f"author {n}"))
    assert len(place.named) == STREAMS
    place.streaming.turn(digest("the next record"))
    assert not place.named and not list(place.store.scratch.iterdir()) and not place.streaming._coming
