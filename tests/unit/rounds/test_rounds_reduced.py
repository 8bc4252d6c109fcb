"""The round machine in rounds that are reduced: one machine, hand-made events, and the actions that follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.merkle import CHUNK
from protocol.messages import Finalization, Goodbye, RoundRecord, ShardAttestation, UpdateHeader, Vote, shards_digest
from protocol.reduce_plan import ReducePlan
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.future_messages import FutureMessages
from protocol.rounds.own_updates import OwnUpdates
from protocol.rounds.reduced_exchange import ReducedExchange
from protocol.rounds.round_state import RECORDS_PER_AUTHOR, proposer_order
from tests.simulation.signer import FakeSigner, certificate
from tests.support.rounds_bench import ME, OTHERS, POLICY, RUN, Bench, blob_of

THREE = replace(POLICY, exchange=ReducePlan("reduce", committee=3, update_size=8 * CHUNK, mean_size=CHUNK))
"""Committees of three: in a round of three everybody is in each of the three committees."""


def shard_blob(i: int, label: bytes = b"") -> Digest:
    return Digest(sha256(b"shard", bytes([i]), label))


class Reducing(Bench):
    """A machine that has announced with others, and knows a proposal that lists them."""

    def __init__(self, others=2, *, policy=THREE):
        super().__init__(policy=policy)
        self.others = OTHERS[:others]
        for key in self.others:
            self.beat(key)
        self.announce()
        self.headers = [self.header(key) for key in self.others]
        for h in self.headers:
            self.step(ev.MessageReceived(h))
        self.seen = list(self.actions)

    def step(self, event, now=None):
        super().step(event, now)
        self.seen = [*getattr(self, "seen", []), *self.actions]
        return self.actions

    def propose(self, attempt=0, by=None, headers=None):
        """Return a record that the machine knows: one of the others, or ours if it was our turn."""
        mine = [p for p in self.proposed() if p.body.attempt == attempt]
        if mine and by is None:
            return mine[0]
        ranks = proposer_order(self.chain.seed(self.chain.genesis), (ME, *self.others))
        by = by or ranks[attempt % len(ranks)]
        record = self.record(by, headers or [self.mine, *self.headers], attempt)
        self.step(ev.MessageReceived(record))
        return record

    def proposed(self):
        return [
            a.message for a in self.seen if isinstance(a, do.Broadcast) and isinstance(a.message.body, RoundRecord)
            and a.message.author == ME
        ]  # fmt: skip

    def all_of(self, kind):
        return [a for a in self.seen if isinstance(a, kind)]

    def all_said(self, body):
        return [m for m in (a.message for a in self.all_of(do.Broadcast)) if isinstance(m.body, body)]

    def attest(self, by, record, i, blob=None, lacking=()):
        body = ShardAttestation(
            RUN, record.body.round, record.digest, i, None if lacking else blob or shard_blob(i), tuple(lacking)
        )
        return self.step(ev.MessageReceived(FakeSigner(by).sign(body)))

    def reduce_all(self, record, blobs=None):
        """Make every shard that the machine ordered, as our driver does."""
        for action in self.all_of(do.ReduceShard):
            if action.record.digest == record.digest:
                blob = shard_blob(action.shard) if blobs is None else blobs[action.shard]
                self.step(ev.ShardReduced(record.digest, action.shard, blob))


def committees(chain, record):
    """Return the committee of each shard of a proposed record's mean."""
    return THREE.exchange.committees(chain.seed(record.body.parent), record.body)


def test_a_lone_peer_reduces_its_own_update():
    b = Reducing(0)
    (duty,) = b.of(do.ReduceShard) or b.all_of(do.ReduceShard)
    assert duty.committee == (ME,) and duty.shard == 0
    assert not b.all_said(Vote)
    b.step(ev.ShardReduced(duty.record.digest, 0, shard_blob(0)))
    (kept,) = b.of(do.StoreCertificate)
    assert kept.certificate.shards == (shard_blob(0),)
    assert kept.certificate.votes[0].body.shards_digest == shards_digest((shard_blob(0),))
    assert b.of(do.ApplyRecord)[0].certificate == kept.certificate


def test_nobody_fetches_whole_updates_nor_waits_for_them():
    b = Reducing()
    assert not b.all_of(do.FetchBlob)
    record = b.propose()
    assert [len(a.record.body.updates) for a in b.all_of(do.ReduceShard)] == [3, 3, 3]
    assert {a.shard for a in b.all_of(do.ReduceShard)} == {0, 1, 2} and all(
        a.record == record for a in b.all_of(do.ReduceShard)
    )


