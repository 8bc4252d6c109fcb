"""The owner's directives at one round machine: an old one at a start, a move to rounds that are gone, larger bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import Certificate, Directive, Heartbeat, Rollback, RoundChanges, RoundRecord, UpdateHeader
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import LocalStatus
from tests.simulation.signer import FakeSigner, certificate
from tests.support.rounds_bench import ME, OTHERS, POLICY, RUN, STATE, Bench, blob_of

OWNER = FakeSigner(PeerKey(sha256(b"owner")))
NEXT = Digest(sha256(b"next"))


def directive(sequence: int, **fields):
    return OWNER.sign(Directive(RUN, sequence, **fields))


def started_again(*kept) -> Bench:
    """Return a peer that comes back with directives and certificates that it received in an earlier life."""
    b = Bench()
    b.now, b.chain = 0.0, Chain(RUN, STATE, POLICY.chain_limits)
    for message in kept:
        (b.chain.add if isinstance(message, Certificate) else b.chain.add_directive)(message)
    b.machine = RoundMachine(
        POLICY, RUN, FakeSigner(ME), b.chain, now=0.0, blob_size=9, status=LocalStatus(admission=b"me")
    )
    b.actions = b.machine.start(0.0)
    (b.directives,) = b.of(do.DirectivesChanged)
    return b


@pytest.mark.parametrize("orders", [{"run_status": "ended"}, {"banned": (ME,)}])
def test_who_starts_again_hears_whether_the_directive_that_sent_it_away_still_counts(orders):
    b = started_again(directive(1, **orders))
    assert not b.of(do.Finished) and b.directives.paused
    b.step(ev.MessageReceived(directive(2)), 1.0)
    for t in range(2, 40):
        b.step(ev.Tick(), float(t))
        assert not b.of(do.Finished)
    assert not b.directives.paused


@pytest.mark.parametrize("orders", [{"run_status": "ended"}, {"banned": (ME,)}])
def test_it_leaves_when_nobody_knows_a_newer_directive_and_at_once_when_it_is_said_again(orders):
    b = started_again(directive(1, **orders))
    ends = []
    for t in range(1, 40):
        b.step(ev.Tick(), t / 2)
        if b.of(do.SyncState):
            b.step(ev.StateReached(b.chain.genesis, STATE))
        ends += [b.now] * len(b.of(do.RunCompleted if "run_status" in orders else do.Finished))
    assert ends == [POLICY.member_seconds]
    b = started_again(directive(1, **orders))
    b.step(ev.MessageReceived(directive(2, **orders)), 1.0)
    assert b.of(do.RunCompleted if "run_status" in orders else do.Finished)


def test_a_move_to_rounds_that_are_rolled_back_is_not_waited_for():
    b = Bench()
    b.announce()
    first = b.of(do.ApplyRecord)[0].certificate
    b.step(ev.StateReached(first.digest, NEXT))
    theirs = b.header(OTHERS[0], 10, b"2", round=Round(1), parent=first.digest, base_state=NEXT)
    record = FakeSigner(OTHERS[0]).sign(RoundRecord(RUN, Round(1), first.digest, NEXT, 0, (theirs,)))
    gone = certificate(record, [OTHERS[0]])
    b.step(ev.CertificateReceived(gone, OTHERS[0]))
    b.step(ev.BlobHeld(theirs.body.blob, theirs.author))
    assert b.of(do.ApplyRecord)[0].certificate == gone
    # The trainer is still at it, or waits for what nobody has any more.
    b.step(ev.MessageReceived(directive(1, rollback=Rollback(1, first.digest, Round(1), NEXT))))
    moves = b.of(do.SyncState)
    assert [(m.start.record, m.reset) for m in moves] == [(first.digest, True)]
    b.step(ev.StateReached(gone.digest, Digest(sha256(b"late"))))
    assert not b.of(do.SyncState) and b.machine.phase == "syncing"
    b.step(ev.StateReached(first.digest, NEXT))
    assert b.machine.phase == "training" and b.machine.summary(b.now).round == 1


def test_after_a_rollback_to_the_head_the_updates_before_it_are_fetched_no_more():
    """The state there is to be had; nobody may have the updates that led to it."""
    b = Bench()
    parent, state, wanted = b.chain.genesis, STATE, set()
    for number in range(3):
        theirs = b.header(OTHERS[0], 10, bytes([number]), round=Round(number), parent=parent, base_state=state,
                          first_window=10 * number, end_window=10 * number + 10)  # fmt: skip
        record = FakeSigner(OTHERS[0]).sign(RoundRecord(RUN, Round(number), parent, state, 0, (theirs,)))
        made = certificate(record, [OTHERS[0]])
        parent, state = made.digest, NEXT
        b.step(ev.CertificateReceived(made, OTHERS[0]))
        wanted |= {action.blob for action in b.of(do.FetchBlob)}
    while not wanted:
        b.beat(OTHERS[0], sequence=int(b.now) + 1, head=parent, weight=30)
        b.step(ev.Tick(), b.now + 1.0)
        wanted |= {action.blob for action in b.of(do.FetchBlob)}
    assert b.chain.head == parent and len(wanted) == 3
    b.step(ev.MessageReceived(directive(1, rollback=Rollback(1, parent, Round(3), NEXT))))
    assert {action.blob for action in b.of(do.CancelFetch)} == wanted


def test_who_still_trains_on_a_record_that_was_rolled_back_counts_for_no_round():
    b = Bench()
    b.announce()
    first = b.of(do.ApplyRecord)[0].certificate
    b.step(ev.StateReached(first.digest, NEXT))
    theirs = b.header(OTHERS[0], 10, b"2", round=Round(1), parent=first.digest, base_state=NEXT)
    record = FakeSigner(OTHERS[0]).sign(RoundRecord(RUN, Round(1), first.digest, NEXT, 0, (theirs,)))
    gone = certificate(record, [OTHERS[0]])
    b.step(ev.CertificateReceived(gone, OTHERS[0]))
    b.step(ev.BlobHeld(theirs.body.blob, theirs.author))
    b.step(ev.StateReached(gone.digest, Digest(sha256(b"late"))))
    assert b.machine.summary(b.now).round == 2
    b.step(ev.MessageReceived(directive(1, rollback=Rollback(1, first.digest, Round(1), NEXT))))
    assert gone.digest not in b.chain
    for sequence, author in enumerate(OTHERS[:3]):
        body = Heartbeat(
            RUN, sequence, Round(2), gone.digest, 10, 0, "training", 1.0, 1.0, 0, 0, (), (), b"a", ""
        )  # fmt: skip
        b.step(ev.MessageReceived(FakeSigner(author).sign(body)))
    b.step(ev.StateReached(first.digest, NEXT))
    assert b.machine.phase == "training" and b.machine.summary(b.now).round == 1


@pytest.mark.parametrize(("to", "is_learnt_gone"), [(0, True), (2, False)])
def test_who_was_away_during_a_rollback_forgets_what_it_learnt_on_rounds_that_are_gone(to: int, is_learnt_gone: bool):
    b, kept = Bench(), []
    parent, state = b.chain.genesis, STATE
    for number in range(3):
        mine = b.header(ME, 10, bytes([number]), round=Round(number), parent=parent, base_state=state,
                        first_window=10 * number, end_window=10 * number + 10)  # fmt: skip
        record = FakeSigner(ME).sign(RoundRecord(RUN, Round(number), parent, state, 0, (mine,)))
        kept.append(certificate(record, [ME]))
        parent, state = kept[-1].digest, NEXT
    b = started_again(*kept)
    back = directive(1, rollback=Rollback(1, kept[to].digest, Round(to + 1), NEXT))
    b.step(ev.ChainReceived((), None, OTHERS[0], False, back), 0.5)
    while not (moves := b.of(do.SyncState)):
        b.step(ev.Tick(), b.machine.next_tick)
    assert b.chain.head == kept[to].digest
    assert [(m.reset, m.missed) for m in moves] == [(is_learnt_gone, ())]


def test_more_members_than_the_spec_says_have_room_everywhere():
    b = Bench()
    b.step(ev.MessageReceived(directive(1, changes=RoundChanges(max_members=1000))))
    b.announce()
    b.step(ev.StateReached(b.of(do.ApplyRecord)[0].certificate.digest, NEXT))
    assert b.directives.policy.max_members == 1000
    bounds = {name: bound for name, (_, bound) in b.machine.sizes().items()}
    assert bounds["blobs held"] >= 4000 and bounds["claims"] >= 1000 and bounds["future messages"] >= 2000
    for i in range(1, 900):  # no more than those of one round
        b.step(ev.BlobHeld(blob_of(ME, i.to_bytes(2, "big")), ME))
    assert b.machine.sizes()["blobs held"][0] >= 899


def test_a_replayed_heartbeat_is_no_reason_to_tell_its_author_the_directive_again():
    b = Bench()
    b.step(ev.MessageReceived(directive(7)))

    def beat(sequence: int, directive_sequence: int, now: float) -> list:
        body = Heartbeat(
            RUN, sequence, Round(0), b.chain.genesis, 0, 0, "training", 1.0, 1.0, 0, 0, (), (), b"a", "",
            directive_sequence=directive_sequence,
        )  # fmt: skip
        b.step(ev.MessageReceived(FakeSigner(OTHERS[0]).sign(body)), now)
        return b.of(do.Send)

    assert not beat(1, 0, 0.0) and not beat(2, 7, 1.0)
    for i in range(10):
        assert not beat(1, 0, 1.1 + i * 1.5)


@pytest.mark.parametrize("kind", [{}, {"observer": True, "reporter": FakeSigner(ME)}], ids=["trainer", "auditor"])
def test_who_cannot_follow_a_rollback_because_it_goes_too_far_back_trains_no_more_and_begins_again(kind):
    b = Bench(**kind)
    b.chain.limits = replace(b.chain.limits, min_main_records=1, max_records=2)
    made = []
    for number in range(6):
        parent, state = b.chain.head, STATE if not number else NEXT
        h = b.header(OTHERS[0], 10, bytes([number]), round=Round(number), parent=parent, base_state=state,
                     first_window=10 * number, end_window=10 * number + 10)  # fmt: skip
        made.append(
            certificate(FakeSigner(OTHERS[0]).sign(RoundRecord(RUN, Round(number), parent, state, 0, (h,))), [h.author])
        )
        b.step(ev.CertificateReceived(made[-1], OTHERS[0]))
        b.step(ev.BlobHeld(h.body.blob, h.author))
        b.step(ev.StateReached(made[-1].digest, NEXT))
    back = directive(1, rollback=Rollback(1, made[1].digest, Round(2), NEXT))
    b.step(ev.MessageReceived(back))
    assert [f.again for f in b.of(do.Finished)] == [True] and b.chain.is_rolled_back_past_root
    b.step(ev.TrainingProgress(50, 1.0, 1.0))
    assert not b.of(do.RequestUpdate)
    again = Chain(RUN, STATE, POLICY.chain_limits)
    again.add_directive(back)
    for c in made[:2]:
        again.add(c)
    assert not again.is_rolled_back_past_root and again.head == made[1].digest


def test_the_update_announced_in_a_round_stands_when_the_head_is_back_at_its_parent():
    """A second one would be equivocation, for which an honest peer would be left out."""
    b = Bench()
    liars = OTHERS[:3]
    for key in liars:
        b.beat(key)
    b.announce()
    mine, theirs = b.mine, [b.header(key) for key in liars]
    b.hold(*theirs)
    gone = certificate(b.record(liars[0], theirs), liars)
    b.step(ev.CertificateReceived(gone, liars[0]))
    for key in liars:
        b.beat(key, sequence=2, head=gone.digest)
    b.step(ev.Tick(), b.now + POLICY.patience_seconds + 1)
    assert b.chain.head == gone.digest
    b.step(ev.StateReached(gone.digest, NEXT))
    b.step(ev.MessageReceived(directive(1, banned=liars)))
    assert b.chain.head == b.chain.genesis
    b.step(ev.StateReached(b.chain.genesis, STATE))
    assert b.mine == mine
    b.step(ev.TrainingProgress(25, 1.0, 1.0))
    assert not b.of(do.RequestUpdate)
    b.step(ev.Tick(), b.now + POLICY.max_seconds)
    assert {h.blob for h in b.said(UpdateHeader)} <= {mine.body.blob}
