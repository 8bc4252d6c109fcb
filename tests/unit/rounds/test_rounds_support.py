"""Support: a certified record is followed at once only if most of the stake that takes part is for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.ids import Digest, Round, sha256
from protocol.messages import Heartbeat, RoundRecord
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.stake import StakeRule
from tests.simulation.signer import FakeSigner, certificate
from tests.support.rounds_bench import ME, OTHERS, POLICY, STATE, Bench

FOUNDERS = OTHERS[:3]
PATIENCE = POLICY.patience_seconds


class Founded(Bench):
    """A bench whose three other members are the founders, with equal stake; others have none."""

    def __init__(self, members=FOUNDERS, **kind):
        super().__init__(policy=replace(POLICY, stake=StakeRule(12, tuple(FOUNDERS), 10)), **kind)
        for key in members:
            self.beat(key)

    def certified(self, authors, voters, at=None) -> Digest:
        headers = [self.header(key) for key in authors]
        self.hold(*headers)
        made = certificate(self.record(authors[0], headers), voters)
        self.step(ev.CertificateReceived(made, authors[0]), at)
        return made.digest

    def followed(self, seconds: float) -> float | None:
        """Return the time at which a record was applied, within some seconds from now."""
        until = self.now + seconds
        while self.now < until:
            if self.of(do.ApplyRecord):
                return self.now
            for i, key in enumerate(FOUNDERS):
                self.beat(key, sequence=int(10 * self.now) + 2 + i)
            self.step(ev.Tick(), self.now + 0.5)
        return None


def test_most_of_the_stake_is_followed_at_once_though_many_more_keys_announced():
    b = Founded()
    for key in OTHERS[10:14]:
        b.hold(b.header(key))
    b.announce()
    b.certified(FOUNDERS[:2], FOUNDERS[:2])
    assert b.followed(1.0) is not None


def test_our_own_stake_counts_so_that_a_third_is_no_majority_at_the_largest_peer():
    """Without it the peer with most stake followed a minority, and with it all others did."""
    b = Bench(policy=replace(POLICY, stake=StakeRule(12, (ME, *FOUNDERS[:2]), 10)))
    b.beat(FOUNDERS[0])
    b.beat(FOUNDERS[1])
    b.announce()
    header = b.header(FOUNDERS[0])
    b.hold(header)
    b.step(ev.CertificateReceived(certificate(b.record(FOUNDERS[0], [header]), FOUNDERS[:1]), FOUNDERS[0]))
    b.step(ev.Tick(), b.now + 1.0)
    assert not b.of(do.ApplyRecord)


@pytest.mark.parametrize("authors, reloaded", [(OTHERS[10:18], False), (FOUNDERS[:1], False), (FOUNDERS[:2], True)])
def test_only_most_of_the_stake_has_us_load_another_state(authors, reloaded):
    b, told = Founded(), []
    for key in authors:
        b.step(ev.MessageReceived(b.header(key, base_state=Digest(sha256(b"other state")))))
        told += [notice.kind for notice in b.of(do.Notice)]
    assert ("drift" in told) is reloaded


def test_keys_without_stake_are_held_back_for_the_patience_however_many_and_with_the_largest_claims():
    b = Founded()
    b.announce()
    b.certified(OTHERS[10:17], OTHERS[10:17], 1.0)
    applied = b.followed(2 * PATIENCE)
    assert applied is not None and applied >= PATIENCE


def test_patience_does_not_run_while_we_train():
    """Nothing better can come before others announce: it counts from our announcement on."""
    b = Founded()
    b.certified(OTHERS[10:11], OTHERS[10:11], 1.0)
    assert b.followed(3 * PATIENCE) is None and b.now < POLICY.max_seconds
    announced = b.now
    b.announce()
    applied = b.followed(2 * PATIENCE)
    assert applied is not None and applied >= announced + PATIENCE


def test_who_never_announces_follows_after_the_longest_round_and_the_patience():
    b = Founded()
    b.certified(OTHERS[10:11], OTHERS[10:11], 1.0)
    applied = b.followed(POLICY.max_seconds + 2 * PATIENCE)
    assert applied is not None and applied >= POLICY.max_seconds + PATIENCE


def test_half_of_the_stake_is_not_enough_while_the_other_half_is_heard():
    b = Founded(FOUNDERS[:2])
    b.announce()
    b.certified(FOUNDERS[:1], FOUNDERS[:1], 1.0)
    for _ in range(10):
        b.beat(FOUNDERS[1], sequence=b.now.__trunc__() + 2)
        b.step(ev.Tick(), b.now + 1.0)
        assert not b.of(do.ApplyRecord)


def test_who_is_not_heard_any_more_holds_nothing_back():
    b = Founded(FOUNDERS[:2])
    b.announce()
    b.certified(FOUNDERS[:1], FOUNDERS[:1], 1.0)
    applied = None
    while applied is None and b.now < PATIENCE:
        b.step(ev.Tick(), b.now + 0.5)
        applied = b.now if b.of(do.ApplyRecord) else None
    assert applied is not None and applied <= POLICY.member_seconds + 2


def test_votes_that_come_later_give_a_record_the_support_that_it_lacked():
    b = Founded()
    b.announce()
    headers = [b.header(key) for key in FOUNDERS]
    b.hold(*headers)
    record = b.record(FOUNDERS[0], headers)
    b.step(ev.CertificateReceived(certificate(record, FOUNDERS[:1]), FOUNDERS[0]))
    assert not b.of(do.ApplyRecord)
    b.step(ev.CertificateReceived(certificate(record, FOUNDERS[:2]), FOUNDERS[1]))
    assert b.of(do.ApplyRecord)


@pytest.mark.parametrize("siblings", [1, 8, 32, 100, 200])
def test_lone_siblings_on_the_head_whose_blobs_nobody_has_delay_nothing(siblings):
    """One key certifies any number of records alone: the next honest record is followed at once all the same."""
    b = Founded()
    b.announce()
    liar = OTHERS[20]
    for i in range(siblings):
        header = b.header(liar, 50, label=b"%d" % i, blob=Digest(sha256(b"nowhere", b"%d" % i)))
        record = FakeSigner(liar).sign(RoundRecord(header.body.run, Round(0), b.chain.genesis, STATE, i, (header,)))
        b.step(ev.CertificateReceived(certificate(record, [liar]), liar))
        assert not b.of(do.ApplyRecord) and not b.of(do.SyncState)
    assert len(b.chain) <= 2
    made = b.certified(FOUNDERS, FOUNDERS)
    assert [a.certificate.digest for a in b.of(do.ApplyRecord)] == [made]
    assert ME in [h.author for h in b.machine.summary(b.now).headers]


def heads(b: Founded, until: float) -> dict[Digest, float]:
    """Return when the machine's first heartbeats at each head were, while the founders train at the genesis."""
    found: dict[Digest, float] = {}
    while b.now < until:
        for key in FOUNDERS:
            b.beat(key, sequence=int(10 * b.now) + 2)
        b.step(ev.Tick(), b.now + 0.5)
        for beat in b.said(Heartbeat):
            found.setdefault(beat.head, b.now)
    return found


