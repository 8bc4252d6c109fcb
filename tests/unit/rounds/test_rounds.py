"""The round machine by itself: one machine, hand-made events, and the actions that follow."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from protocol.audits import AuditRule
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import (
    Directive,
    Finalization,
    Goodbye,
    Heartbeat,
    RoundRecord,
    Score,
    UpdateHeader,
    Vote,
    WorkReport,
)
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import LocalStatus, RoundPolicy
from protocol.rounds.round_state import proposer_order
from tests.simulation.signer import FakeSigner, certificate
from tests.support.rounds_bench import ME, OTHERS, POLICY, RUN, STATE, Bench, blob_of


def test_the_machine_lists_each_query():
    queries = {name for name in vars(RoundMachine) if not name.startswith("_")} - {"start", "step"}
    assert queries <= set(re.findall(r"`(\w+)`", RoundMachine.__doc__ or ""))


def test_a_lone_peer_certifies_its_own_update_without_a_timer():
    b = Bench()
    b.announce()
    assert b.said(UpdateHeader) and b.said(RoundRecord) and b.said(Vote)
    assert (
        b.of(do.StoreCertificate) and b.of(do.ApplyRecord)[0].next_window == 25 and b.of(do.ApplyRecord)[0].missed == ()
    )
    assert b.actions.index(b.of(do.StoreCertificate)[0]) < b.actions.index(b.of(do.ApplyRecord)[0])
    b.step(ev.StateReached(b.chain.head, Digest(sha256(b"next"))))
    assert b.machine.summary(0).round == 1 and b.said(Heartbeat)[-1].weight == 25


def test_below_the_target_nobody_announces_until_the_round_has_lasted_long_enough():
    b = Bench()
    b.step(ev.TrainingProgress(3, 1.0, 1.0))
    b.beat(OTHERS[0], windows=16)
    assert not b.of(do.RequestUpdate)
    b.beat(OTHERS[0], windows=17, sequence=2)
    assert b.of(do.RequestUpdate)
    b = Bench()
    b.step(ev.TrainingProgress(3, 1.0, 1.0), 99)
    assert not b.of(do.RequestUpdate)
    b.step(ev.Tick(), 100)
    assert b.of(do.RequestUpdate)


def test_who_has_trained_nothing_does_not_announce():
    b = Bench()
    b.beat(OTHERS[0], windows=50)
    assert not b.of(do.RequestUpdate)
    b.step(ev.Tick(), 200)
    assert not b.of(do.RequestUpdate)


def test_blobs_are_fetched_after_announcing_and_served_only_to_those_who_announced():
    b = Bench()
    theirs = b.header(OTHERS[0])
    b.step(ev.MessageReceived(theirs))
    assert not b.of(do.FetchBlob)
    b.announce()
    assert [a.blob for a in b.of(do.FetchBlob)] == [theirs.body.blob]
    assert b.machine.serve_refusal(blob_of(ME), OTHERS[0]) is None
    assert "not announced" in b.machine.serve_refusal(blob_of(ME), OTHERS[1])
    assert b.machine.serve_refusal(Digest(sha256(b"checkpoint")), OTHERS[1]) is None


def test_nothing_is_served_to_the_banned():
    b = Bench()
    b.announce()
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 1, banned=(OTHERS[0],)))))
    for blob in (blob_of(ME), Digest(sha256(b"checkpoint"))):
        assert b.machine.serve_refusal(blob, OTHERS[0]) == "the run's owner has banned you"
    assert b.machine.serve_refusal(Digest(sha256(b"checkpoint")), OTHERS[1]) is None
    b.step(ev.MessageReceived(FakeSigner(OTHERS[9]).sign(Directive(RUN, 2))))
    assert b.machine.serve_refusal(Digest(sha256(b"checkpoint")), OTHERS[0]) is None


def test_a_decided_round_is_served_to_anyone():
    b = Bench()
    b.announce()
    b.step(ev.StateReached(b.chain.head, Digest(sha256(b"next"))))
    assert b.machine.serve_refusal(blob_of(ME), OTHERS[1]) is None


def test_until_a_round_is_open_only_what_the_chain_has_applied_is_served():
    before = Bench()
    before.announce()
    decided = before.of(do.StoreCertificate)[0].certificate
    restarted = Bench(ready=False)
    restarted.machine = RoundMachine(
        POLICY, RUN, FakeSigner(ME), before.chain, now=0.0, assets=frozenset({Digest(sha256(b"tokens"))})
    )
    restarted.machine.start(0.0)
    undecided = blob_of(ME, b"announced before the crash")
    refusal = restarted.machine.serve_refusal(undecided, OTHERS[0])
    assert refusal is not None and "no round is open here" in refusal
    for blob in (decided.record.body.updates[0].body.blob, STATE, Digest(sha256(b"tokens"))):
        assert restarted.machine.serve_refusal(blob, OTHERS[0]) is None
    assert Bench(observer=True).machine.serve_refusal(undecided, OTHERS[0]) is None


def test_an_update_is_announced_again_after_a_restart_by_the_very_header_that_was_stored_before_the_first_time():
    before = Bench()
    before.beat(OTHERS[0])
    before.announce()
    kept = before.of(do.StoreHeader)[0]
    said = next(a for a in before.of(do.Broadcast) if a.message is kept.message)
    assert before.actions.index(kept) < before.actions.index(said)
    for windows, is_same in ((25, True), (26, False)):
        again = Bench(ready=False)
        again.machine = RoundMachine(
            POLICY, RUN, FakeSigner(ME), again.chain, now=0.0, blob_size=9, announced=kept.message,
            status=LocalStatus(admission=b"renamed"),
        )  # fmt: skip
        again.machine.start(0.0, alone=True)
        again.step(ev.StateReached(again.chain.genesis, STATE))
        again.beat(OTHERS[0])
        again.announce(windows)
        (header,) = again.said(UpdateHeader)
        assert (header == kept.message.body) == is_same == (not again.of(do.StoreHeader))
        assert header.admission == (b"me" if is_same else b"renamed")


def test_the_open_round_stays_hidden_while_the_trainer_is_lost():
    b = Bench()
    b.beat(OTHERS[0])
    b.announce()
    b.step(ev.SyncFailed(b.chain.head, "the trainer died", False))
    assert "not announced" in b.machine.serve_refusal(blob_of(ME), OTHERS[1])


def test_a_vote_is_given_only_when_every_blob_is_held():
    b = Bench()
    b.beat(OTHERS[0])
    b.announce()
    theirs = b.header(OTHERS[0])
    record = b.record(OTHERS[0], [b.mine, theirs])
    b.step(ev.MessageReceived(record))
    b.step(ev.Tick(), 2)
    assert not b.said(Vote)
    b.step(ev.BlobHeld(theirs.body.blob, theirs.author))
    assert len(b.said(Vote)) == 1


def test_no_vote_for_a_record_with_a_bad_update_and_its_author_is_reported():
    b = Bench()
    b.beat(OTHERS[0])
    b.announce()
    theirs = b.header(OTHERS[0])
    b.step(ev.MessageReceived(theirs))
    b.step(ev.BlobInvalid(theirs.body.blob, "scales"))
    assert [r.about for r in b.of(do.Notice)] == [OTHERS[0]]
    mine_alone = b.said(RoundRecord)
    assert [len(r.updates) for r in mine_alone] == [1]
    record = b.record(OTHERS[0], [b.machine.summary(0).headers[0], theirs])
    b.step(ev.MessageReceived(record))
    for t in range(1, 60):
        b.step(ev.Tick(), t)
        assert record.digest not in [v.record for v in b.said(Vote)]


@pytest.mark.parametrize("dies", [True, False])
def test_an_update_whose_author_has_fallen_silent_is_not_waited_for_until_the_deadline(dies):
    b = Bench()
    theirs, third = b.header(OTHERS[0]), b.header(OTHERS[1])
    b.beat(OTHERS[0])
    b.beat(OTHERS[1])
    b.announce()
    b.hold(theirs)
    b.step(ev.MessageReceived(third))  # its blob does not come
    ready = None
    for t in range(1, int(POLICY.exchange_seconds)):
        b.beat(OTHERS[0], sequence=1 + t, phase="exchanging")
        if not dies:
            b.beat(OTHERS[1], sequence=1 + t, phase="exchanging")
        b.step(ev.Tick(), t)
        if ready is None and not b.machine.summary(t).awaited:
            ready = t
    assert ready is None if not dies else POLICY.member_seconds < ready <= POLICY.member_seconds + 2


def test_another_record_gets_the_vote_only_after_a_pause():
    b = Bench()
    theirs, third = b.header(OTHERS[0]), b.header(OTHERS[1])
    b.beat(OTHERS[0])
    b.beat(OTHERS[1])
    b.announce()
    b.hold(theirs, third)
    ranks = proposer_order(b.chain.seed(b.chain.genesis), (ME, OTHERS[0], OTHERS[1]))
    turns = [i for i in range(9, 15) if ranks[i % 3] != ME]
    first, later = (b.record(ranks[i % 3], [b.mine, theirs, third], attempt=i) for i in turns[-2:])
    b.step(ev.MessageReceived(first), 20.0)
    start = b.now if b.said(Vote) else None
    while start is None:
        b.step(ev.Tick(), b.machine.next_tick)
        start = b.now if first.digest in [v.record for v in b.said(Vote)] else None
    b.step(ev.MessageReceived(later), start + 0.1)
    assert not b.said(Vote)
    while not b.said(Vote):
        b.step(ev.Tick(), b.machine.next_tick)
    assert b.said(Vote)[0].record == later.digest and b.now >= start + POLICY.propose_seconds


def test_two_records_at_once_are_reported_and_neither_is_preferred():
    b = Bench()
    theirs, third = b.header(OTHERS[0]), b.header(OTHERS[1])
    b.beat(OTHERS[2])
    b.announce()
    for h in (theirs, third):
        b.step(ev.MessageReceived(h))
    b.step(ev.MessageReceived(b.record(OTHERS[0], [b.mine, theirs, third])))
    b.step(ev.MessageReceived(b.record(OTHERS[0], [b.mine, theirs])))
    assert [r.about for r in b.of(do.Notice) if r.kind == "equivocation"] == [OTHERS[0]]
    b.step(ev.BlobHeld(theirs.body.blob, theirs.author))
    b.step(ev.BlobHeld(third.body.blob, third.author))
    assert not b.said(Vote)


def test_two_headers_of_one_author_are_reported_once_and_the_first_is_kept():
    b = Bench()
    first, second = b.header(OTHERS[0], 5), b.header(OTHERS[0], 6, b"other")
    b.step(ev.MessageReceived(first))
    b.step(ev.MessageReceived(second))
    assert [r.kind for r in b.of(do.Notice)] == ["equivocation"]
    b.step(ev.MessageReceived(second))
    assert not b.of(do.Notice)
    assert b.machine.summary(0).headers == (first,)


def test_a_machine_with_a_copy_of_our_key_is_reported_by_its_update_or_its_heartbeats():
    b = Bench()
    b.announce()
    b.step(ev.MessageReceived(b.header(ME, 7, b"other")))
    assert [(r.level, r.kind) for r in b.of(do.Notice)] == [("error", "copied-key")]
    b = Bench()
    own = [a.message.body for a in b.machine.step(ev.Tick(), 2.0) if isinstance(a, do.Broadcast)]
    for sequence in (0, *(body.sequence for body in own if isinstance(body, Heartbeat))):
        b.beat(ME, sequence=sequence)  # from before, and what we have sent
        assert not b.of(do.Notice)
    for _ in range(2):
        b.beat(ME, sequence=10**6)  # our own, from before a restart with the clock set back
        assert not b.of(do.Notice)
    b.beat(ME, sequence=10**6 + 1)
    assert [r.kind for r in b.of(do.Notice)] == ["copied-key"]
    b.beat(ME, sequence=10**6 + 1)
    assert not b.of(do.Notice)


@pytest.mark.parametrize(
    "changes", [{"blob_size": 10}, {"end_window": 51}, {"round": Round(0), "first_window": 3, "end_window": 60}]
)
def test_a_header_that_breaks_the_bounds_is_refused_with_a_reason(changes):
    b = Bench()
    b.step(ev.MessageReceived(b.header(OTHERS[0], **changes)))
    assert [r.kind for r in b.of(do.Notice)] == ["refused"]
    assert b.machine.summary(0).headers == ()


def test_an_author_whose_messages_are_refused_is_reported_once_a_round_and_others_are_too():
    b = Bench()
    reports: list[do.Notice] = []
    for i in range(20):
        for author in OTHERS[:2]:
            b.step(ev.MessageReceived(b.header(author, end_window=1000 + i)))
            reports += b.of(do.Notice)
    assert [(r.kind, r.about) for r in reports] == [("refused", OTHERS[0]), ("refused", OTHERS[1])]
    headers = [b.header(k) for k in OTHERS[2:5]]
    b.step(ev.CertificateReceived(certificate(b.record(OTHERS[2], headers), OTHERS[2:5]), OTHERS[2]))
    for h in headers:
        b.step(ev.BlobHeld(h.body.blob, h.author))
    b.step(ev.StateReached(b.chain.head, Digest(sha256(b"next"))))
    lie = b.header(OTHERS[0], end_window=2000, round=Round(1), parent=b.chain.head, base_state=Digest(sha256(b"next")))
    b.step(ev.MessageReceived(lie))
    assert [(r.kind, r.about) for r in b.of(do.Notice)] == [("refused", OTHERS[0])]


def test_a_flood_of_new_keys_does_not_evict_contributors_of_the_last_round():
    b = Bench()
    headers = [b.header(k) for k in OTHERS[:3]]
    made = certificate(b.record(OTHERS[0], headers), OTHERS[:3])
    b.step(ev.CertificateReceived(made, OTHERS[0]))
    for h in headers:
        b.step(ev.BlobHeld(h.body.blob, h.author))
    b.step(ev.StateReached(made.record.digest, Digest(sha256(b"next"))))
    for key in OTHERS[3:]:
        b.beat(key)
    for key in OTHERS[:3]:
        b.beat(key)
    members = {m.key for m in b.machine.summary(0).members}
    assert len(members) == POLICY.max_members and set(OTHERS[:3]) <= members


def test_a_missed_update_goes_back_and_returns_when_its_chain_does():
    b = Bench()
    b.beat(OTHERS[0])
    b.announce()
    theirs = b.header(OTHERS[0], 30)
    without_us = certificate(b.record(OTHERS[0], [theirs]), [OTHERS[0]])
    b.step(ev.CertificateReceived(without_us, OTHERS[0]))
    b.step(ev.BlobHeld(theirs.body.blob, theirs.author))
    b.step(ev.Tick(), POLICY.patience_seconds)  # it is certified by one of two: held back till then
    assert b.of(do.ApplyRecord)[0].missed == (blob_of(ME),) and b.of(do.ApplyRecord)[0].next_window == 0
    b.step(ev.StateReached(without_us.record.digest, Digest(sha256(b"next"))))
    other = b.header(OTHERS[1], 40)
    mine = b.header(ME, 25, blob=blob_of(ME))
    with_us = certificate(b.record(OTHERS[1], [mine, other]), [ME, OTHERS[1]])
    b.step(ev.CertificateReceived(with_us, OTHERS[1]))
    b.step(ev.BlobHeld(other.body.blob, other.author))
    moves = b.of(do.SyncState)
    assert moves and moves[0].regained == (blob_of(ME),) and moves[0].missed == () and moves[0].next_window == 25


def test_a_certificate_with_little_of_what_was_announced_is_held_back_for_the_patience():
    b = Bench()
    for key in OTHERS[:3]:
        b.beat(key)
    b.announce()
    big = [b.header(k, 40) for k in OTHERS[1:3]]
    small = b.header(OTHERS[0], 10)
    b.hold(small, *big)
    light = certificate(b.record(OTHERS[0], [small]), [OTHERS[0]])
    b.step(ev.CertificateReceived(light, OTHERS[0]))
    assert b.of(do.StoreCertificate) and not b.of(do.ApplyRecord)
    applied = []
    for t in range(1, 80):
        b.step(ev.Tick(), t / 2)
        applied += [(b.now, a) for a in b.of(do.ApplyRecord)]
    assert applied and applied[0][0] >= POLICY.patience_seconds


def test_a_drifted_state_is_loud_and_loaded_anew():
    b = Bench()
    other = Digest(sha256(b"other state"))
    b.step(ev.TrainingProgress(5, 1.0, 1.0))
    reports = []
    for key in OTHERS[:3]:
        assert reports == [], "two of three that are present are no more than two thirds"
        b.step(ev.MessageReceived(b.header(key, base_state=other)))
        reports += [r.level for r in b.of(do.Notice) if r.kind == "drift"]
    assert reports == ["error"]
    b.step(ev.UpdateReady(b.chain.genesis, 0, 0, 5, 5, blob_of(ME), 9, 1.0))
    assert b.of(do.SyncState) and not b.said(UpdateHeader)


def test_a_final_may_cut_off_the_record_that_the_trainer_is_being_moved_to():
    b = Bench(ready=False)
    for t in range(1, 5):
        b.step(ev.Tick(), t)
    (ours, theirs) = (b.header(key, windows) for key, windows in ((OTHERS[0], 30), (OTHERS[1], 20)))
    heavy, light = (certificate(b.record(h.author, [h]), [h.author]) for h in (ours, theirs))
    b.step(ev.StateReached(b.chain.genesis, STATE))
    for made in (heavy, light):
        b.step(ev.CertificateReceived(made, OTHERS[0]))
    b.step(ev.BlobHeld(ours.body.blob, ours.author))
    assert b.of(do.ApplyRecord)[0].certificate == heavy
    b.step(
        ev.MessageReceived(FakeSigner(PeerKey(sha256(b"owner"))).sign(Finalization(RUN, Round(0), light.record.digest)))
    )
    assert heavy.record.digest not in b.chain
    b.step(ev.StateReached(heavy.record.digest, Digest(sha256(b"cut off"))))
    assert [a.path[-1] for a in b.of(do.SyncState)] == [light]


def test_a_newcomer_hears_the_others_chain_before_it_loads_a_state():
    b = Bench(ready=False)
    b.machine = RoundMachine(POLICY, RUN, FakeSigner(ME), b.chain, now=0.0, blob_size=9)
    b.actions = b.machine.start(0.0)
    assert not b.of(do.SyncState) and b.said(Heartbeat)[0].phase == "joining"
    other = Bench()
    headers = [other.header(OTHERS[0])]
    made = certificate(other.record(OTHERS[0], headers), [OTHERS[0]])
    b.beat(OTHERS[0], head=made.record.digest, weight=10)
    assert [a.to for a in b.of(do.RequestChain)] == [OTHERS[0]]
    b.step(ev.ChainReceived((made,), None, OTHERS[0], False), 0.5)
    assert [a.path for a in b.of(do.SyncState)] == [(made,)]


def test_a_newcomer_loads_no_state_while_more_of_a_long_chain_still_comes():
    b = Bench(ready=False)
    b.machine = RoundMachine(POLICY, RUN, FakeSigner(ME), b.chain, now=0.0, blob_size=9)
    b.actions = b.machine.start(0.0)
    other = Bench()
    made = certificate(other.record(OTHERS[0], [other.header(OTHERS[0])]), [OTHERS[0]])
    b.beat(OTHERS[0], head=Digest(sha256(b"far on")), weight=1000)
    seconds = 2 * POLICY.heartbeat_seconds + POLICY.member_seconds
    b.now = seconds - 0.2
    b.beat(OTHERS[0], sequence=2, head=Digest(sha256(b"far on")), weight=1000)
    b.step(ev.ChainReceived((made,), None, OTHERS[0], True), seconds - 0.1)
    b.step(ev.Tick(), seconds + 0.1)
    assert not b.of(do.SyncState)
    b.now = seconds + POLICY.member_seconds - 0.5
    b.beat(OTHERS[0], sequence=3, head=Digest(sha256(b"far on")), weight=1000)
    b.step(ev.Tick(), seconds + POLICY.member_seconds)
    assert not b.of(do.SyncState) and [n.kind for n in b.of(do.Notice)] == ["left-behind"]
    b.step(ev.Tick(), seconds + 2 * POLICY.member_seconds)
    b.step(ev.Tick(), seconds + 2 * POLICY.member_seconds + 0.1)
    assert [a.path for a in b.of(do.SyncState)] == [(made,)], "whoever claimed more has gone"


def test_a_source_that_claims_much_and_gives_nothing_is_asked_less_and_less():
    b = Bench()
    asked = []
    for t in range(1, 240):
        b.now = t / 2
        b.beat(OTHERS[0], sequence=t, head=Digest(sha256(b"nothing")), weight=2**50)
        if b.of(do.RequestChain):
            asked.append(b.now)
            b.step(ev.ChainReceived((), None, OTHERS[0], True))
            assert not b.of(do.RequestChain)
    gaps = [y - x for x, y in zip(asked, asked[1:], strict=False)]
    assert 3 <= len(asked) <= 9 and gaps == sorted(gaps)


def test_leaving_announces_what_is_done_then_says_goodbye():
    b = Bench()
    b.step(ev.TrainingProgress(3, 1.0, 1.0))
    b.step(ev.Leave(), 1.0)
    assert b.of(do.RequestUpdate) and not b.of(do.Finished)
    b.step(ev.UpdateReady(b.chain.genesis, 0, 0, 3, 1, blob_of(ME), 9, 1.0))
    assert b.of(do.ApplyRecord) and not b.of(do.Finished)
    b.step(ev.StateReached(b.chain.head, Digest(sha256(b"next"))))
    assert b.said(Goodbye) and b.of(do.Finished)
    assert b.step(ev.Tick(), 50.0) == []


def test_leaving_does_not_wait_for_ever():
    b = Bench()
    b.beat(OTHERS[0])
    b.announce()
    b.step(ev.Leave(), 1.0)
    assert not b.of(do.Finished)
    b.step(ev.Tick(), b.machine.next_tick)
    while not b.of(do.Finished):
        b.beat(OTHERS[0], sequence=int(b.now * 1000))
        b.step(ev.Tick(), b.machine.next_tick)
    assert b.now <= 7.5 and b.said(Goodbye)


def test_an_observer_follows_and_says_nothing_but_heartbeats():
    b = Bench(observer=True)
    headers = [b.header(k) for k in OTHERS[:3]]
    for h in headers:
        b.step(ev.MessageReceived(h))
    made = certificate(b.record(OTHERS[0], headers), OTHERS[:3])
    b.step(ev.MessageReceived(made.record))
    for vote in made.votes:
        b.step(ev.MessageReceived(vote))
    assert b.of(do.StoreCertificate) and b.chain.head == made.record.digest
    assert not b.of(do.FetchBlob) and not b.of(do.ApplyRecord)
    assert b.said(Heartbeat)[-1].phase == "observing" and b.said(Heartbeat)[-1].admission == b""


def test_an_auditor_without_training_is_a_member_that_announces_nothing_and_serves_what_is_decided():
    b = Bench(observer=True, reporter=FakeSigner(OTHERS[9]))
    beat = b.machine.introduction(LocalStatus(admission=b"me")).body
    headers = [b.header(k) for k in OTHERS[:3]]
    b.step(ev.TrainingProgress(50, 1.0, 1.0))
    for h in headers:
        b.step(ev.MessageReceived(h))
        assert not b.of(do.RequestUpdate)
    assert (beat.phase, beat.admission, beat.windows, beat.state) == ("observing", b"me", 0, None)
    own, theirs = blob_of(ME, b"announced before it audited"), headers[0].body.blob
    for blob in (own, theirs):
        assert "no round is open here" in b.machine.serve_refusal(blob, OTHERS[0])
    made = certificate(b.record(OTHERS[0], headers), OTHERS[:3])
    b.step(ev.CertificateReceived(made, OTHERS[0]))
    assert not b.of(do.FetchBlob) and not b.said(Vote) and not b.said(RoundRecord)
    assert b.machine.serve_refusal(theirs, OTHERS[5]) is None and b.machine.serve_refusal(own, OTHERS[0])


def test_an_auditor_that_catches_up_checks_records_once_it_has_joined_the_newest_first():
    owner = FakeSigner(OTHERS[9])
    policy = replace(POLICY, audit=AuditRule(owner=owner.key))
    b = Bench(observer=True, reporter=owner, policy=policy, alone=False)
    first = certificate(b.record(OTHERS[0], [b.header(OTHERS[0])]), OTHERS[:1])
    b.step(ev.CertificateReceived(first, OTHERS[0]))
    made = [first]
    for n in (1, 2):
        assert b.chain.head == made[-1].digest and not b.of(do.AuditUpdate)
        if n == 2:
            b.step(ev.Tick(), 10.0)
        h = b.header(
            OTHERS[0],
            20,
            b"%d" % n,
            round=Round(n),
            parent=made[-1].digest,
            first_window=10 * n,
            end_window=10 * n + 10,
        )
        body = RoundRecord(RUN, Round(n), made[-1].digest, STATE, 0, (h,))
        made.append(certificate(FakeSigner(OTHERS[0]).sign(body), OTHERS[:1]))
        b.step(ev.CertificateReceived(made[-1], OTHERS[0]))
    assert [(a.certificate.digest, a.check) for a in b.of(do.AuditUpdate)] == [
        (record.digest, "replay") for record in reversed(made)
    ]


def test_an_auditor_keeps_what_it_signed_by_the_owners_key_while_another_branch_leads():
    owner = FakeSigner(OTHERS[9])
    policy = replace(POLICY, audit=AuditRule(owner=owner.key))
    b = Bench(observer=True, reporter=owner, policy=policy, alone=False)
    first = certificate(b.record(OTHERS[0], [b.header(OTHERS[0])]), OTHERS[:1])
    b.step(ev.CertificateReceived(first, OTHERS[0]))
    b.step(ev.Tick(), 10.0)
    h = b.header(OTHERS[0], 20, round=Round(1), parent=first.digest, first_window=10, end_window=20)
    second = FakeSigner(OTHERS[0]).sign(RoundRecord(RUN, Round(1), first.digest, STATE, 0, (h,)))
    b.step(ev.CertificateReceived(certificate(second, OTHERS[:1]), OTHERS[0]))
    asked = b.of(do.AuditUpdate)[0]
    scores = (Score("signs", 0.5, 0.97),)
    b.step(ev.UpdateAudited(asked.certificate.digest, asked.update, asked.check, asked.seed, scores))
    assert b.said(WorkReport) and b.machine.sizes()["work reports"][0] == 1
    rival = certificate(b.record(OTHERS[1], [b.header(key) for key in OTHERS[1:4]]), OTHERS[1:4])
    b.step(ev.CertificateReceived(rival, OTHERS[1]))
    b.step(ev.Tick(), 20.0)
    assert b.chain.head == rival.digest and b.machine.sizes()["work reports"][0] == 1


def test_no_round_waits_for_a_member_that_only_follows():
    b = Bench()
    b.beat(OTHERS[0], phase="observing", windows=0)
    b.announce()
    assert len(b.machine.summary(b.now).members) == 1 and not b.machine.summary(b.now).awaited
    b = Bench()
    b.beat(OTHERS[0])
    b.announce()
    assert b.machine.summary(b.now).awaited == (OTHERS[0],)


def test_messages_of_the_next_round_that_come_early_are_kept():
    b = Bench()
    b.announce()
    head = b.chain.head
    early = b.header(OTHERS[0], round=Round(1), parent=head)
    b.step(ev.MessageReceived(early))
    b.step(ev.StateReached(head, STATE))
    assert b.machine.summary(0).headers == (early,)


def test_the_run_ends_at_its_total():
    b = Bench(
        policy=RoundPolicy(**{**{f: getattr(POLICY, f) for f in POLICY.__dataclass_fields__}, "total_windows": 25})
    )
    b.announce()
    b.step(ev.StateReached(b.chain.head, Digest(sha256(b"next"))))
    assert [a.reason for a in b.of(do.RunCompleted)] and not b.of(do.Finished)
    b.step(ev.TrainingProgress(50, 1.0, 1.0))
    assert not b.of(do.RequestUpdate)


def test_a_lost_trainer_is_given_its_state_again():
    b = Bench()
    b.announce(25)
    b.step(ev.StateReached(b.chain.head, STATE))
    b.step(ev.SyncFailed(b.chain.head, "the trainer died"), 1.0)
    assert not b.of(do.SyncState)
    resyncs = []
    while not resyncs and b.now < 20:
        b.step(ev.Tick(), b.machine.next_tick)
        for a in b.of(do.FetchBlob):
            b.step(ev.BlobHeld(a.blob, a.author))
        resyncs = b.of(do.SyncState)
    assert resyncs[0].path[-1].record.digest == b.chain.head and b.now < 5


def test_people_hear_that_nobody_gives_a_final_update_only_after_a_long_wait_and_once():
    b = Bench()
    record = certificate(b.record(OTHERS[0], [b.header(OTHERS[0], 5)]), [OTHERS[0]])
    final = FakeSigner(PeerKey(sha256(b"owner"))).sign(Finalization(RUN, Round(0), record.record.digest))
    b.step(ev.CertificateReceived(record, OTHERS[0]))
    b.step(ev.MessageReceived(final))
    heard = []
    while b.now < 30 * POLICY.patience_seconds:
        b.step(ev.Tick(), b.machine.next_tick)
        heard += [b.now for r in b.of(do.Notice) if r.kind == "unavailable"]
    assert len(heard) == 1 and heard[0] >= 10 * POLICY.patience_seconds


def test_who_is_on_a_rival_of_what_is_final_is_told_and_asks_for_it_however_light_it_is():
    owner = FakeSigner(PeerKey(sha256(b"owner")))
    b = Bench()
    light, heavy = b.header(OTHERS[0], 5), b.header(OTHERS[1], 50)
    final_record = certificate(b.record(OTHERS[0], [light]), [OTHERS[0]])
    rival = certificate(b.record(OTHERS[1], [heavy]), [OTHERS[1]])
    final = owner.sign(Finalization(RUN, Round(0), final_record.record.digest))
    b.step(ev.CertificateReceived(final_record, OTHERS[0]))
    b.step(ev.MessageReceived(final))
    assert b.of(do.StoreFinalization) == [do.StoreFinalization(final, awaited=False)]
    b.step(ev.CertificateReceived(rival, OTHERS[1]))
    assert [(a.to, a.messages) for a in b.of(do.Send)] == [(OTHERS[1], (final,))]
    told = Bench()
    told.step(ev.CertificateReceived(rival, OTHERS[1]))
    told.beat(OTHERS[0], head=final_record.record.digest, weight=5)
    told.step(ev.MessageReceived(final), 2.0)
    assert [a.to for a in told.of(do.RequestChain)] == [OTHERS[0]]
    told.step(ev.ChainReceived((final_record,), final, OTHERS[0], False))
    assert told.chain.head == final_record.record.digest
    assert told.of(do.StoreFinalization)[-1] == do.StoreFinalization(final, awaited=False), "it is in force now"


def test_a_chain_that_a_banned_peer_began_alone_is_followed_up_to_what_is_final():
    owner = FakeSigner(PeerKey(sha256(b"owner")))
    b = Bench(ready=False)
    made = certificate(b.record(OTHERS[0], [b.header(OTHERS[0], 5)]), [OTHERS[0]])
    final = owner.sign(Finalization(RUN, Round(0), made.digest))
    ban = owner.sign(Directive(RUN, 1, banned=(OTHERS[0],)))
    b.step(ev.ChainReceived((made,), final, OTHERS[1], False, ban))
    assert b.chain.head == made.digest and b.chain.finalization == final


def test_a_peer_leaves_the_records_that_a_banned_peer_certified_alone():
    owner = FakeSigner(PeerKey(sha256(b"owner")))
    b = Bench()
    made = certificate(b.record(OTHERS[0], [b.header(OTHERS[0], 5)]), [OTHERS[0]])
    b.step(ev.CertificateReceived(made, OTHERS[0]))
    assert made.digest in b.chain
    b.step(ev.MessageReceived(owner.sign(Directive(RUN, 1, banned=(OTHERS[0],)))))
    assert b.chain.head == b.chain.genesis and made.digest not in b.chain
    b.step(ev.CertificateReceived(made, OTHERS[1]))
    assert made.digest not in b.chain and [a.to for a in b.of(do.Send)] == [OTHERS[1]]
