"""Whole nodes: chunks of an update are held by others before it is complete, and whatever goes wrong with that, rounds
go on as ever."""

from __future__ import annotations

import asyncio

import pytest

from peer.node.node import Node
from peer.node.streaming import BEGINNINGS
from peer.store import Ahead
from protocol.codec import interface
from protocol.ids import Digest, PeerKey
from tests.node_world import TIMERS, NodeWorld, Pause

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
"""Updates of 1.3 MB in 8 bits: six chunks."""

CHUNKS = 6
PATIENT = TIMERS | {"max_seconds": 60, "exchange_seconds": 20, "patience_seconds": 20}
ROUND = {"target_tokens": 1024, "max_update_tokens": 8192, **PATIENT}


@pytest.fixture
async def world(tmp_path, monkeypatch):
    monkeypatch.setattr(interface, "RUN_CHUNKS", 16)
    monkeypatch.setattr("peer.training.growing.TELL_SECONDS", 0.0)
    made: list[NodeWorld] = []

    def make(**fields) -> NodeWorld:
        fields = {"model": WIDE, "codec": {"kind": "int8"}, "round": ROUND} | fields
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(NodeWorld(folder, monkeypatch, **fields))
        return made[-1]

    yield make
    for w in made:
        for name in w.running:
            if w.nodes[name]._training is not None:
                go_on(w, name)
        await w.close()


def go_on(w: NodeWorld, name: str) -> None:
    if (pause := w.trainer(name).pause) is not None:
        pause.may_begin.set()
        pause.may_finish.set()


async def paused(w: NodeWorld, slow: str, others: list[str]) -> Digest:
    """The trainer of `slow` stops in the middle of its next update, which the others wait for. The record before.

    It says its first word of it when all know of each other that they have announced: chunks are dealt by that.
    """
    for name in (slow, *others):
        w.start(name)
    await w.until(f"{slow} has a trainer", lambda: w.nodes[slow]._training is not None)
    pause = w.trainer(slow).pause = Pause(w.nodes[slow].snapshot().round + 1)
    await w.rounds([slow, *others], 1)
    keys = {w.key(n) for n in others}
    ada = w.nodes[slow]

    def announced(node: Node) -> bool:
        return set(node.machine.announced(ada.chain.head)) == keys

    await w.until("all know who has announced", lambda: all(announced(w.nodes[n]) for n in (slow, *others)))
    pause.may_begin.set()
    return ada.chain.head


def coming(w: NodeWorld, name: str, author: str) -> Ahead | None:
    """What a node has of an author's update that has no digest yet."""
    found = w.nodes[name]._streaming._coming.get(w.key(author))
    return found.ahead if found is not None else None


def here(w: NodeWorld, name: str, author: str) -> list[int]:
    """Its chunks."""
    ahead = coming(w, name, author)
    return [i for i in range(CHUNKS) if ahead is not None and ahead.has(i)]


def blobs_after(w: NodeWorld, name: str, parent: Digest) -> dict[PeerKey, Digest]:
    """The updates of the record after `parent`, by author."""
    records = [c.record.body for c in w.path(name)]
    return {u.author: u.body.blob for r in records if r.parent == parent for u in r.updates}


def drafts(w: NodeWorld, name: str) -> list[str]:
    return [f.name for f in (w.folder / name / "store" / "scratch").glob("ahead-*")]