def test_a_vote_needs_every_shard_from_more_than_half_of_its_committee():
    b = Reducing()
    record = b.propose()
    b.reduce_all(record)
    assert [m.body.blob for m in b.all_said(ShardAttestation)] == [shard_blob(i) for i in range(3)] and not b.all_said(
        Vote
    )
    for i in range(2):
        b.attest(OTHERS[0], record, i)
    assert not b.all_said(Vote)
    b.attest(OTHERS[0], record, 2)
    (vote,) = b.all_said(Vote)
    assert vote.body.shards_digest == shards_digest([shard_blob(i) for i in range(3)])


def test_a_shard_of_others_is_fetched_from_those_who_signed_it():
    b = Reducing()
    record = b.propose()
    for key in b.others:
        for i in range(3):
            b.attest(key, record, i)
    assert not b.all_of(do.FetchShard)  # our own are under way
    b.step(ev.Tick(), b.now + THREE.propose_seconds)
    fetched = {a.shard: a for a in b.all_of(do.FetchShard)}
    assert set(fetched) == {0, 1, 2} and not b.all_said(Vote)
    assert all(a.blob == shard_blob(i) and set(a.holders) == set(b.others) for i, a in fetched.items())
    for i in range(3):
        b.step(ev.BlobHeld(shard_blob(i), None))
    assert len(b.all_said(Vote)) == 1


def test_votes_certify_with_the_shards_that_they_name_and_with_no_others():
    b = Reducing()
    record = b.propose()
    right, wrong = tuple(shard_blob(i) for i in range(3)), (shard_blob(0), shard_blob(1), shard_blob(9))
    for key, shards in zip(b.others, (wrong, right), strict=True):
        b.step(
            ev.MessageReceived(FakeSigner(key).sign(Vote(RUN, record.body.round, record.digest, shards_digest(shards))))
        )
    b.reduce_all(record)
    for i in range(3):
        b.attest(OTHERS[0], record, i)
    assert b.all_said(Vote) and not b.all_of(do.StoreCertificate)  # two of three votes name these shards
    good = Vote(RUN, record.body.round, record.digest, shards_digest([shard_blob(i) for i in range(3)]))
    b.step(ev.MessageReceived(FakeSigner(b.others[0]).sign(good)))
    (kept,) = b.all_of(do.StoreCertificate)
    assert kept.certificate.shards == tuple(shard_blob(i) for i in range(3)) and len(kept.certificate.votes) == 3


def test_votes_without_shards_do_not_count():
    b = Reducing()
    record = b.propose()
    for key in b.others:
        b.step(ev.MessageReceived(FakeSigner(key).sign(Vote(RUN, record.body.round, record.digest))))
    b.reduce_all(record)
    for i in range(3):
        b.attest(OTHERS[0], record, i)
    assert b.all_said(Vote) and not b.all_of(do.StoreCertificate)
    assert b.machine.summary(b.now).votes == 1


def test_attestations_and_votes_that_come_before_the_proposal_count():
    b = Reducing()
    ranks = proposer_order(b.chain.seed(b.chain.genesis), (ME, *b.others))
    attempt = next(i for i in range(3, 9) if ranks[i % 3] != ME)
    record = b.record(ranks[attempt % 3], [b.mine, *b.headers], attempt)
    shards = tuple(shard_blob(i) for i in range(3))
    for key in b.others:
        for i in range(3):
            b.attest(key, record, i)
        b.step(
            ev.MessageReceived(FakeSigner(key).sign(Vote(RUN, record.body.round, record.digest, shards_digest(shards))))
        )
    b.now += 2 * THREE.exchange_seconds  # our own proposals are abandoned by now
    b.step(ev.MessageReceived(record))
    for i in range(3):
        b.step(ev.ShardReduced(record.digest, i, shard_blob(i)))
    assert [a.certificate.record for a in b.all_of(do.StoreCertificate)] == [record]


