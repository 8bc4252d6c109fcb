"""A newcomer learns what the others have before it loads a state.

It waits as long as something comes of it, not for ever.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import Heartbeat
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.chain_sync import MAX_PATIENCES, SAID_AGAIN_SECONDS, ChainSync, JoinTimer, is_left_behind
from protocol.rounds.deadlines import Deadlines
from protocol.rounds.members import Member
from protocol.rounds.phase import Phase
from tests.simulation.signer import certificate
from tests.support.rounds_bench import ME, OTHERS, POLICY, RUN, STATE, Bench

HEAR, PATIENCE = 4.0, 20.0
CHAIN_SECONDS = 15.0
"""The time in which a node expects an answer to a request for the chain."""


@pytest.fixture
def joining() -> JoinTimer:
    j = JoinTimer(0.0, PATIENCE)
    j.begin(100.0, HEAR)
    return j


def over(joining: JoinTimer, now: float, *, ahead: bool = True, heard_equal: bool = False) -> bool:
    return joining.is_over(Deadlines(now), ahead=ahead, equal=heard_equal)


def test_who_is_told_that_it_has_all_goes_on_at_once(joining: JoinTimer):
    assert over(joining, 100.1, ahead=False, heard_equal=True)


def test_who_hears_of_nobody_waits_a_little(joining: JoinTimer):
    assert not over(joining, 103.9, ahead=False) and over(joining, 104.1, ahead=False)


def test_those_who_claim_more_and_give_nothing_are_waited_for_no_longer_than_patience(joining: JoinTimer):
    assert not over(joining, 123.9) and over(joining, 124.1)


def test_while_records_come_it_waits_for_more(joining: JoinTimer):
    for at in range(100, 300, 10):
        joining.grew(float(at))
        assert not over(joining, at + 0.9 * PATIENCE)
    assert over(joining, 290 + 1.1 * PATIENCE)


def test_records_without_an_end_are_not_waited_for_without_an_end(joining: JoinTimer):
    end = 100 + HEAR + (MAX_PATIENCES + 1) * PATIENCE
    for at in range(100, 1000, 10):
        joining.grew(float(at))
        assert over(joining, float(at)) == (at >= end)


def test_it_registers_when_to_look_again(joining: JoinTimer):
    joining.grew(110.0)
    deadlines = Deadlines(101.0)
    assert not joining.is_over(deadlines, ahead=True, equal=False)
    assert sorted(deadlines.pending.values()) == [104.0, 130.0] and deadlines.next_tick == 104.0


def test_it_says_that_nothing_comes_after_patience_and_again_after_a_while(joining: JoinTimer):
    joining.grew(110.0)
    assert not joining.is_stalled(129.9)
    assert joining.is_stalled(130.1) and not joining.is_stalled(131.0)
    assert not joining.is_stalled(700.0) and joining.is_stalled(131.0 + SAID_AGAIN_SECONDS)


def left_behind(
    ahead: int, known: int, joining: int = 0, stakes: dict[PeerKey, int] | None = None, *, is_late: bool = False
) -> bool:
    """Return whether a peer is, beside members with unknown heads, with its own head, and that are joining with it."""
    b = Bench()
    if stakes is not None:
        b.chain.stakes = lambda record: stakes
    groups = [(STATE, "training")] * ahead + [(b.chain.genesis, "training")] * known
    groups += [(b.chain.genesis, "joining")] * joining
    members = [Member(key, beat(*group), 0.0) for key, group in zip(OTHERS, groups, strict=False)]
    return is_left_behind(b.chain, members, ME, is_late=is_late)


def beat(head: Digest, phase: str) -> Heartbeat:
    return Heartbeat(RUN, 1, Round(0), head, 0, 0, phase, 1.0, 1.0, 0, 0, (), (), b"a", "")


def test_a_peer_is_left_behind_when_most_members_have_other_records():
    assert not left_behind(0, 0) and not left_behind(0, 2)
    assert left_behind(1, 0) and left_behind(3, 2) and not left_behind(2, 2)


def test_no_minority_of_keys_with_invented_heads_keeps_a_young_run_from_beginning_for_a_while_only():
    assert not left_behind(1, 0, joining=5, is_late=True) and not left_behind(1, 0, is_late=True)
    assert left_behind(3, 0, joining=1, is_late=True), "most may be right: their chain would be taken back"
    assert not left_behind(2, 0, joining=2, is_late=True) and not left_behind(3, 1, joining=1, is_late=True)
    assert left_behind(1, 4, stakes={OTHERS[0]: 1}, is_late=True), "stake decides without an end"
    b = Bench(ready=False, alone=False)
    stranger = Digest(sha256(b"an invented head"))
    for t in range(1, 200):
        b.beat(OTHERS[0], sequence=t, head=stranger)
        b.step(ev.Tick(), t)
        if b.machine.phase is not Phase.JOINING:
            break
    assert MAX_PATIENCES * POLICY.member_seconds < b.now < 2 * MAX_PATIENCES * POLICY.member_seconds


def test_others_that_are_joining_may_be_left_behind_too():
    assert left_behind(1, 0, joining=5) and not left_behind(1, 1, joining=5) and not left_behind(0, 0, joining=2)


def test_where_there_is_stake_numbers_do_not_count():
    assert not left_behind(4, 1, stakes={OTHERS[4]: 1}), "keys cost nothing"
    assert not left_behind(4, 0, stakes={ME: 1})
    assert left_behind(1, 4, stakes={OTHERS[0]: 2, ME: 1}) and not left_behind(1, 4, stakes={OTHERS[0]: 1, ME: 1})


class Newcomer(Bench):
    """It joins a swarm, and notes whom it asks for the chain, and when."""

    def __init__(self):
        self.asked: dict[PeerKey, float] = {}
        super().__init__(ready=False, alone=False, policy=replace(POLICY, heartbeat_seconds=2, member_seconds=20))

    def step(self, event, now=None):
        super().step(event, now)
        self.asked |= {a.to: self.now for a in self.of(do.RequestChain)}
        return self.actions


def test_a_newcomer_joins_with_the_chain_though_the_first_two_whom_it_asks_are_silent():
    b = Newcomer()
    made = certificate(b.record(OTHERS[0], [b.header(OTHERS[0])]), [OTHERS[0]])
    while b.machine.phase == Phase.JOINING:
        b.step(ev.Tick(), b.now + 0.5)
        for key in OTHERS[:3]:
            b.beat(key, sequence=1 + int(2 * b.now), head=made.digest, weight=10)
        for number, (key, since) in enumerate(list(b.asked.items())):
            if number == 2:
                b.step(ev.ChainReceived((made,), None, key, False))
            elif b.now == since + CHAIN_SECONDS:
                b.step(ev.ChainUnanswered(key))
    assert b.chain.head == made.digest and len(b.asked) == 3


def sources(me: PeerKey = OTHERS[-1]) -> tuple[Bench, ChainSync]:
    """Return a member's sources: three others claim a head that it does not know."""
    b = Bench()
    sync = ChainSync(100, 1.0, me)
    for key in OTHERS[:3]:
        sync.claim(key, STATE, b.chain, 0.0, member=True)
    return b, sync