def test_an_observer_holds_a_lone_record_back_as_one_that_never_announces_does():
    b = Founded(observer=True)
    made = b.certified(OTHERS[10:11], OTHERS[10:11], 1.0)
    assert b.chain.head == b.chain.genesis
    end = POLICY.max_seconds + PATIENCE
    assert end <= heads(b, end + PATIENCE)[made] <= end + 3


def test_an_observer_follows_at_once_what_most_of_the_stake_voted_for():
    b = Founded(observer=True)
    lone = b.certified(OTHERS[10:11], OTHERS[10:11], 1.0)
    assert b.certified(FOUNDERS[:2], FOUNDERS[:2]) == b.chain.head != lone


@pytest.mark.parametrize("standing, seconds", [(1, None), (2, 3.0)])
def test_an_observer_follows_a_held_record_once_most_of_the_stake_stands_there(standing, seconds):
    """Their patience may be over before its own: they announced, and it never does."""
    b = Founded(observer=True)
    made = b.certified(OTHERS[10:11], OTHERS[10:11], 1.0)
    for i in range(20):
        for n, key in enumerate(FOUNDERS):
            b.beat(key, sequence=10 + i, head=made if n < standing else None)
        b.step(ev.Tick(), b.now + 0.5)
        if b.chain.head == made:
            break
    assert (b.now <= 1.0 + seconds) if seconds else b.chain.head == b.chain.genesis


def test_an_observer_of_one_peer_follows_it_at_once():
    b = Founded(FOUNDERS[:1], observer=True)
    assert b.certified(FOUNDERS[:1], FOUNDERS[:1], 1.0) == b.chain.head


@pytest.mark.parametrize("observer", [False, True])
def test_who_joins_holds_back_the_lone_record_that_came_before_it_heard_the_members(observer):
    b = Founded((), observer=observer, alone=False)
    made = b.certified(OTHERS[10:11], OTHERS[10:11], 0.5)
    assert b.chain.head == made
    b.beat(FOUNDERS[0])
    assert b.chain.head == b.chain.genesis
    b.beat(FOUNDERS[0], sequence=2, head=made)
    b.step(ev.Tick(), b.now + 1.0)
    assert b.chain.head == made