def test_an_author_whose_slices_most_of_a_committee_cannot_get_is_left_out_of_the_next_proposal():
    b = Reducing(3)
    record = b.propose()
    lost = OTHERS[2]
    seats = committees(b.chain, record)
    i, committee = next((i, c) for i, c in enumerate(seats) if ME in c and lost in c)
    b.step(ev.ShardUnavailable(record.digest, i, (lost,)))
    (attestation,) = [m for m in b.all_said(ShardAttestation) if m.body.shard == i]
    assert attestation.body.missing == (lost,) and attestation.body.blob is None
    other = next(k for k in committee if k not in (ME, lost))
    b.attest(other, record, i, lacking=(lost,))
    assert [a.record for a in b.of(do.CancelReduce)] == [record.digest]
    assert [r.about for r in b.of(do.Notice) if r.kind == "withheld"] == [lost]
    while not (later := [p for p in b.proposed() if p.body.attempt > 0]):
        b.step(ev.Tick(), b.machine.next_tick)
    assert lost not in later[0].body.contributors and ME in later[0].body.contributors
    assert b.now < THREE.exchange_seconds + 4 * THREE.propose_seconds


def test_one_attestation_of_a_committee_blames_nobody():
    b = Reducing(3)
    record = b.propose()
    for i, committee in enumerate(committees(b.chain, record)):
        liar = next(k for k in committee if k != ME)
        b.attest(liar, record, i, lacking=[k for k in sorted((ME, *b.others)) if k != liar])
    assert not b.of(do.CancelReduce) and not [r for r in b.all_of(do.Notice) if r.kind == "withheld"]


def test_a_proposal_without_attestations_is_given_up_after_the_exchange_and_the_silent_are_left_out():
    b = Reducing()
    record = b.propose()
    b.reduce_all(record)
    for i in range(3):
        b.attest(OTHERS[0], record, i, blob=shard_blob(i, b"else"))
    assert {r.about for r in b.all_of(do.Notice) if r.kind == "shard-differs"} == {OTHERS[0]}
    while not b.all_of(do.CancelReduce):
        b.step(ev.Tick(), b.machine.next_tick)
    assert b.now <= THREE.exchange_seconds + 1e-6
    while not (later := [p for p in b.proposed() if p.body.attempt > 0]):
        b.beat(OTHERS[1], sequence=int(b.now * 1000) + 10)
        b.step(ev.Tick(), b.machine.next_tick)
    assert later[0].body.contributors == (ME,)


def test_who_signs_two_digests_of_a_shard_is_reported_and_only_the_first_counts():
    b = Reducing()
    record = b.propose()
    b.attest(OTHERS[0], record, 0, blob=shard_blob(0, b"else"))
    b.attest(OTHERS[0], record, 0)
    assert [(r.kind, r.about) for r in b.of(do.Notice)] == [("equivocation", OTHERS[0])]
    b.attest(OTHERS[0], record, 0, blob=shard_blob(0, b"third"))
    assert not b.of(do.Notice)
    b.reduce_all(record)
    for i in (1, 2):
        b.attest(OTHERS[1], record, i)
    assert not b.all_said(Vote)
    b.attest(OTHERS[1], record, 0)
    assert b.all_said(Vote)


def test_attestations_of_those_without_a_seat_do_not_count():
    b = Reducing(5)
    record = b.propose()
    for i, committee in enumerate(committees(b.chain, record)):
        for key in (*b.others, *OTHERS[10:14]):
            if key not in committee:
                b.attest(key, record, i, blob=shard_blob(i, b"lie"))
                b.attest(key, record, 60, blob=shard_blob(i, b"lie"))
    assert b.machine.sizes()["attestation bytes"][0] == 0


def test_a_bad_slice_is_said_to_be_lacking_and_its_author_is_excluded():
    b = Reducing()
    record = b.propose()
    b.step(ev.BlobInvalid(b.headers[0].body.blob, "scales"))
    assert {(m.body.shard, m.body.missing) for m in b.all_said(ShardAttestation)} == {
        (i, (OTHERS[0],)) for i in range(3)
    }
    assert OTHERS[0] in [r.about for r in b.of(do.Notice) if r.kind == "bad-blob"]
    assert [a.record for a in b.of(do.CancelReduce)] == [record.digest]


def test_a_record_that_was_certified_with_shards_stands_although_it_lists_a_bad_update():
    b = Reducing()
    record = b.propose()
    made = certificate(record, [ME, *b.others], tuple(shard_blob(i) for i in range(3)))
    b.step(ev.CertificateReceived(made, OTHERS[0]))
    b.step(ev.BlobInvalid(b.headers[0].body.blob, "scales"))
    assert b.chain.head == made.digest
    b.step(ev.BlobInvalid(shard_blob(1), "scales"))
    assert [r.kind for r in b.of(do.Notice) if r.level == "error"] == ["bad-record"]
    assert b.chain.head == b.chain.genesis


