"""The end of a machine's part: leaving, a run that is over, a ban."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.node.node import HARD_STOP_SECONDS
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import Certificate, Directive, Goodbye, RoundRecord
from protocol.reduce_plan import GATHER
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.consensus import MAX_LEAVE_SECONDS
from protocol.rounds.departure import MAX_STAY_SECONDS, QUIET_BYTES, QUIET_SECONDS
from protocol.rounds.exchange import Exchange
from protocol.rounds.gathered_exchange import GatheredExchange
from protocol.rounds.policy import LocalStatus
from protocol.rounds.reduced_exchange import ReducedExchange
from protocol.rounds.state_sync import MAX_PAUSE
from tests.simulation.hostile import Withholder
from tests.simulation.network import Weather
from tests.simulation.node import Node
from tests.simulation.signer import FakeSigner, certificate
from tests.simulation.world import REDUCE, World, policy_for
from tests.support.rounds_bench import ME, OTHERS, POLICY, RUN, STATE, Bench

NEXT = Digest(sha256(b"next"))
TOTAL = replace(POLICY, total_windows=25)


def made_by(decided: Certificate) -> tuple[Digest, PeerKey]:
    """Return the blob of the first update of a record, and its author."""
    first = decided.record.body.updates[0]
    return first.body.blob, first.author


def undecided() -> Bench:
    b = Bench()
    b.beat(OTHERS[0])
    b.announce()
    return b


def test_a_leaver_says_goodbye_within_its_time_though_its_round_is_undecided():
    b = undecided()
    b.step(ev.Leave(), 1.0)
    while not b.of(do.Finished):
        assert not b.said(Goodbye) and b.now < 1.0 + GatheredExchange.leave_seconds
        b.beat(OTHERS[0], sequence=int(b.now * 1000) + 2)
        b.step(ev.Tick(), b.machine.next_tick)
    assert b.now == 1.0 + GatheredExchange.leave_seconds and b.said(Goodbye) and b.machine.phase == "left"


def completed(*, behind: bool) -> Bench:
    """Return a machine whose run is over, beside another member."""
    b = Bench(policy=TOTAL)
    b.announce()
    b.step(ev.StateReached(b.chain.head, NEXT))
    assert b.of(do.RunCompleted) and not b.of(do.Finished)
    b.beat(OTHERS[0], head=b.chain.genesis if behind else b.chain.head)
    return b


def seconds_until_finished(b: Bench, *, sent_each_second: int = 0, caught_up: float = 1e9) -> float:
    """Step each second, with heartbeats of the other member, until the machine says that its driver may stop."""
    began = b.now
    for second in range(1, 1000):
        b.now = began + second
        b.actions = b.machine.step(ev.Tick(), b.now, LocalStatus(bytes_up=sent_each_second * second))
        if b.of(do.Finished):
            return b.now - began
        head = b.chain.head if b.now >= caught_up else b.chain.genesis
        b.beat(OTHERS[0], head=head, sequence=1 + second)
        assert not b.of(do.Finished)
    raise AssertionError("it stays without end")


def test_when_the_run_is_over_and_nobody_is_behind_it_finishes_soon():
    b = completed(behind=False)
    b.step(ev.Tick(), QUIET_SECONDS)
    assert [f.reason for f in b.of(do.Finished)] == ["the run has reached its 25 windows"]
    b.step(ev.Tick(), 3 * QUIET_SECONDS)
    assert not b.of(do.Finished)


def test_it_starts_again_if_the_others_go_on_from_a_record_beside_its_last_one():
    b = completed(behind=True)
    rivals = [b.header(key, windows=4) for key in OTHERS[:3]]
    rival = certificate(b.record(OTHERS[0], rivals), OTHERS[:3])
    b.step(ev.CertificateReceived(rival, OTHERS[0]), 1.0)
    assert b.chain.head == rival.digest and b.chain.weight(rival.digest) < 25
    b.step(ev.Tick(), QUIET_SECONDS)
    (finished,) = b.of(do.Finished)
    assert finished.again and "the run goes on" in finished.reason
    b.step(ev.Tick(), 3 * QUIET_SECONDS)
    assert not b.of(do.Finished)


def test_it_starts_again_where_a_rollback_after_the_end_leaves_only_the_root(monkeypatch):
    b = completed(behind=True)
    monkeypatch.setattr(Chain, "head", property(lambda chain: chain.root))
    b.step(ev.Tick(), QUIET_SECONDS)
    assert [finished.again for finished in b.of(do.Finished)] == [True]


def test_it_stays_for_a_member_that_is_behind():
    assert seconds_until_finished(completed(behind=True), caught_up=42.0) == 45.0


def test_it_stays_while_it_sends_much():
    b = completed(behind=True)
    busy = 1 + QUIET_BYTES // int(QUIET_SECONDS)
    assert seconds_until_finished(b, sent_each_second=busy, caught_up=0.0) == MAX_STAY_SECONDS


def test_it_does_not_stay_without_end():
    assert seconds_until_finished(completed(behind=True)) == MAX_STAY_SECONDS


def test_it_stays_for_a_coordinator_without_the_last_state_and_no_longer():
    b = completed(behind=False)
    for second in range(1, 100):
        b.now = float(second)
        b.actions = b.machine.step(ev.Tick(), b.now, LocalStatus(is_awaited=second < 42))
        if b.of(do.Finished):
            break
        b.beat(OTHERS[0], head=b.chain.head, sequence=1 + second)
    assert 42 <= b.now <= 42 + QUIET_SECONDS


@pytest.mark.parametrize("run_status", ["paused", "ended"])
def test_while_the_run_rests_the_held_state_is_written_once_before_anybody_leaves(run_status):
    b = Bench()
    b.announce()
    b.step(ev.StateReached(b.chain.head, NEXT))
    assert not b.of(do.KeepState)
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, run_status=run_status))), 1.0)
    assert [a.record for a in b.of(do.KeepState)] == [b.chain.head] and not b.of(do.RunCompleted)
    b.step(ev.Tick(), 2.0)
    assert not b.of(do.KeepState) and not b.of(do.RunCompleted)
    b.step(ev.StateReached(b.chain.head, NEXT), 3.0)
    assert not b.of(do.KeepState) and bool(b.of(do.RunCompleted)) == (run_status == "ended")


def test_a_state_that_cannot_be_written_keeps_nobody():
    b = Bench()
    b.announce()
    b.step(ev.StateReached(b.chain.head, NEXT))
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, run_status="ended"))), 1.0)
    b.step(ev.StateNotKept(b.chain.head), 2.0)
    assert b.of(do.RunCompleted) and not b.of(do.KeepState) and b.machine.phase == "paused"
    b.step(ev.Tick(), 3.0 + MAX_PAUSE)
    assert not b.of(do.KeepState), "its trainer is stopped"


def test_a_state_that_was_not_written_is_written_later_while_the_run_is_paused():
    b = Bench()
    b.announce()
    b.step(ev.StateReached(b.chain.head, NEXT))
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, run_status="paused"))), 1.0)
    for _ in range(3):
        assert [a.record for a in b.of(do.KeepState)] == [b.chain.head]
        b.step(ev.StateNotKept(b.chain.head))
        assert not b.of(do.KeepState)
        b.step(ev.Tick(), b.now + MAX_PAUSE - 1.0)
        assert not b.of(do.KeepState)
        b.step(ev.Tick(), b.now + 1.0)
    b.step(ev.StateReached(b.chain.head, NEXT))
    b.step(ev.Tick(), b.now + 2 * MAX_PAUSE)
    assert not b.of(do.KeepState)


def test_a_state_that_was_not_written_is_no_failed_move_to_the_next_head():
    b = Bench()
    b.announce()
    b.step(ev.StateReached(b.chain.head, NEXT))
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, run_status="paused"))), 1.0)
    (write,) = b.of(do.KeepState)
    following = second_record(b, b.chain.certificate(b.chain.head))
    b.step(ev.CertificateReceived(following, OTHERS[0]))
    b.step(ev.BlobHeld(*made_by(following)))
    assert [a.certificate for a in b.of(do.ApplyRecord)] == [following]
    b.step(ev.StateNotKept(write.record))
    b.step(ev.StateReached(following.digest, STATE))
    assert b.machine.summary(b.now).head == following.digest


def second_record(b: Bench, first: Certificate) -> Certificate:
    """Return the record after the first, with one update of another member."""
    parent = first.digest
    start = b.chain.next_window(OTHERS[0], parent)
    header = b.header(
        OTHERS[0], label=b"2", round=Round(1), parent=parent, base_state=NEXT, first_window=start, end_window=start + 10
    )
    weights = b.chain.weights(parent, (header,))
    body = RoundRecord(RUN, Round(1), parent, NEXT, 0, (header,), weights=weights)
    return certificate(FakeSigner(OTHERS[0]).sign(body), [OTHERS[0]])


def test_who_catches_up_while_the_run_rests_writes_the_state_of_the_head_only():
    b = Bench()
    theirs = b.header(OTHERS[0])
    first = certificate(b.record(OTHERS[0], [theirs]), [OTHERS[0]])
    b.step(ev.CertificateReceived(first, OTHERS[0]))
    second = second_record(b, first)
    b.step(ev.CertificateReceived(second, OTHERS[0]))
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, run_status="paused"))), 1.0)
    b.step(ev.BlobHeld(*made_by(second)))
    b.step(ev.BlobHeld(theirs.body.blob, theirs.author))
    moves = b.of(do.ApplyRecord)
    b.step(ev.StateReached(first.digest, NEXT))
    moves += b.of(do.ApplyRecord)
    assert [(m.certificate, m.is_checkpoint) for m in moves] == [(first, False), (second, True)]


def test_a_record_of_the_open_round_is_applied_and_written_before_the_end():
    b = Bench()
    b.beat(OTHERS[0])
    b.announce()
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, run_status="ended"))), 1.0)
    assert not b.of(do.KeepState) and not b.of(do.RunCompleted), "its round is open"
    theirs = b.header(OTHERS[0])
    b.hold(theirs)
    record = b.record(OTHERS[0], [b.mine, theirs])
    b.step(ev.CertificateReceived(certificate(record, [OTHERS[0], ME]), OTHERS[0]))
    (move,) = b.of(do.ApplyRecord)
    assert move.is_checkpoint
    b.step(ev.StateReached(move.certificate.digest, NEXT))
    assert b.of(do.RunCompleted) and not b.of(do.KeepState)


def test_who_is_on_the_way_to_the_last_state_of_an_ended_run_goes_on():
    b = Bench()
    theirs = b.header(OTHERS[0])
    b.step(ev.CertificateReceived(certificate(b.record(OTHERS[0], [theirs]), [OTHERS[0]]), OTHERS[0]))
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, run_status="ended"))), 1.0)
    assert not b.of(do.RunCompleted)
    b.step(ev.BlobHeld(theirs.body.blob, theirs.author), 2.0)
    (move,) = b.of(do.ApplyRecord)
    b.step(ev.StateReached(move.certificate.digest, NEXT), 3.0)
    assert b.of(do.RunCompleted)


def test_a_banned_peer_stops_at_once_and_an_observer_never():
    ban = FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, banned=(ME,)))
    b = Bench()
    b.step(ev.MessageReceived(ban))
    assert [f.reason for f in b.of(do.Finished)] == ["banned by the run's owner"] and not b.of(do.RunCompleted)
    b = Bench(observer=True)
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, run_status="ended"))))
    assert b.of(do.RunCompleted)
    for second in range(1, 700, 5):
        assert not b.step(ev.Tick(), float(second)) or not b.of(do.Finished)


@pytest.mark.parametrize("order", [dict(run_status="ended"), dict(banned=(ME,))])
def test_an_auditor_without_training_ends_with_the_run_and_waits_for_nobody(order):
    b = Bench(observer=True, reporter=FakeSigner(ME))
    b.beat(OTHERS[0])
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, **order))))
    assert len(b.of(do.Finished)) == 1 and not b.of(do.RunCompleted)


def test_leaving_after_the_run_is_over_finishes_once():
    b = completed(behind=True)
    b.step(ev.Leave(), QUIET_SECONDS)
    assert b.said(Goodbye) and [f.reason for f in b.of(do.Finished)] == ["left the swarm"]


class Stopping(Node):
    """Stops when its machine says so, as a peer does."""

    finished_at = 0.0

    def carry_out_all(self, actions):
        super().carry_out_all(actions)
        if self.done and not self.finished_at:
            self.finished_at = self.world.clock.now
            self.crash()


class Slow(Stopping):
    """Its trainer takes long to apply a record."""

    def worked(self, incarnation, action):
        self.world.clock.after(8.0, super().worked, incarnation, action)


def test_peers_stay_until_a_slow_one_has_the_last_state():
    """In the simulator, with all messages: nobody stops while the slow one may still need its blobs."""
    policy = policy_for(4, total_windows=60)
    world = World(7, 4, Weather(delay=0.02, jitter=0.001), policy=policy)
    for i in range(4):
        world.clock.at(0.0, world.add(Slow if i == 3 else Stopping, speed=2.0).boot)
    world.clock.run_until(240.0)
    assert all(n.done for n in world.nodes), world.describe()
    slow = world.nodes[3]
    assert slow.trainer_record == world.nodes[0].trainer_record
    reached = world.applied_at[slow.trainer_record]
    assert all(n.finished_at >= reached for n in world.nodes)


class SilentWithholder(Withholder):
    """Proposes nothing, so that the others wait for its update until the deadline."""

    def broadcast(self, message):
        if not isinstance(message.body, RoundRecord):
            super().broadcast(message)


def test_a_node_ends_only_after_the_goodbye_of_any_kind_of_round_was_due():
    kinds = Exchange.__subclasses__()
    assert kinds and all(kind.leave_seconds <= MAX_LEAVE_SECONDS < HARD_STOP_SECONDS for kind in kinds)


@pytest.mark.parametrize("exchange", [GATHER, REDUCE])
def test_others_receive_the_goodbye_of_a_leaver_whose_round_is_undecided(exchange):
    """Through the product's driver, which ends when the machine has finished, or at its hard stop."""
    policy = policy_for(4, exchange=exchange, exchange_seconds=60.0, patience_seconds=60.0, member_seconds=30.0)
    world = World(3, 4, Weather(delay=0.02, jitter=0.001), policy=policy)
    for i in range(4):
        world.clock.at(0.0, world.add(SilentWithholder if i == 3 else Stopping, speed=2.0).boot)
    leaver = world.nodes[0]
    while leaver.machine.phase != "exchanging" if leaver.alive else True:
        world.clock.run_until(world.clock.now + 0.1)
    began = world.clock.now
    undecided = leaver.machine.summary(began).head
    leaver.step(ev.Leave())
    world.clock.at(began + HARD_STOP_SECONDS, leaver.crash)
    world.clock.run_until(began + HARD_STOP_SECONDS - 1.0)
    assert leaver.done and leaver.finished_at <= began + ReducedExchange.leave_seconds
    assert leaver.machine.summary(world.clock.now).head == undecided
    for other in world.nodes[1:]:
        assert leaver.key not in [m.key for m in other.machine.summary(world.clock.now).members]
