"""A rest of this peer: its work is handed in, its trainer goes, and it follows until it is to train again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.ids import Digest, sha256
from protocol.messages import Heartbeat, UpdateHeader, Vote
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.phase import Phase
from protocol.rounds.rest import HAND_IN_SECONDS
from tests.simulation.signer import certificate
from tests.support.rounds_bench import ME, OTHERS, POLICY, STATE, Bench, blob_of

NEXT = Digest(sha256(b"next"))


def trained(windows: int = 5) -> Bench:
    """Return a machine beside another member, with fewer windows than a round wants."""
    b = Bench()
    b.beat(OTHERS[0])
    b.step(ev.TrainingProgress(windows, 1.0, 1.0))
    assert not b.of(do.RequestUpdate)
    return b


def made(b: Bench, windows: int = 5) -> None:
    """Answer the request for an update."""
    b.step(ev.UpdateReady(b.chain.genesis, 0, 0, windows, 1, blob_of(ME), 9, 1.0))


def test_what_is_trained_is_announced_at_once_and_only_then_the_trainer_goes():
    b = trained()
    b.step(ev.Rest())
    assert b.of(do.RequestUpdate) and not b.of(do.ReleaseTrainer)
    assert [beat.phase for beat in b.said(Heartbeat)] == ["resting"]
    made(b)
    assert [h.windows for h in b.said(UpdateHeader)] == [5] and b.of(do.ReleaseTrainer)


def test_without_work_the_trainer_goes_at_once_and_the_others_are_told():
    b = Bench()
    b.beat(OTHERS[0])
    b.step(ev.Rest())
    assert b.of(do.ReleaseTrainer) and not b.of(do.RequestUpdate)
    last = b.said(Heartbeat)[-1]
    assert (last.phase, last.state, last.windows) == ("resting", None, 0)


def test_a_trainer_that_makes_no_update_in_time_goes_all_the_same():
    b = trained()
    b.step(ev.Rest(), 7.0)
    b.step(ev.Tick(), 7.0 + HAND_IN_SECONDS - 0.1)
    assert not b.of(do.ReleaseTrainer)
    b.step(ev.Tick(), 7.0 + HAND_IN_SECONDS)
    assert b.of(do.ReleaseTrainer)
    made(b)
    assert not b.said(UpdateHeader)  # it returns to the error feedback with the next state


def test_it_votes_for_the_round_of_its_last_update_and_follows_from_then_on():
    b = trained()
    b.step(ev.Rest())
    made(b)
    other = b.header(OTHERS[0])
    b.hold(other)
    record = b.record(OTHERS[0], [b.mine, other])
    b.step(ev.MessageReceived(record), b.now + POLICY.propose_seconds)
    assert b.said(Vote) and not b.of(do.ApplyRecord)
    b.step(ev.CertificateReceived(certificate(record, [ME, OTHERS[0]]), OTHERS[0]))
    assert b.chain.height(b.chain.head) == 1 and b.machine.phase is Phase.RESTING
    assert not b.of(do.ApplyRecord) and not b.of(do.SyncState)
    last = b.said(Heartbeat)[-1]
    assert (last.phase, last.head, last.state) == ("resting", b.chain.head, None)

    b.step(ev.Resume())
    assert b.of(do.AcquireTrainer)
    (sync,) = b.of(do.SyncState)
    assert sync.path[-1].digest == b.chain.head and sync.missed == () and sync.next_window == 5
    assert b.machine.phase is Phase.SYNCING
    b.step(ev.StateReached(b.chain.head, NEXT))
    assert b.machine.phase is Phase.TRAINING


def test_an_update_that_its_round_left_out_meanwhile_returns_to_the_feedback():
    b = trained()
    b.step(ev.Rest())
    made(b)
    record = b.record(OTHERS[0], [b.header(key) for key in OTHERS[:2]])
    b.step(ev.CertificateReceived(certificate(record, OTHERS[:2]), OTHERS[0]))
    b.step(ev.Resume())
    (sync,) = b.of(do.SyncState)
    assert sync.missed == (blob_of(ME),) and sync.next_window == 0


def test_it_fetches_nothing_while_it_rests():
    b = Bench()
    b.beat(OTHERS[0])
    b.step(ev.Rest())
    b.step(ev.MessageReceived(b.header(OTHERS[0])))
    assert not b.of(do.FetchBlob)


def test_who_resumes_before_the_trainer_has_gone_goes_on_as_before():
    b = trained()
    b.step(ev.Rest())
    b.step(ev.Resume())
    assert b.machine.phase is Phase.TRAINING and not b.of(do.SyncState) and not b.of(do.AcquireTrainer)
    made(b)
    assert b.machine.phase is Phase.EXCHANGING and not b.of(do.ReleaseTrainer)
    b.step(ev.Rest())
    b.step(ev.Rest())
    b.step(ev.Resume())
    b.step(ev.Resume())
    assert b.machine.phase is Phase.SYNCING  # it had nothing more to hand in


def test_what_was_announced_stands_when_the_rest_ends_within_its_round():
    b = trained()
    b.step(ev.Rest())
    made(b)
    (first,) = b.said(UpdateHeader)
    assert b.of(do.ReleaseTrainer)
    b.step(ev.Resume())
    assert b.of(do.AcquireTrainer) and b.of(do.SyncState)
    b.step(ev.StateReached(b.chain.genesis, STATE))
    b.step(ev.TrainingProgress(10**6, 1.0, 1.0))
    assert b.machine.phase is Phase.EXCHANGING and not b.of(do.RequestUpdate)
    assert [h.body for h in b.machine.summary(b.now).headers] == [first]


def test_a_rest_may_begin_before_a_state_is_held():
    b = Bench(alone=False)
    assert b.machine.phase is Phase.JOINING
    b.step(ev.Rest())
    assert b.of(do.ReleaseTrainer) and b.machine.phase is Phase.RESTING
    b.step(ev.Resume())
    assert b.machine.phase is Phase.JOINING
    b.step(ev.Tick(), 60.0)
    assert b.of(do.SyncState) and b.machine.phase is Phase.SYNCING
    b.step(ev.Rest())
    b.step(ev.Tick(), 60.0 + HAND_IN_SECONDS)
    assert b.of(do.ReleaseTrainer)
    b.step(ev.StateReached(b.chain.genesis, STATE))  # it was on the way: nothing follows from it
    assert b.machine.phase is Phase.RESTING


@pytest.mark.parametrize("announced", [True, False])
def test_who_leaves_while_it_rests_says_goodbye(announced):
    b = trained()
    b.step(ev.Rest())
    if announced:
        made(b)
    b.step(ev.Leave())
    while not b.of(do.Finished):
        b.step(ev.Tick(), b.machine.next_tick)
    assert b.machine.phase is Phase.LEFT and b.now <= 10.0


def test_the_others_neither_wait_for_it_nor_miss_its_stake():
    b = Bench()
    b.beat(OTHERS[0], phase="resting", windows=0)
    b.announce()
    assert b.machine.summary(b.now).awaited == ()
    assert b.chain.height(b.chain.head) == 1  # decided without it, at once


def test_when_the_run_is_over_its_word_on_the_last_state_stays():
    b = Bench(policy=replace(POLICY, total_windows=25))
    b.announce()
    b.step(ev.StateReached(b.chain.head, NEXT))
    assert b.of(do.RunCompleted)
    b.step(ev.Rest())
    assert not b.of(do.ReleaseTrainer) and b.machine.summary(b.now).state == NEXT


def test_an_observer_does_not_rest():
    b = Bench(observer=True)
    b.step(ev.Rest())
    assert b.machine.phase is Phase.OBSERVING and not b.of(do.ReleaseTrainer)
    b.step(ev.Resume())
    assert b.machine.phase is Phase.OBSERVING