def test_an_update_is_no_shard_and_a_record_whose_mean_it_should_be_is_not_applied():
    b = Reducing()
    record = b.propose()
    made = certificate(record, [ME, *b.others], (shard_blob(0), shard_blob(1), blob_of(ME)))
    b.step(ev.CertificateReceived(made, OTHERS[0]))
    for i in range(2):
        b.step(ev.BlobHeld(shard_blob(i), None))
    assert not b.of(do.ApplyRecord) and b.machine.phase != "left"
    b.step(ev.Tick(), b.now + 1)
    assert not b.of(do.ApplyRecord)


def test_an_own_update_that_a_record_lists_as_anothers_counts_as_missed():
    b = Bench(policy=THREE)
    own = OwnUpdates(ME)
    own.made(blob_of(ME), b.chain.genesis, 0)
    thief = b.header(OTHERS[0], blob=blob_of(ME))
    made = certificate(b.record(OTHERS[0], [thief]), OTHERS[:1], (shard_blob(0),))
    assert b.chain.add(made)
    assert own.plan_move(b.chain, b.chain.genesis, made.digest) == ((blob_of(ME),), ())


def test_whose_slices_a_member_needs_follows_from_the_proposals_that_are_worked_on():
    b = Reducing(4, policy=replace(THREE, exchange=replace(THREE.exchange, committee=1)))
    record, blob = b.propose(), b.headers[0].body.blob
    (duty,) = b.all_of(do.ReduceShard)
    assert b.machine.duties_of(blob, ME) == [(record, duty.shard, (ME,))]
    assert all(len(b.machine.duties_of(blob, key)) == 1 for key in b.others)
    assert not b.machine.duties_of(blob, OTHERS[-1]) and not b.machine.duties_of(shard_blob(0), ME)
    b.step(ev.Tick(), b.now + THREE.exchange_seconds + 1)  # given up
    assert all(r != record for r, _, _ in b.machine.duties_of(blob, ME))


def test_a_record_with_two_means_is_two_branches_and_who_holds_the_lighter_one_moves():
    b = Bench(policy=THREE)
    liar, record = OTHERS[0], b.record(OTHERS[0], [b.header(OTHERS[0])])
    means = [certificate(record, [liar], (shard_blob(0, label),)) for label in (b"a", b"b")]
    ours, theirs = sorted(means, key=lambda c: c.digest)
    b.step(ev.CertificateReceived(ours, liar))
    b.step(ev.BlobHeld(ours.shards[0], None))
    b.step(ev.StateReached(ours.digest, Digest(sha256(b"ours"))))
    b.step(ev.CertificateReceived(theirs, liar))
    assert [(r.kind, r.about) for r in b.of(do.Notice)] == [("equivocation", liar)]
    assert b.chain.head == ours.digest and theirs.digest in b.chain and not b.of(do.FetchShard)
    after = Round(1), theirs.digest, Digest(sha256(b"theirs"))
    child = b.header(liar, round=after[0], parent=after[1], base_state=after[2], first_window=10, end_window=20)
    second = certificate(FakeSigner(liar).sign(RoundRecord(RUN, *after, 0, (child,))), [liar], (shard_blob(0, b"c"),))
    b.step(ev.CertificateReceived(second, liar))
    assert b.chain.head == second.digest
    assert [a.blob for a in b.of(do.FetchShard)] == [*theirs.shards, *second.shards]
    for blob in (*theirs.shards, *second.shards):
        assert not b.of(do.SyncState)
        b.step(ev.BlobHeld(blob, None))
    assert b.of(do.SyncState)[0].path == (theirs, second)


def test_a_bad_shard_drops_the_mean_that_has_it_not_the_record_with_another():
    b = Bench(policy=THREE)
    record = b.record(OTHERS[0], [b.header(OTHERS[0])])
    means = [certificate(record, [OTHERS[0]], (shard_blob(0, label),)) for label in (b"a", b"b")]
    good, bad = sorted(means, key=lambda c: c.digest, reverse=True)
    for made in (good, bad):
        b.step(ev.CertificateReceived(made, OTHERS[0]))
    assert b.chain.head == bad.digest
    b.step(ev.BlobInvalid(bad.shards[0], "scales"))
    assert b.chain.head == good.digest and bad.digest not in b.chain