def test_a_source_that_failed_is_asked_after_the_others_and_beside_no_other():
    b, sync = sources()
    first = sync.next_request(b.chain, Deadlines(1.0), eager=False)
    assert first is not None
    sync.failed(first, 1.0)
    second = sync.next_request(b.chain, Deadlines(100.0), eager=False)
    assert second is not None
    sync.answered(second, useful=True, now=100.0)
    third = sync.next_request(b.chain, Deadlines(101.0), eager=False)
    sync.failed(third or first, 101.0)
    assert sync.next_request(b.chain, Deadlines(200.0), eager=False) == second
    assert {first, second, third} == set(OTHERS[:3])
    assert sync.next_request(b.chain, Deadlines(210.0), eager=False) is None
    sync.answered(second, useful=True, now=211.0)
    assert sync.next_request(b.chain, Deadlines(211.0), eager=False) == second


def test_who_is_late_with_what_another_has_given_meanwhile_has_not_failed():
    b, sync = sources()
    first, second = (sync.next_request(b.chain, Deadlines(at), eager=False) for at in (1.0, 3.0))
    assert first is not None and second not in (None, first) and not sync.may_ask
    assert sync.next_request(b.chain, Deadlines(6.0), eager=False) is None, "two at a time"
    sync.answered(second or first, useful=True, now=6.0)
    sync.answered(first, useful=False, now=7.0)
    assert sync.sizes()["failures"][0] == 0


def test_keys_that_come_first_in_the_order_of_one_peer_do_not_in_the_order_of_all():
    first = set()
    for me in OTHERS[5:25]:
        b, sync = sources(me)
        first.add(sync.next_request(b.chain, Deadlines(1.0), eager=False))
    assert first == set(OTHERS[:3])
