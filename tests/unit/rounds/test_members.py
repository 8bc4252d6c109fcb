"""The members' table when it is full: stake and accepted work keep a place, and get one; keys alone do not."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import Heartbeat, RoundRecord
from protocol.rounds import events as ev
from protocol.rounds.members import Members
from protocol.stake import StakeRule
from tests.simulation.signer import FakeSigner, certificate
from tests.support.rounds_bench import ME, OTHERS, POLICY, RUN, STATE, Bench, blob_of

TOP = POLICY.max_members
WORKERS = frozenset(OTHERS[:12])
"""More peers with accepted work than places."""

STAKED = OTHERS[8:20]
"""As many with stake, each with more than the one before; some of them have no accepted work, as founders."""


def heartbeat(key: PeerKey, sequence: int):
    body = Heartbeat(RUN, sequence, Round(0), RUN, 0, 0, "training", 1.0, 1.0, 0, 0, (), (), b"a", "")
    return FakeSigner(key).sign(body)


@given(st.lists(st.sampled_from(OTHERS), max_size=120), st.frozensets(st.sampled_from(sorted(WORKERS)), max_size=TOP))
def test_accepted_work_gets_a_place_and_keeps_it_from_keys_without(authors: list[PeerKey], last: frozenset[PeerKey]):
    def rank(key: PeerKey) -> tuple[int, bool, bool]:
        return STAKED.index(key) + 1 if key in STAKED else 0, key in last, key in WORKERS

    members = Members(POLICY, ME, lambda key: (rank(key)[0], key in WORKERS))
    members.note_contributors(last)
    for sequence, author in enumerate(authors):
        before = {m.key for m in members}
        members.add_heartbeat(heartbeat(author, sequence), 0.0)
        after = {m.key for m in members}
        left = before - after
        assert len(after) <= TOP and len(left) <= 1 and after - before <= {author}
        assert all(rank(key) < rank(author) for key in left)
        # The one that leaves is of the lowest rank, and nobody is refused that could displace another.
        assert all(rank(key) == min(map(rank, before)) for key in left)
        assert author in after or all(rank(key) >= rank(author) for key in after)


def test_a_founder_that_comes_late_gets_a_place_in_a_full_table_and_keeps_it_from_accepted_work():
    founder, worker = OTHERS[-1], OTHERS[0]
    b = Bench(policy=replace(POLICY, stake=StakeRule(12, (founder,), 10)))
    for key in OTHERS[:TOP]:
        b.beat(key)
    assert founder not in {m.key for m in b.machine.summary(0).members}
    b.beat(founder)
    members = {m.key for m in b.machine.summary(0).members}
    assert founder in members and len(members) == TOP
    made = certificate(b.record(worker, [b.header(worker)]), [worker])
    b.chain.add(made)
    b.chain.add(_next(b, made.digest))  # the worker contributed, but not to the last round
    for key in OTHERS[:TOP]:
        b.beat(key, sequence=2)
    assert founder in {m.key for m in b.machine.summary(0).members}


def _next(b: Bench, parent: Digest):
    author = OTHERS[1]
    header = b.header(author, round=Round(1), parent=parent, base_state=STATE)
    weights = b.chain.weights(parent, (header,))
    record = FakeSigner(author).sign(RoundRecord(RUN, Round(1), parent, STATE, 0, (header,), weights=weights))
    return certificate(record, [author])


def test_work_of_an_earlier_round_gets_a_place_among_a_flood_of_new_keys():
    b = Bench()
    worker, other = OTHERS[0], OTHERS[1]
    first = b.header(worker)
    one = certificate(b.record(worker, [first]), [worker])
    b.step(ev.CertificateReceived(one, worker))
    b.step(ev.BlobHeld(blob_of(worker), worker))
    b.step(ev.StateReached(one.digest, state := Digest(sha256(b"state 1"))))
    second = b.header(other, round=Round(1), parent=one.digest, base_state=state)
    record = FakeSigner(other).sign(RoundRecord(RUN, Round(1), one.digest, state, 0, (second,)))
    two = certificate(record, [other])
    b.step(ev.CertificateReceived(two, other))
    b.step(ev.BlobHeld(blob_of(other), other))
    b.step(ev.StateReached(two.digest, Digest(sha256(b"state 2"))))
    for key in OTHERS[2:]:
        b.beat(key)
    b.beat(worker)
    b.beat(other)
    members = {m.key for m in b.machine.summary(0).members}
    assert len(members) == TOP and {worker, other} <= members
    b.beat(OTHERS[-1], sequence=2)
    assert {m.key for m in b.machine.summary(0).members} == members