def test_a_certificates_shards_are_fetched_from_its_voters_and_applied():
    b = Reducing()
    record = b.propose()
    made = certificate(record, [ME, *b.others], tuple(shard_blob(i) for i in range(3)))
    b.step(ev.CertificateReceived(made, OTHERS[0]))
    fetched = b.of(do.FetchShard)
    assert [a.blob for a in fetched] == list(made.shards) and all(set(a.holders) == set(b.others) for a in fetched)
    assert [a.record for a in b.of(do.CancelReduce)] == [record.digest]
    for i in range(3):
        assert not b.of(do.ApplyRecord)
        b.step(ev.BlobHeld(shard_blob(i), None))
    assert b.of(do.ApplyRecord)[0].certificate == made and b.of(do.ApplyRecord)[0].missed == ()


def test_updates_and_shards_are_served_only_to_those_who_announced():
    b = Reducing()
    record = b.propose()
    b.reduce_all(record)
    for blob in (blob_of(ME), b.headers[0].body.blob, shard_blob(0)):
        assert b.machine.serve_refusal(blob, OTHERS[0]) is None
        assert "not announced" in b.machine.serve_refusal(blob, OTHERS[7])


@pytest.mark.parametrize("shards", [(), (shard_blob(0),), tuple(shard_blob(i) for i in range(4))])
def test_a_certificate_with_other_shards_than_the_mode_asks_for_is_refused(shards):
    b = Reducing()
    record = b.propose()
    b.step(ev.CertificateReceived(certificate(record, [ME, *b.others], shards), OTHERS[0]))
    assert [r.kind for r in b.of(do.Notice)] == ["refused"] and b.chain.head == b.chain.genesis


