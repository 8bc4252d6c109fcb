"""A member passes slices on where an author and a whole committee have no other way to each other, and only there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.node.message_relay import RelaySelector
from peer.node.slice_relay import TIMES_OWN_WORK, SliceRelay
from protocol.ids import Digest, PeerKey, short_id
from protocol.messages import RoundRecord, Signed
from tests.support.coordinator_fakes import peer
from tests.support.reducing_world import SIZE, SPEC, Sums, World, with_blob
from tests.support.signed import heartbeat

AUTHOR, ASKER, SEATED = (peer(n) for n in (1, 2, 3))
OTHERS = [peer(n) for n in range(4, 8)]


class Swarm:
    """The source of a `World`, and the relays."""

    def __init__(self, world: World, selector: RelaySelector):
        self.fetch_blob = world.source.fetch_blob
        self.providers = world.source.providers
        self.relay = SimpleNamespace(selector=selector)


class Seats:
    """The machine's answers: the shards that the asker is to make with the author's update."""

    def __init__(self, world: World, parts, committee, known: bool):
        self._world = world
        self._parts = parts
        self._keys = tuple(sorted(p.key for p in committee))
        self.known = known

    def duties_of(self, blob: Digest, member: PeerKey):
        return [(listing(self._world.record, blob), p, self._keys) for p in self._parts] if self.known else []


def relaying(*, asker_hears=(), seated_hears=()) -> RelaySelector:
    """Return a selector: author, asker and the third are behind NATs, except as given; the others receive from all."""
    nats = [AUTHOR, ASKER, SEATED]
    unreachable = {p.key: {o for o in nats if o is not p} for p in nats}
    unreachable[ASKER.key] -= set(asker_hears)
    unreachable[SEATED.key] -= set(seated_hears)
    said = {p: tuple(short_id(o.key) for o in unreachable[p.key]) for p in nats}
    beats = {p.key: heartbeat(p, admission=b"a", unreachable=said.get(p, ())) for p in (*nats, *OTHERS)}
    return RelaySelector(beats)


@pytest.fixture
async def world(tmp_path):
    w = World(tmp_path / "store", 3)
    yield w
    await w.close()


def listing(record: Signed[RoundRecord], blob: Digest) -> Signed[RoundRecord]:
    """Return the same record, with this blob as the author's update."""
    updates = tuple(with_blob(u, blob) if u.author == AUTHOR.key else u for u in record.body.updates)
    return replace(record, body=replace(record.body, updates=updates))


def relay_of(w: World, who: RelaySelector, *, me=None, parts=(1,), committee=(ASKER, SEATED), known=True):
    """Return a relay asked by the asker for the author's update, and its seats; `me`: by default one of its relays."""
    me = me or who.relays(AUTHOR.key, ASKER.key)[0]
    seats = Seats(w, parts, committee, known)
    made = SliceRelay(me, w.store, Swarm(w, who), cast(Any, Sums()), SIZE, SPEC.round, seats, w.tasks)
    made.note_request(w.blobs[AUTHOR.key], ASKER.key)
    return made, seats


async def test_a_relay_that_is_asked_gets_the_chunks_that_the_asker_needs_from_the_author(world):
    who = relaying()
    again, _ = relay_of(world, who)
    await world.tasks.finish()
    blob = world.blobs[AUTHOR.key]
    assert world.source.asked == [(blob, (AUTHOR.key,), (0, 2, 3))]
    partial = world.store.in_progress(blob)
    assert not partial.is_incomplete((0, 2, 3)) and partial.is_incomplete((1,))
    for _ in range(20):
        again.note_request(blob, ASKER.key)  # one question comes with each chunk
    relay_of(world, who)  # nor is that got which is here
    await world.tasks.finish()
    assert len(world.source.asked) == 1


@pytest.mark.parametrize(
    "why, how, others",
    [
        ("the asker hears the author", {"asker_hears": [AUTHOR]}, {}),
        ("the proposal is not known, or has no seat for the asker", {}, {"known": False}),
        ("somebody else is its relay", {}, {"me": SEATED.key}),
        ("another of the committee hears both", {}, {"committee": (ASKER, OTHERS[0])}),
        ("another of the committee came to hear both", {"asker_hears": [SEATED], "seated_hears": [AUTHOR, ASKER]}, {}),
    ],
)
async def test_nothing_is_passed_on_where_there_is_another_way_or_nobody_needs_it(world, why, how, others):
    relay_of(world, relaying(**how), **others)
    await world.tasks.finish()
    assert not world.source.asked, why


async def test_no_more_is_passed_on_in_a_round_than_a_few_times_the_own_work(world):
    most = TIMES_OWN_WORK * SPEC.round.committee * 3
    made, _ = relay_of(world, relaying(), parts=range(6))
    for blob in [world.source.add(bytes([i]) * SIZE) for i in range(most)]:
        made.note_request(blob, ASKER.key)
    await world.tasks.finish()
    assert len(world.source.asked) == most and world.source.most_at_once <= 4


async def test_a_store_that_is_nearly_full_is_for_its_own_node(world, monkeypatch):
    monkeypatch.setattr("peer.node.slice_relay.FULL", -1.0)
    relay_of(world, relaying())
    await world.tasks.finish()
    assert not world.source.asked


async def test_a_proposal_that_was_decided_while_others_had_their_turn_is_not_worked_on(world):
    _, seats = relay_of(world, relaying())
    seats.known = False
    await world.tasks.finish()
    assert not world.source.asked