async def test_a_chunk_is_held_by_another_before_the_update_is_complete(world):
    w = world()
    parent = await paused(w, "ada", ["alan"])
    await w.until("alan holds the first chunk", lambda: 0 in here(w, "alan", "ada"))
    ahead = coming(w, "alan", "ada")
    assert ahead is not None and len(here(w, "alan", "ada")) < CHUNKS
    assert w.key("ada") not in w.nodes["alan"].machine.announced(parent)
    # Commit, then reveal: it is served to who has announced, and to nobody else.
    serve = w.nodes["ada"]._streaming.may_serve
    assert serve(ahead.name, w.key("alan")) is None and serve(ahead.name, w.key("grace")) is not None
    go_on(w, "ada")
    await w.rounds(["ada", "alan"], 1)
    blob = blobs_after(w, "alan", parent)[w.key("ada")]
    early = [i for who, _, name, i in w.internet.ahead if (who, name) == (w.key("alan"), ahead.name)]
    late = [i for who, b, i in w.internet.fetched if (who, b) == (w.key("alan"), blob)]
    assert early and sorted(early + late) == list(range(CHUNKS))  # each came once
    await w.rounds(["ada", "alan"], 1)
    assert not drafts(w, "alan") and not drafts(w, "ada")


async def test_an_author_gives_each_chunk_to_one_and_the_others_get_it_there(world):
    w = world()
    await paused(w, "ada", ["alan", "grace"])
    others = ["alan", "grace"]
    await w.until("both hold the first chunk", lambda: all(0 in here(w, n, "ada") for n in others))
    (stream,) = {a.name for n in others if (a := coming(w, n, "ada")) is not None}
    of_whom = {who: giver for who, giver, name, i in w.internet.ahead if (name, i) == (stream, 0)}
    assert sorted(of_whom.values()) == sorted([w.key("ada"), next(k for k in of_whom if of_whom[k] == w.key("ada"))])
    go_on(w, "ada")
    await w.rounds(["ada", *others], 1)
    given = [i for _, giver, name, i in w.internet.ahead if (giver, name) == (w.key("ada"), stream)]
    assert given and len(given) == len(set(given))


async def test_a_liar_loses_its_hints_and_nothing_else(world):
    w = world()
    w.internet.sends = lambda giver, chunk: bytes(len(chunk)) if giver == w.key("ada") else chunk
    parent = await paused(w, "ada", ["alan"])
    streaming = w.nodes["alan"]._streaming
    await w.until("alan has seen it", lambda: streaming._begun[w.key("ada")] == BEGINNINGS)
    assert coming(w, "alan", "ada") is None and not drafts(w, "alan")
    go_on(w, "ada")
    await w.rounds(["ada", "alan"], 2)
    assert w.key("ada") in blobs_after(w, "alan", parent)


async def test_chunks_that_are_never_given_hold_up_nothing(world):
    w = world()
    w.internet.withheld = lambda giver, blob: not w.is_a_blob(blob)
    parent = await paused(w, "ada", ["alan"])
    await w.until("alan was told of chunks", lambda: bool((a := coming(w, "alan", "ada")) and a.missing()))
    go_on(w, "ada")
    await w.rounds(["ada", "alan"], 2)
    assert not w.internet.ahead and w.key("ada") in blobs_after(w, "alan", parent)


async def test_what_its_author_never_announces_is_dropped_and_its_disk_comes_back(world):
    w = world(round=ROUND | {"exchange_seconds": 12, "patience_seconds": 12})
    parent = await paused(w, "ada", ["alan", "grace"])
    await w.until("alan holds a chunk", lambda: bool(here(w, "alan", "ada")))
    assert drafts(w, "alan")
    killing = asyncio.ensure_future(w.kill("ada"))
    await asyncio.sleep(0)
    go_on(w, "ada")  # nobody hears it any more
    await killing
    await w.rounds(["alan", "grace"], 1)
    assert w.key("ada") not in blobs_after(w, "alan", parent)
    for name in ("alan", "grace"):
        assert not drafts(w, name) and not w.nodes[name]._streaming._coming
        assert sum(g.room for g in w.nodes[name].store._growing.values()) == 0


async def test_small_updates_and_reduced_rounds_are_not_streamed(world):
    small, reduced = world(codec={"kind": "sign"}), world(round=ROUND | {"exchange": "reduce"})
    for w in (small, reduced):
        node = w.start("ada")
        assert not node._streaming.wanted(node.chain.head)
        await w.close()
    node = world().start("ada")
    assert node._streaming.wanted(node.chain.head)