def test_attestations_are_bounded_whatever_is_sent():
    b = Reducing(5)
    record = b.propose()
    for n in range(300):
        for key in b.others:
            b.attest(key, replace(record, digest=Digest(sha256(b"unknown", bytes([n % 256, n // 256])))), n % 8)
            b.attest(key, record, n % 8, blob=shard_blob(n % 8, bytes([n % 256])))
    sizes = b.machine.sizes()
    assert all(size <= bound for size, bound in sizes.values()), sizes
    assert sizes["early attestations"][0] > 0


def test_a_leaver_stays_longer_since_committees_need_its_update():
    b = Reducing()
    b.propose()
    b.step(ev.Leave(), 1.0)
    while not b.of(do.Finished):
        assert b.now < 1.0 + ReducedExchange.leave_seconds
        b.step(ev.Tick(), b.machine.next_tick)
    assert b.now == 1.0 + ReducedExchange.leave_seconds and b.said(Goodbye)


def test_auto_gathers_after_few_contributors():
    auto = replace(THREE, exchange=ReducePlan("auto", committee=3, update_size=8 * CHUNK, mean_size=CHUNK))
    b = Bench(policy=auto)
    b.announce()
    assert (
        b.said(Vote)[0].shards_digest is None
        and b.of(do.ApplyRecord)[0].certificate.shards == ()
        and not b.of(do.ReduceShard)
    )
    assert b.said(UpdateHeader)


def test_who_does_not_take_part_hears_whom_committees_cannot_get_and_follows_what_is_certified_without():
    b = Bench(policy=THREE)
    for key in OTHERS[:4]:
        b.beat(key)
    huge = b.header(OTHERS[3], 50)
    headers = [b.header(key) for key in OTHERS[:3]]
    for h in (huge, *headers):
        b.step(ev.MessageReceived(h))
    proposal = b.record(OTHERS[0], [huge, *headers])
    b.step(ev.MessageReceived(proposal))
    where, committee = next((i, c) for i, c in enumerate(committees(b.chain, proposal)) if OTHERS[3] in c)
    for key in committee:
        if key != OTHERS[3]:
            attestation = ShardAttestation(RUN, proposal.body.round, proposal.digest, where, None, (OTHERS[3],))
            b.step(ev.MessageReceived(FakeSigner(key).sign(attestation)))
    assert [r.about for r in b.of(do.Notice)] == [OTHERS[3]]
    made = certificate(b.record(OTHERS[1], headers, attempt=1), OTHERS[:3], tuple(shard_blob(i) for i in range(3)))
    b.step(ev.CertificateReceived(made, OTHERS[1]))
    # 30 windows of 80 that were announced, but of 30 that count: not held back as too light.
    assert b.chain.head == made.digest and len(b.of(do.FetchShard)) == 3


def test_attestations_of_a_round_to_come_are_kept_and_push_out_no_header():
    b = Bench(policy=THREE)
    early = FutureMessages(THREE.max_members)
    header = b.header(OTHERS[0], round=Round(1))
    early.keep(header, trusted=True)
    for i in range(50):
        attestation = ShardAttestation(RUN, Round(1), Digest(sha256(bytes([i]))), 0, shard_blob(i))
        early.keep(FakeSigner(OTHERS[0]).sign(attestation), trusted=True)
    kept = early.pop(1)
    assert kept[0] == header and len(kept) == 13
    assert all(size <= bound for size, bound in early.sizes().values())


def test_a_branch_that_nobody_gave_is_asked_for_again_and_is_the_head_when_it_is_here():
    b = Bench(policy=THREE)
    made = certificate(b.record(OTHERS[0], [b.header(OTHERS[0], 30)]), [OTHERS[0]], (shard_blob(0),))
    b.step(ev.CertificateReceived(made, OTHERS[0]))
    asked = [shard_blob(0)]
    assert b.chain.head == made.digest
    while b.chain.head == made.digest:
        b.step(ev.Tick(), b.machine.next_tick)
    set_aside, dropped = b.now, 0
    while dropped < 2:  # given up twice more, and left alone between
        b.step(ev.Tick(), b.machine.next_tick)
        asked += [a.blob for a in b.of(do.FetchShard)]
        dropped += len(b.of(do.CancelFetch))
        assert b.chain.head == b.chain.genesis
    patience = THREE.patience_seconds
    assert b.now - set_aside == pytest.approx(4 * patience, abs=2) and len(asked) >= 3
    b.step(ev.Tick(), b.now + 0.5)
    assert not b.of(do.FetchShard)
    b.beat(OTHERS[0], head=made.digest, weight=30)  # a member comes that stands on it
    assert [a.blob for a in b.of(do.FetchShard)] == [shard_blob(0)] and b.chain.head == b.chain.genesis
    b.step(ev.BlobHeld(shard_blob(0), None))
    assert b.chain.head == made.digest and b.of(do.ApplyRecord)


def test_a_shard_of_a_record_that_its_author_pushed_out_can_fail():
    """An author pushes out its own current record by four others, while the node is still missing an update for it."""
    b = Reducing(3)
    author = next(key for key in proposer_order(b.chain.seed(b.chain.genesis), (ME, *b.others)) if key != ME)
    record = b.record(author, [b.mine, *b.headers], 0)
    b.step(ev.MessageReceived(record))
    while not (asked := [a for a in b.all_of(do.ReduceShard) if a.record.digest == record.digest]):
        assert b.now < THREE.exchange_seconds
        b.step(ev.Tick(), b.machine.next_tick)
    for attempt in range(1000, 1000 + RECORDS_PER_AUTHOR):
        b.step(ev.MessageReceived(b.record(author, [b.mine, *b.headers], attempt)))
    round_ = b.machine.open_round
    assert round_ is not None and record.digest not in round_.proposals
    b.step(ev.ShardUnavailable(record.digest, asked[0].shard, b.others))
    assert not b.said(ShardAttestation)


def test_a_shard_of_a_round_that_was_cut_off_the_tree_is_not_attested():
    b = Reducing(0)
    (duty,) = b.all_of(do.ReduceShard)
    b.step(ev.ShardReduced(duty.record.digest, 0, shard_blob(0)))
    first = b.of(do.ApplyRecord)[0].certificate
    b.step(ev.StateReached(first.digest, Digest(sha256(b"next"))))
    b.step(ev.TrainingProgress(25, 1.0, 1.0))
    b.step(ev.UpdateReady(first.digest, 25, 25, 50, 5, blob_of(ME, b"second"), 9, 1.0))
    second = b.all_of(do.ReduceShard)[-1]
    assert second.record.body.parent == first.digest
    record = b.record(OTHERS[0], [b.header(OTHERS[0], 30)])
    rival = certificate(record, [OTHERS[0]], (shard_blob(9),))
    b.step(ev.CertificateReceived(rival, OTHERS[0]))
    owner = FakeSigner(PeerKey(sha256(b"owner")))
    b.step(ev.MessageReceived(owner.sign(Finalization(RUN, Round(0), rival.digest))))
    assert first.digest not in b.chain and b.of(do.CancelReduce) == [do.CancelReduce(second.record.digest)]
    b.step(ev.ShardReduced(second.record.digest, 0, shard_blob(1)))
    assert not b.said(ShardAttestation) and not b.of(do.StoreCertificate)
