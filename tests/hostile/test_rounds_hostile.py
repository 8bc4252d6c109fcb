"""Floods of the round machine, with made-up keys or a few admitted ones, keep out no other peer's message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.bounded import BoundedDict
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import Directive, RoundRecord, Vote, shards_digest
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.chain_sync import MAX_STRANGER_CLAIMS, ChainSync
from protocol.rounds.deadlines import Deadlines
from protocol.rounds.future_messages import MAX_STRANGER_BYTES, FutureMessages
from protocol.rounds.members import LAST_BEATS
from protocol.rounds.round_state import MAX_RECORDS, RECORDS_PER_AUTHOR, proposer_order
from protocol.stake import StakeRule
from tests.simulation.signer import FakeSigner, certificate
from tests.support.rounds_bench import ME, OTHERS, POLICY, RUN, STATE, Bench

MEMBER = OTHERS[0]
OWNER = PeerKey(sha256(b"owner"))


def stranger(i: int) -> PeerKey:
    return PeerKey(sha256(b"stranger", i.to_bytes(4, "big")))


def head(label: str) -> Digest:
    return Digest(sha256(label.encode()))


def three_announced():
    """We, a liar and another have announced, and all is held: also their headers, and the order of the turns."""
    b = Bench()
    liar, other = OTHERS[1], OTHERS[2]
    theirs = [b.header(liar), b.header(other)]
    for key in (liar, other):
        b.beat(key)
    b.announce()
    b.hold(*theirs)
    ranks = proposer_order(b.chain.seed(b.chain.genesis), (ME, liar, other))
    return b, liar, other, theirs, ranks


def test_strangers_who_claim_chains_keep_no_member_from_being_asked():
    b = Bench()
    for i in range(400):
        b.beat(stranger(i), head=head(f"none {i}"), admission=b"")
        assert not b.of(do.RequestChain)
    b.beat(MEMBER, head=head("the chain"), weight=100)
    b.step(ev.Tick(), 1.0)
    assert [a.to for a in b.of(do.RequestChain)] == [MEMBER]
    held, bound = b.machine.sizes()["claims"]
    assert held == MAX_STRANGER_CLAIMS + 1 <= bound


def test_members_are_asked_before_strangers_however_much_these_claim():
    b = Bench()
    for i in range(30):
        b.beat(stranger(i), head=head(f"none {i}"), weight=2**50, admission=b"")
    b.beat(MEMBER, head=head("the chain"), weight=100)
    asked = []
    for t in range(2, 400):
        b.now = t / 4
        b.beat(MEMBER, sequence=t, head=head("the chain"), weight=100)
        while b.of(do.RequestChain):
            asked += [a.to for a in b.of(do.RequestChain)]
            b.step(ev.ChainUnanswered(asked[-1]))
    assert asked[0] == MEMBER and asked.count(MEMBER) >= 3 and len(set(asked)) > 1, "strangers too, in their turn"


def test_a_stranger_that_is_silent_makes_room_for_another():
    chain, sync = Bench().chain, ChainSync(100, 1.0, ME)
    for i in range(MAX_STRANGER_CLAIMS):
        sync.claim(stranger(i), head("x"), chain, 0.0, member=False)
    sync.claim(stranger(99), head("y"), chain, 0.0, member=False)
    assert stranger(99) not in sync.wanted(chain)
    sync.claim(stranger(99), head("y"), chain, 60.0, member=False)
    assert stranger(99) in sync.wanted(chain) and len(sync.wanted(chain)) == MAX_STRANGER_CLAIMS


def test_a_stranger_that_was_asked_in_vain_makes_room_for_another():
    chain, sync = Bench().chain, ChainSync(100, 1.0, ME)
    for i in range(MAX_STRANGER_CLAIMS):
        sync.claim(stranger(i), head(f"none {i}"), chain, 0.0, member=False)
    asked = sync.next_request(chain, Deadlines(1.0), eager=False)
    assert asked is not None
    sync.failed(asked, 1.0)
    sync.claim(stranger(99), head("the chain"), chain, 1.0, member=False)
    assert stranger(99) in sync.wanted(chain) and asked not in sync.wanted(chain)


def test_who_always_skips_to_its_own_turn_does_not_keep_others_from_theirs():
    b, liar, other, theirs, ranks = three_announced()
    attempt, mine = ranks.index(liar), []
    for t in range(1, 200):
        b.now = t / 4
        if t % 11 == 1:  # before its own turn is over
            attempt += 3
            b.step(ev.MessageReceived(b.record(liar, [theirs[0]], attempt=attempt)))
        else:
            b.step(ev.Tick())
        mine += b.said(RoundRecord)
    assert mine, "our turn never came"


def test_a_record_of_an_attempt_that_is_far_off_takes_no_vote_from_those_whose_turn_it_is():
    b, liar, other, theirs, ranks = three_announced()
    far = 30_000 + ranks.index(liar)  # a multiple of three, and its own
    b.step(ev.MessageReceived(b.record(liar, [b.mine, theirs[0]], attempt=far)))
    honest = {attempt: b.record(other, [b.mine, *theirs], attempt=attempt) for attempt in range(60)}
    voted = []
    for t in range(1, 300):
        b.now = t / 4
        attempt = b.machine.open_round.attempt(b.now)  # type: ignore[union-attr]
        if attempt >= 0 and ranks[attempt % 3] == other:
            b.step(ev.MessageReceived(honest[attempt]))
        else:
            b.step(ev.Tick())
        voted += [v.record for v in b.said(Vote)]
    assert {r.digest for r in honest.values()} & set(voted), "all our votes went to the liar's, or our own"


def test_who_names_its_own_turn_at_once_does_not_come_before_the_one_whose_turn_it_is():
    """It would be the author of every record, and know the draws of all audits while it trains."""
    b, *_, theirs, ranks = three_announced()
    number, hasty = next((i, key) for i, key in enumerate(ranks) if i and key != ME)
    early = b.record(hasty, [b.mine, *theirs], attempt=number)
    b.step(ev.MessageReceived(early))
    voted = [v.record for v in b.said(Vote)]
    for t in range(1, 100):
        b.now = t / 20
        right = ranks[0] != ME and t == 5  # a quarter of a second later
        b.step(ev.MessageReceived(b.record(ranks[0], [b.mine, *theirs])) if right else ev.Tick())
        voted += [v.record for v in b.said(Vote)]
        if voted:
            break
    assert voted and voted[0] != early.digest and b.now < POLICY.propose_seconds / 2


def test_a_record_of_a_far_attempt_moves_us_by_one_turn_that_has_had_half_of_its_time():
    """A coalition with many keys could name the turn of the one whose seed it likes."""
    b, liar, _, theirs, _ = three_announced()
    b.step(ev.MessageReceived(b.record(liar, [theirs[0]], attempt=14)))
    moved = []
    for t in range(1, 40):
        b.now = t * POLICY.propose_seconds / 40
        b.step(ev.Tick())
        moved.append(b.machine.open_round.attempt(b.now))  # type: ignore[union-attr]
    assert moved[:19] == [0] * 19 and moved[19:] == [1] * 20


def test_a_few_with_many_records_do_not_keep_out_the_one_whose_turn_it_is():
    policy = replace(POLICY, max_members=64)
    b = Bench(policy=policy)
    *liars, honest = proposer_order(b.chain.seed(b.chain.genesis), OTHERS[:17])
    b.beat(honest)
    b.announce()
    real = b.header(honest)
    b.hold(real)
    for liar in liars:
        for attempt in range(RECORDS_PER_AUTHOR):
            b.step(ev.MessageReceived(b.record(liar, [b.header(liar)], attempt=1000 + attempt)))
    assert b.machine.sizes()["proposals"][0] >= MAX_RECORDS
    round_ = b.machine.open_round
    assert round_ is not None
    record = b.record(honest, [b.mine, real])
    b.step(ev.MessageReceived(record))
    assert record.digest in round_.proposals
    attempts = set()
    while len(attempts) < 2:
        b.step(ev.Tick(), b.machine.next_tick)
        attempts |= {r.attempt for r in b.said(RoundRecord)}
        newest = round_.proposed
        assert not attempts or (newest is not None and newest.digest in round_.proposals), "and our own"
    assert all(size <= bound for size, bound in b.machine.sizes().values())


def test_early_words_of_strangers_make_room_for_those_of_members():
    early = FutureMessages(4)
    for i in range(4):
        early.keep(vote(stranger(i)), trusted=False)
    early.keep(vote(stranger(5)), trusted=False)
    assert not early.sizes()["future messages"][0] > 4
    early.keep(vote(MEMBER), trusted=True)
    kept = early.pop(1)
    assert [m.author for m in kept].count(MEMBER) == 1 and len(kept) == 4
    assert early.sizes()["future bytes"][0] == 0
    assert MAX_STRANGER_BYTES < early.sizes()["future bytes"][1]


def test_early_headers_of_admitted_strangers_make_room_for_those_of_members():
    b = Bench()
    b.beat(MEMBER)
    theirs = b.header(MEMBER)
    made = certificate(b.record(MEMBER, [theirs]), [MEMBER])
    for key in (*(stranger(i) for i in range(3 * POLICY.max_members)), MEMBER):
        first = 10 if key == MEMBER else 0
        work = dict(round=Round(1), parent=made.digest, base_state=head("next"), first_window=first, end_window=20)
        b.step(ev.MessageReceived(b.header(key, label=b"2", **work)))
    b.step(ev.CertificateReceived(made, MEMBER))
    b.step(ev.BlobHeld(theirs.body.blob, theirs.author))
    b.step(ev.StateReached(made.digest, head("next")))
    summary = b.machine.summary(b.now)
    assert summary.round == 1 and MEMBER in [h.author for h in summary.headers]


def test_early_headers_make_room_by_what_keys_without_an_admission_sent():
    early = FutureMessages(4)
    for i in range(4):
        early.keep(vote(stranger(i)), trusted=False)
    early.keep(Bench().header(stranger(5), round=Round(1)), trusted=False)
    assert stranger(5) in {m.author for m in early.pop(1)}


def vote(by: PeerKey):
    return FakeSigner(by).sign(Vote(RUN, Round(1), head("a record")))


def staked(*founders: PeerKey, max_members: int) -> Bench:
    """Return a bench whose founders alone have stake."""
    return Bench(policy=replace(POLICY, max_members=max_members, stake=StakeRule(12, founders, 10)))


def test_keys_without_stake_fill_no_table_of_records_against_the_one_whose_turn_it_is():
    """Each of 64 free keys proposes one record of them all, which lists more than the honest and never gets a vote."""
    honest = OTHERS[0]
    b = staked(ME, honest, max_members=MAX_RECORDS)
    b.beat(honest)
    b.announce()
    real = b.header(honest)
    b.hold(real)
    keys = [stranger(i) for i in range(MAX_RECORDS)]
    headers = [b.header(key, base_state=head("another state")) for key in keys]
    for key in keys:
        body = replace(b.record(key, headers).body, base_state=head("another state"))
        b.step(ev.MessageReceived(FakeSigner(key).sign(body)))
    round_ = b.machine.open_round
    assert round_ is not None and len(round_.proposals) == MAX_RECORDS
    first = proposer_order(b.chain.seed(b.chain.genesis), (ME, honest), b.chain.stakes(b.chain.genesis))[0]
    if first != ME:
        b.step(ev.MessageReceived(b.record(honest, [b.mine, real])))
    votes = b.said(Vote)
    while not votes and b.now < POLICY.patience_seconds:
        b.step(ev.Tick(), b.machine.next_tick)
        votes = b.said(Vote)
    proposed = round_.proposals[votes[0].record].record
    assert proposed.author == first and set(proposed.body.contributors) == {ME, honest}


def test_records_without_a_fault_of_keys_without_stake_leave_before_any_of_one_with_stake():
    honest = OTHERS[0]
    b = staked(ME, honest, max_members=MAX_RECORDS)
    b.announce()
    for i in range(MAX_RECORDS + 8):
        b.step(ev.MessageReceived(b.record(stranger(i), [b.header(stranger(i)), b.mine])))
    record = b.record(honest, [b.mine, b.header(honest)], attempt=3)
    b.step(ev.MessageReceived(record))
    for i in range(MAX_RECORDS + 8, 2 * MAX_RECORDS):
        b.step(ev.MessageReceived(b.record(stranger(i), [b.header(stranger(i)), b.mine])))
    round_ = b.machine.open_round
    assert round_ is not None and record.digest in round_.proposals and len(round_.proposals) == MAX_RECORDS


@pytest.mark.parametrize("fault", ["base state", "ban", None])
def test_records_that_get_no_vote_leave_before_any_that_can_get_one(fault: str | None):
    """Though the turns of their authors come before."""
    keys = [stranger(i) for i in range(MAX_RECORDS + 1)]
    b = staked(ME, *keys, max_members=2 * MAX_RECORDS)
    *liars, last = proposer_order(b.chain.seed(b.chain.genesis), keys, b.chain.stakes(b.chain.genesis))
    b.announce()
    state = head("another state") if fault == "base state" else STATE
    for key in liars:
        body = b.record(key, [b.header(key, base_state=state)], attempt=1).body
        b.step(ev.MessageReceived(FakeSigner(key).sign(replace(body, base_state=state))))
    round_ = b.machine.open_round
    assert round_ is not None and len(round_.proposals) == MAX_RECORDS
    if fault == "ban":
        b.step(ev.MessageReceived(FakeSigner(OWNER).sign(Directive(RUN, 1, banned=(liars[0],)))))
    record = b.record(last, [b.mine, b.header(last)])
    b.step(ev.MessageReceived(record))
    assert (record.digest in round_.proposals) == (fault is not None)


def test_members_without_stake_fill_no_table_of_headers_or_votes_against_stake():
    honest = OTHERS[-1]
    b = staked(ME, honest, max_members=8)
    keys = [stranger(i) for i in range(8)]
    for key in keys:
        b.beat(key)
        b.step(ev.MessageReceived(b.header(key)))
    round_ = b.machine.open_round
    assert round_ is not None and list(round_.headers) == keys
    b.step(ev.MessageReceived(b.header(honest)))
    b.announce()
    assert list(round_.headers) == [*keys[:6], honest, ME], "the newest make room, also for ours"
    voters = [*keys, *(stranger(i) for i in range(8, 16))]
    for key in voters[: 16 - len(round_.votes)]:
        vote = FakeSigner(key).sign(Vote(RUN, Round(0), head("some record"), shards_digest(())))
        round_.votes[key] = BoundedDict(1)
        round_.votes[key].renew(vote.body.record, vote)
    mine = FakeSigner(honest).sign(Vote(RUN, Round(0), head("another"), shards_digest(())))
    b.step(ev.MessageReceived(mine))
    assert honest in round_.votes
    assert len(round_.votes) == 16


def test_an_author_of_two_headers_keeps_no_place_from_another():
    b = Bench()
    keys = OTHERS[:8]
    for key in keys:
        b.beat(key)
        b.step(ev.MessageReceived(b.header(key)))
    b.step(ev.MessageReceived(b.header(keys[3], label=b"second")))
    b.step(ev.MessageReceived(b.header(OTHERS[9])))
    round_ = b.machine.open_round
    assert round_ is not None and keys[3] not in round_.headers and OTHERS[9] in round_.headers
    b.step(ev.MessageReceived(b.header(keys[3])))
    assert keys[3] not in round_.headers, "nor does it come back"


def test_recorded_heartbeats_bring_no_member_with_stake_back():
    """A dead key's stake would count against every record, and each round would wait for patience."""
    b = staked(ME, MEMBER, max_members=8)

    def members() -> list[PeerKey]:
        return [m.key for m in b.machine.summary(b.now).members if m.key == MEMBER]

    def fall_silent() -> None:
        b.step(ev.Tick(), b.now + POLICY.member_seconds + 1)
        assert not members()

    for sequence in (5, 6, 7):
        b.beat(MEMBER, sequence=sequence)
    fall_silent()
    for i in range(8 * LAST_BEATS + 4):  # keys that come and go do not have it forgotten
        b.beat(stranger(i))
        if i % 4 == 3:
            b.step(ev.Tick(), b.now + POLICY.member_seconds + 1)
    for sequence in (5, 6, 7):
        b.beat(MEMBER, sequence=sequence)
    assert not members()
    b.beat(MEMBER, sequence=8)
    assert members()
    b.beat(MEMBER, sequence=10**15)  # its clock is far ahead, and is put right
    fall_silent()
    b.beat(MEMBER, sequence=9)
    assert members()


def test_a_header_of_another_branch_counts_in_fork_choice():
    """Else peers with the same records have other heads, and few with stake on both branches keep them apart."""
    ours, theirs, late = OTHERS[:3]
    b = staked(ME, ours, theirs, late, max_members=8)
    tips = [certificate(b.record(key, [b.header(key)]), [key]) for key in (ours, theirs)]
    for tip in tips:
        b.chain.add(tip)
    head_, other = sorted((t.digest for t in tips), key=lambda d: d != b.chain.head)
    assert b.chain.head == head_
    b.step(ev.MessageReceived(b.header(late, round=Round(1), parent=other)))
    assert b.chain.head == other
    for end, parent in ((20, head_), (30, other), (40, head_), (50, other)):
        b.step(ev.MessageReceived(b.header(late, end, round=Round(1), parent=parent)))
        assert b.chain.head == head_, "a second header for a record moves nothing"
