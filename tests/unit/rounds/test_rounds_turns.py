"""Turns, strikes and headers: peers that announce and do nothing more, two headers of one author, and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import takewhile

import pytest

from protocol.audits import AuditRule, AuditSeeds, due_audits
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import RoundRecord, UpdateHeader, Vote
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.round_state import MIN_STRANGERS, RoundState, proposer_order
from tests.simulation.checkers import check_counted_once, check_every_window, disagreement
from tests.simulation.network import Weather
from tests.simulation.node import Node
from tests.simulation.world import World, policy_for
from tests.support.audited import certificate as certificate_of
from tests.support.empty_chain import KEYS
from tests.support.long_cases import long_cases
from tests.support.rounds_bench import ME, OTHERS, POLICY, RUN, STATE, Bench, blob_of

NEXT = Digest(sha256(b"next"))


class NonVoter(Node):
    """Announces its updates and gives them; neither proposes nor votes."""

    honest = False

    def broadcast(self, message) -> None:
        if not (message.author == self.key and isinstance(message.body, Vote | RoundRecord)):
            super().broadcast(message)


class TwoHeaded(Node):
    """Announces one update to every second peer, and another one to the rest; both can be had."""

    honest = False

    def broadcast(self, message) -> None:
        if not (isinstance(message.body, UpdateHeader) and message.author == self.key):
            super().broadcast(message)
            return
        blob = Digest(sha256(b"second", message.body.blob))
        self.blobs.add(blob)
        self.world.contents[blob] = self.world.contents[message.body.blob]
        other = self.signer.sign(replace(message.body, blob=blob))
        for node in self.world.nodes:
            if node is not self and node.alive:
                self.world.network.send(self.index, node.index, node.hear, message if node.index % 2 else other)


def decision_seconds(world: World) -> list[float]:
    """Return the time of each round from the first honest announcement until all have applied its record."""
    chain = world.nodes[0].machine.chain
    found = []
    for height in range(1, chain.height(chain.head)):
        record = chain.main_chain_at(height)
        assert record is not None
        if (began := world.announced_at.get(chain.parent(record))) is not None:
            found.append(world.applied_at[record] - began)
    return found


def swarm(honest: int, kind: type[Node], others: int, seconds: float) -> World:
    world = World(1, honest + others, Weather(delay=0.02, jitter=0.005), policy=policy_for(honest + others))
    for i in range(honest + others):
        world.clock.at(0.01 * i, world.add(Node if i < honest else kind, speed=2.0).boot)
    world.clock.run_until(seconds)
    for node in world.honest:
        check_every_window(world, node)
    assert disagreement(world.honest) is None
    return world


@pytest.mark.parametrize("honest, silent", [(4, 2), *long_cases((3, 3))])
def test_peers_that_never_vote_do_not_slow_rounds_for_ever(honest, silent):
    world = swarm(honest, NonVoter, silent, 200.0)
    took = decision_seconds(world)
    calm = took[len(took) // 2 :]
    assert len(took) >= 14 and sum(calm) / len(calm) < world.policy.propose_seconds


@pytest.mark.parametrize("honest, liars", [(4, 1), *long_cases((5, 2))])
def test_authors_of_two_headers_lose_their_own_updates_and_stop_nobody(honest, liars):
    world = swarm(honest, TwoHeaded, liars, 150.0)
    took = decision_seconds(world)
    calm = took[len(took) // 2 :]
    assert sum(calm) / len(calm) < world.policy.propose_seconds / 2
    check_counted_once(world)
    keys = {n.key for n in world.nodes[honest:]}
    rounds = [c.record.body for c in world.records.values()]
    assert (
        sum(not keys.isdisjoint(r.contributors) for r in rounds) <= len(rounds) * 0.4
    )  # those that they certify alone
    assert all(len(r.contributors) >= honest - 1 for r in rounds if keys.isdisjoint(r.contributors))


# -- the order of turns ---------------------------------------------------------------------------------------


def test_stake_that_is_divided_over_many_keys_gains_no_turns():
    rich, many = KEYS[0], [PeerKey(sha256(b"one of many", bytes([i]))) for i in range(50)]
    stakes = {rich: 500} | dict.fromkeys(many, 10)
    orders = [proposer_order(sha256(b"seed %d" % n), stakes, stakes) for n in range(1000)]
    assert 0.45 < sum(order[0] == rich for order in orders) / 1000 < 0.55


def turns_and_audits(hostile: int, options: Callable[[bytes, tuple[PeerKey, ...]], Iterable[bytes]]):
    """Return a coalition's shares of 200 first turns, and of its updates that are audited, among 16 equal keys.

    When the first turn is its own, it takes the seed it likes best of its `options`: by the next turn, then by audits.
    """
    keys = [PeerKey(sha256(b"peer", bytes([i]))) for i in range(16)]
    allies, stakes, seed = set(keys[:hostile]), dict.fromkeys(keys, 64), sha256(b"genesis")
    record = certificate_of("a record", dict.fromkeys(keys, 1)).record.body

    def audited(by: bytes) -> int:
        return sum(a.author in allies for a in due_audits(record, AuditSeeds(None, by), stakes, AuditRule()))

    def worth(by: bytes) -> tuple[bool, int]:
        return proposer_order(by, keys, stakes)[0] in allies, -audited(by)

    turns = audits = 0
    for _ in range(200):
        order = proposer_order(seed, keys, stakes)
        is_theirs = order[0] in allies
        turns += is_theirs
        seed = max(options(seed, order), key=worth) if is_theirs else sha256(seed, order[0])
        audits += audited(seed)
    return turns / 200, audits / (200 * hostile)


def test_a_coalition_has_about_its_share_of_turns_and_audits_and_with_digests_it_had_all_and_none():
    hostile = 5

    def passes(seed: bytes, order: tuple[PeerKey, ...]) -> list[bytes]:
        # Of its turns in a row it may pass any: allies are the first keys that are made.
        allies = {PeerKey(sha256(b"peer", bytes([i]))) for i in range(hostile)}
        return [sha256(seed, key) for key in takewhile(allies.__contains__, order)]

    turns, audits = turns_and_audits(hostile, passes)
    assert turns < 1.3 * hostile / 16 and audits > 0.12  # of 0.15

    def tries(seed: bytes, _: object) -> list[bytes]:
        return [sha256(seed, b"try", bytes([n])) for n in range(24)]

    turns, audits = turns_and_audits(hostile, tries)
    assert turns > 0.95 and audits < 0.01


def test_the_order_of_two_does_not_depend_on_who_else_there_is():
    stakes = {key: i for i, key in enumerate(KEYS)}  # the first has none
    for n in range(20):
        seed = sha256(b"seed %d" % n)
        order = proposer_order(seed, KEYS, stakes, KEYS[:1])
        assert order[-1] == KEYS[0]
        for left_out in KEYS:
            fewer = [key for key in KEYS if key != left_out]
            assert proposer_order(seed, fewer, stakes) == tuple(key for key in order if key != left_out)


# -- turns ---------------------------------------------------------------------------------------------------


def test_headers_that_a_record_lists_and_nobody_has_win_nothing_for_its_author():
    b = Bench(policy=replace(POLICY, max_members=200))
    sybils = [PeerKey(sha256(b"sybil", bytes([i]))) for i in range(120)]
    b.beat(OTHERS[0])
    b.announce()
    theirs = b.header(OTHERS[0])
    b.hold(theirs)
    record = b.record(OTHERS[0], [b.mine, theirs, *(b.header(key) for key in sybils)])
    b = Bench(policy=replace(POLICY, max_members=200))
    b.beat(OTHERS[0])
    b.announce()
    b.step(ev.MessageReceived(record))
    round_ = b.machine.open_round
    assert round_ is not None and set(b.machine.summary(0).awaited) == {OTHERS[0]}
    assert len(b.machine.summary(0).headers) == 2 + 200 // 8
    b.step(ev.BlobHeld(theirs.body.blob, theirs.author))
    assert set(round_.proposer_order) == {ME, OTHERS[0]}


def test_strangers_fill_no_more_than_their_share_of_the_headers():
    b = Bench(policy=replace(POLICY, max_members=32))
    for i in range(40):
        b.step(ev.MessageReceived(b.header(PeerKey(sha256(b"stranger", bytes([i]))))))
    b.beat(OTHERS[0])
    b.step(ev.MessageReceived(b.header(OTHERS[0])))
    authors = [h.author for h in b.machine.summary(0).headers]
    assert len(authors) == MIN_STRANGERS + 1 and OTHERS[0] in authors


def test_contributors_of_recent_records_have_the_first_turns():
    b = Bench()
    b.announce()
    first = b.chain.head
    b.step(ev.StateReached(first, NEXT))
    headers = [
        b.header(key, round=Round(1), parent=first, base_state=NEXT, first_window=25, end_window=30, label=b"1")
        for key in OTHERS[:6]
    ]
    for key in OTHERS[:6]:
        b.beat(key, head=first, weight=25)
    b.step(ev.TrainingProgress(25, 1.0, 1.0))
    b.step(ev.UpdateReady(first, 25, 25, 50, 5, blob_of(ME, b"1"), 9, 1.0))
    b.hold(*headers)
    round_ = b.machine.open_round
    assert round_ is not None and round_.proposer_order[0] == ME and len(round_.proposer_order) == 7


def test_an_author_has_a_turn_only_once_its_update_is_held():
    b = Bench()
    theirs = b.header(OTHERS[0])
    b.beat(OTHERS[0])
    b.announce()
    b.step(ev.MessageReceived(theirs))
    round_ = b.machine.open_round
    assert round_ is not None and round_.proposer_order == (ME,)
    b.step(ev.BlobHeld(theirs.body.blob, theirs.author))
    assert set(round_.proposer_order) == {ME, OTHERS[0]}


@pytest.mark.parametrize("seconds", [0.1, 0.3, 10.0])
def test_a_turn_ends_when_it_was_said_to(seconds: float):
    chain = Chain(RUN, STATE, POLICY.chain_limits)
    round_ = RoundState(replace(POLICY, propose_seconds=seconds), chain, chain.genesis, STATE, 0.0)
    assert round_.next_attempt_at(0.0) is None and round_.attempt(0.0) == -1
    round_.mark_announced(1.1)
    round_.mark_ready(1.7)
    assert round_.next_attempt_at(1.2) == 1.7 and round_.attempt(1.2) == -1
    now = 1.7
    for attempt in range(200):
        middle = round_.next_attempt_at(now)
        assert middle is not None and middle == pytest.approx(now + seconds / 2)
        now = round_.next_attempt_at(middle) or 0.0
        assert round_.attempt(now - 1e-6) == attempt and round_.attempt(now) == attempt + 1


# -- one header and one blob an author and round ---------------------------------------------------------------


def votes_until(b: Bench, end: float) -> list[Digest]:
    found = []
    while b.now < end:
        b.step(ev.Tick(), b.now + 0.5)
        found += [v.record for v in b.said(Vote)]
    return found


def announced(*keys: PeerKey) -> Bench:
    b = Bench()
    for key in keys:
        b.beat(key)
    b.announce()
    return b


def test_no_vote_for_a_record_that_lists_another_header_than_its_author_announced():
    b = announced(OTHERS[0], OTHERS[1])
    garbage, copied, other = b.header(OTHERS[0], label=b"garbage"), b.header(OTHERS[0]), b.header(OTHERS[1])
    b.hold(garbage)
    record = b.record(OTHERS[0], [b.mine, copied, other])
    b.step(ev.MessageReceived(record))
    b.step(ev.BlobHeld(copied.body.blob, copied.author))
    b.step(ev.BlobHeld(other.body.blob, other.author))
    assert record.digest not in votes_until(b, 40.0)


def test_a_record_that_came_before_the_first_header_did_gets_no_vote_either():
    b = announced(OTHERS[0], OTHERS[1])
    garbage, copied, other = b.header(OTHERS[0], label=b"garbage"), b.header(OTHERS[0]), b.header(OTHERS[1])
    record = b.record(OTHERS[1], [b.mine, copied, other])
    b.step(ev.MessageReceived(record))
    b.hold(garbage)
    b.step(ev.BlobHeld(copied.body.blob, copied.author))
    b.step(ev.BlobHeld(other.body.blob, other.author))
    assert record.digest not in votes_until(b, 40.0)


def test_both_headers_of_an_author_are_left_out_and_passed_on():
    b = announced(OTHERS[0], OTHERS[1])
    one, two, other = b.header(OTHERS[0], label=b"1"), b.header(OTHERS[0], label=b"2"), b.header(OTHERS[1])
    b.hold(one, other)
    b.step(ev.MessageReceived(two))
    assert {h.blob for h in b.said(UpdateHeader)} == {one.body.blob, two.body.blob}
    b.step(ev.MessageReceived(two))
    assert not b.said(UpdateHeader)
    round_ = b.machine.open_round
    assert round_ is not None and OTHERS[0] not in round_.proposer_order
    record = b.record(OTHERS[1], [b.mine, one, other])
    b.step(ev.MessageReceived(record))
    assert round_.proposals[record.digest].refused
    sound = b.record(OTHERS[1], [b.mine, other], attempt=1)
    b.step(ev.MessageReceived(sound))
    assert not round_.proposals[sound.digest].refused


def test_records_of_one_key_that_gets_no_vote_have_nobody_fetch_update_after_update():
    b = announced(OTHERS[0], OTHERS[1])
    b.hold(b.header(OTHERS[0]))
    b.of(do.FetchBlob)
    fetched = set[Digest]()
    for n in range(20):  # each with another update of its author alone
        record = b.record(OTHERS[1], [b.header(OTHERS[1], label=b"%d" % n)], attempt=n % 3)
        b.step(ev.MessageReceived(record))
        fetched.update(a.blob for a in b.of(do.FetchBlob))
        b.step(ev.BlobHeld(record.body.updates[0].body.blob, record.body.updates[0].author))
    assert len(fetched) <= 2


@pytest.mark.parametrize("first", ["author", "copier", "record of the copier"])
def test_a_blob_is_its_authors_whoever_announces_it_first(first: str):
    b = announced(OTHERS[0], OTHERS[1])
    theirs, copy = b.header(OTHERS[0]), b.header(OTHERS[1], blob=blob_of(OTHERS[0]))
    record = b.record(OTHERS[1], [b.mine, copy])
    for message in {"author": (theirs, copy), "copier": (copy, theirs)}.get(first, (record, theirs)):
        b.step(ev.MessageReceived(message))
    assert {h.author for h in b.machine.summary(0).headers} == {ME, OTHERS[0], OTHERS[1]}
    b.step(ev.BlobHeld(theirs.body.blob, OTHERS[0]))
    notices = [(n.kind, n.about) for n in b.of(do.Notice)]
    b.step(ev.MessageReceived(record))
    assert record.digest not in votes_until(b, 40.0)
    assert notices == [("bad-blob", OTHERS[1])]
    round_ = b.machine.open_round
    assert round_ is not None and {h.author for h in round_.candidates()} == {ME, OTHERS[0]}
    proposed = [p.record.body.contributors for p in round_.proposals.values() if p.record.author == ME]
    assert {ME, OTHERS[0]} in map(set, proposed) and not any(OTHERS[1] in contributors for contributors in proposed)


def test_the_author_of_a_blob_is_asked_for_it_however_many_copy_its_header():
    b = Bench(policy=replace(POLICY, max_members=40))
    copiers = [b.header(key, blob=blob_of(OTHERS[0])) for key in OTHERS[10:22]]
    for key in OTHERS[:22]:
        b.beat(key)
    for header in (*copiers[:10], b.header(OTHERS[0]), *copiers[10:]):
        b.step(ev.MessageReceived(header))
    b.announce()
    (asked,) = [a for a in b.of(do.FetchBlob) if a.blob == blob_of(OTHERS[0])]
    assert OTHERS[0] in (asked.author, *asked.holders) and len({asked.author, *asked.holders}) == 13


def test_who_announces_the_blob_of_another_after_it_is_held_is_left_out_at_once():
    b = announced(OTHERS[0], OTHERS[1])
    b.hold(b.header(OTHERS[0]))
    b.step(ev.MessageReceived(b.header(OTHERS[1], blob=blob_of(OTHERS[0]))))
    assert [(n.kind, n.about) for n in b.of(do.Notice)] == [("bad-blob", OTHERS[1])]
    round_ = b.machine.open_round
    assert round_ is not None and {h.author for h in round_.candidates()} == {ME, OTHERS[0]}


def test_of_a_blob_that_breaks_the_rules_all_who_announced_it_are_left_out():
    b = announced(OTHERS[0], OTHERS[1])
    for header in (b.header(OTHERS[0]), b.header(OTHERS[1], blob=blob_of(OTHERS[0]))):
        b.step(ev.MessageReceived(header))
    b.step(ev.BlobInvalid(blob_of(OTHERS[0]), "scales"))
    round_ = b.machine.open_round
    assert round_ is not None and {h.author for h in round_.candidates()} == {ME}


def test_the_peers_that_are_reported_in_a_round_are_bounded_and_each_is_once():
    chain = Chain(RUN, STATE, POLICY.chain_limits)
    round_ = RoundState(POLICY, chain, chain.genesis, STATE, 0.0)
    keys = [PeerKey(sha256(b"copier", bytes([i]))) for i in range(4 * POLICY.max_members)]
    reported = [key for key in keys + keys if round_.report_once(key)]
    assert reported == keys[: 2 * POLICY.max_members]
    assert all(count <= bound for count, bound in round_.sizes().values())
