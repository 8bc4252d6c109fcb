"""A round waits for laggards for a little, for nobody for ever, and for nobody on the word of a liar."""

from __future__ import annotations

from collections import Counter

import pytest

from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import RoundRecord
from protocol.reduce_plan import GATHER, ReducePlan
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.members import Penalties
from tests.simulation.checkers import check_counted_once
from tests.simulation.hostile import Poisoner
from tests.simulation.network import Weather
from tests.simulation.node import Node
from tests.simulation.signer import FakeSigner, certificate
from tests.simulation.world import REDUCE, World, policy_for
from tests.support.long_cases import long_cases
from tests.support.rounds_bench import ME, OTHERS, POLICY, RUN, Bench, blob_of
from tests.support.second_round import BUSY, LASTED, NEXT, SLOW, Second

AFTER = Digest(sha256(b"after"))


def penalised(b: Bench, kind: str) -> int:
    return b.machine.sizes()[kind][0]


def late_round(*others: PeerKey) -> Bench:
    """Return a machine that has awaited BUSY and SLOW in vain until the deadline; the others have announced."""
    b = Bench()
    for key in (BUSY, SLOW, *others):
        b.beat(key)
    b.announce()
    b.hold(*(b.header(key) for key in others))
    while b.now < POLICY.exchange_seconds:
        assert penalised(b, "late") == 0
        b.step(ev.Tick(), b.now + 2)
        for key in (BUSY, SLOW, *others):
            b.beat(key, sequence=2 + int(b.now))
    b.step(ev.Tick())
    assert penalised(b, "late") == 2
    return b


@pytest.mark.parametrize("behind, longest", [(True, LASTED), (False, POLICY.heartbeat_seconds)])
def test_who_is_a_round_behind_or_has_done_nothing_yet_is_waited_for_a_little_and_then_not_for_some_rounds(
    behind, longest
):
    b = Second()
    b.slow = (b.chain.genesis, 5) if behind else (b.first, 0)
    b.say(SLOW, *b.slow)
    b.announced()
    assert b.machine.summary(b.now).awaited == (SLOW,)
    assert b.waits_until() == pytest.approx(LASTED + longest, abs=0.2)
    assert penalised(b, "lagging") == 1 and penalised(b, "late") == 0
    theirs = [h for h in b.machine.summary(b.now).headers if h.author == BUSY]
    second = b.next_record(SLOW, [*theirs, b.header(SLOW, label=b"2", **b.work(10))])
    b.step(ev.StateReached(second, AFTER))
    assert penalised(b, "lagging") == 0, "a record lists it"


def test_a_penalty_counts_for_twice_as_many_rounds_each_time_until_it_is_forgiven():
    penalties = Penalties(2)
    penalties.penalise(SLOW, 1)
    assert [n for n in range(9) if penalties.applies_to(SLOW, n)] == [0, 1, 2, 3]
    penalties.penalise(SLOW, 4)
    assert penalties.applies_to(SLOW, 8) and not penalties.applies_to(SLOW, 9) and not penalties.applies_to(BUSY, 4)
    penalties.forgive(SLOW)
    assert not penalties.applies_to(SLOW, 4)


def test_one_doubling_is_taken_back_for_every_32_rounds_after_a_penalty():
    penalties = Penalties(2)
    for number in (1, 4, 8 + 31):  # the second one lasts up to round 8
        penalties.penalise(SLOW, number)
    assert penalties.applies_to(SLOW, 39 + 8) and not penalties.applies_to(SLOW, 39 + 9)
    penalties.penalise(SLOW, 47 + 2 * 32)
    assert penalties.applies_to(SLOW, 111 + 4) and not penalties.applies_to(SLOW, 111 + 5)
    penalties.penalise(SLOW, 9999)
    assert penalties.applies_to(SLOW, 9999 + 2) and not penalties.applies_to(SLOW, 9999 + 3)


def test_a_penalty_is_withdrawn_in_its_round_as_if_it_had_not_been_added():
    penalties = Penalties(2)
    penalties.penalise(SLOW, 1)
    penalties.withdraw(SLOW, 2)
    assert penalties.applies_to(SLOW, 3), "it is of another round"
    penalties.penalise(SLOW, 5)
    penalties.withdraw(SLOW, 5)
    assert not penalties.applies_to(SLOW, 5)
    penalties.penalise(SLOW, 6)
    assert penalties.applies_to(SLOW, 6 + 4) and not penalties.applies_to(SLOW, 6 + 5)
    penalties.withdraw(BUSY, 6)


def test_who_falls_silent_is_not_waited_for_two_heartbeats_later():
    b = Second(lasted=0.5)  # both were heard from at 0
    b.announced()
    assert b.machine.summary(b.now).awaited == (SLOW,)
    while b.machine.summary(b.now).awaited:
        b.step(ev.Tick(), b.machine.next_tick)
    assert b.now == 2 * POLICY.heartbeat_seconds


def test_who_is_a_round_behind_and_comes_is_waited_for_as_anybody():
    b = Second()
    b.slow = (b.chain.genesis, 5)
    b.say(SLOW, *b.slow)
    b.announced()
    b.now = LASTED + 2
    b.say(SLOW, *b.slow)
    b.step(ev.Tick(), LASTED + 3)
    late = b.header(SLOW, label=b"2", round=Round(1), parent=b.first, base_state=NEXT, first_window=10, end_window=20)
    b.step(ev.MessageReceived(late))
    b.slow = (b.first, 5)
    assert b.machine.summary(b.now).awaited == (SLOW,) and penalised(b, "lagging") == 0
    b.step(ev.BlobHeld(late.body.blob, late.author))
    assert b.machine.summary(b.now).awaited == ()


def test_who_is_somewhere_else_is_not_waited_for():
    b = Second()
    b.say(SLOW, Digest(sha256(b"another record")))
    b.announced()
    assert b.machine.summary(b.now).awaited == ()


@pytest.mark.parametrize("how", ["by its header", "by its heartbeat"])
def test_one_who_sent_a_bad_update_does_not_end_rounds_by_what_it_claims(how):
    b = Bench()
    liar = OTHERS[2]
    for key in (BUSY, SLOW, liar):
        b.beat(key)
    b.announce()
    bad, *good = b.header(liar), b.header(BUSY), b.header(SLOW)
    b.step(ev.MessageReceived(bad))
    b.step(ev.BlobInvalid(bad.body.blob, "chunk 3: a scale that is not finite"))
    b.hold(*good)
    b.step(ev.CertificateReceived(certificate(b.record(BUSY, [b.mine, *good]), [BUSY, SLOW, ME]), BUSY))
    first = b.chain.head
    b.step(ev.StateReached(first, NEXT))
    b.step(ev.TrainingProgress(3, 1.0, 1.0))
    if how == "by its header":
        b.step(ev.MessageReceived(b.header(liar, round=Round(1), parent=first, base_state=NEXT, windows=50)))
    else:
        b.beat(liar, windows=50, sequence=9, head=first, weight=45)
    assert not b.of(do.RequestUpdate)
    b.beat(BUSY, windows=17, sequence=9, head=first, weight=45)
    assert b.of(do.RequestUpdate)


def test_what_one_announces_who_was_late_before_counts_for_the_target():
    b = late_round()
    first = b.chain.head
    assert first != b.chain.genesis  # our update alone
    b.step(ev.StateReached(first, NEXT))
    for key in (BUSY, SLOW):
        b.beat(key, windows=8, sequence=99, head=first, weight=25)
    b.step(ev.TrainingProgress(3, 1.0, 1.0))
    assert not b.of(do.RequestUpdate)
    b.step(ev.MessageReceived(b.header(BUSY, 17, round=Round(1), parent=first, base_state=NEXT)))
    assert b.of(do.RequestUpdate)


@pytest.mark.parametrize("attempt, expected", [(1, [False, False, True]), (0, [True, True, True])])
def test_a_late_peer_is_not_awaited_for_two_rounds_unless_the_first_attempt_lists_it(attempt, expected):
    b = late_round(OTHERS[2])  # its vote is missing
    assert b.chain.head == b.chain.genesis
    theirs = [b.header(BUSY)]
    b.step(ev.CertificateReceived(certificate(b.record(BUSY, [b.mine, *theirs], attempt), [BUSY, ME]), BUSY))
    awaited = []
    for number in range(1, 4):
        b.step(ev.BlobHeld(theirs[-1].body.blob, theirs[-1].author))
        parent, state = b.chain.head, Digest(sha256(b"state", bytes([number])))
        b.step(ev.StateReached(parent, state))
        for key in (BUSY, SLOW):
            b.beat(key, sequence=99 + number, head=parent, weight=35)
        b.step(ev.TrainingProgress(25, 1.0, 1.0))
        first, label = b.chain.next_window(ME, parent), bytes([number])
        b.step(ev.UpdateReady(parent, first, first, first + 25, 5, blob_of(ME, label), 9, 1.0))
        awaited.append(BUSY in b.machine.summary(b.now).awaited)
        start = b.chain.next_window(BUSY, parent)
        work = dict(round=Round(number), parent=parent, base_state=state, first_window=start, end_window=start + 10)
        theirs.append(b.header(BUSY, label=label, **work))
        updates = tuple(sorted((b.mine, theirs[-1]), key=lambda h: h.author))
        weights = b.chain.weights(parent, updates)
        record = FakeSigner(BUSY).sign(RoundRecord(RUN, Round(number), parent, state, 0, updates, weights=weights))
        b.step(ev.CertificateReceived(certificate(record, [BUSY, ME]), BUSY))
        assert b.chain.head != parent
    assert awaited == expected


def test_a_laggard_that_says_something_else_in_time_was_waited_for_in_vain_all_the_same():
    b = Second()
    b.say(BUSY, b.first)
    b.say(SLOW, b.chain.genesis)
    b.announced()
    assert b.machine.summary(b.now).awaited == (SLOW,)
    b.step(ev.Tick(), b.now + 0.5)
    b.say(SLOW, Digest(sha256(b"nowhere")))
    assert b.machine.summary(b.now).awaited == () and penalised(b, "lagging") == 1


def test_strangers_do_not_make_a_record_that_most_announced():
    b = Bench()
    b.beat(BUSY)
    b.announce()
    stranger = b.header(OTHERS[3], 1)
    b.step(ev.CertificateReceived(certificate(b.record(OTHERS[3], [stranger]), [OTHERS[3]]), OTHERS[3]))
    assert b.of(do.StoreCertificate) and b.chain.head == b.chain.genesis  # nobody had received its announcement


def test_a_record_of_most_who_announced_is_followed_at_once_though_others_announced_more_work():
    """Two who missed rounds announce the work of all of them: they hold back nothing."""
    b = Bench()
    for key in OTHERS[:6]:
        b.beat(key)
    small, big = [b.header(k, 5) for k in OTHERS[:4]], [b.header(k, 50) for k in OTHERS[4:6]]
    b.announce()
    b.hold(*small, *big)
    few = certificate(b.record(OTHERS[0], small[:3]), OTHERS[:3])
    b.step(ev.CertificateReceived(few, OTHERS[0]))
    assert b.of(do.StoreCertificate) and not b.of(do.ApplyRecord)  # three of seven
    most = certificate(b.record(OTHERS[0], small), OTHERS[:4])
    b.step(ev.CertificateReceived(most, OTHERS[0]))
    assert b.of(do.ApplyRecord)[0].certificate is most


class Far(Node):
    """A node whose messages, in both directions, take longer than the others' whole rounds."""

    def hear(self, message):
        self.world.clock.after(DISTANCE, super().hear, message)

    def broadcast(self, message):
        self.world.clock.after(DISTANCE, super().broadcast, message)


DISTANCE = 0.4


@pytest.mark.parametrize("exchange", [GATHER, *long_cases(REDUCE)])
def test_who_is_far_away_is_in_the_rounds_though_exchanges_take_longer_than_training(exchange: ReducePlan):
    """Every peer announces the moment it has a new state.

    Two have theirs long after the others, and their announcements arrive long after the others'.
    """
    peers = 6
    policy = policy_for(peers, target_windows=2, exchange=exchange)
    world = World(3, peers, Weather(delay=0.02, jitter=0.005), policy=policy)
    for i in range(peers):
        world.clock.at(0.0, world.add(Far if i >= peers - 2 else Node, speed=8.0).boot)
    world.clock.run_until(90.0)
    last = [c for c in world.records.values() if c.record.body.round >= world.height() - 15]
    counts = Counter(world.by_key[key].index for c in last for key in c.record.body.contributors)
    assert len(last) <= 17 and min(counts[i] for i in range(peers)) >= 13, counts
    check_counted_once(world)


def test_a_poisoner_does_not_hurry_the_others():
    """Its claims never get less, for nothing of it is accepted: they could end rounds before others did anything."""
    peers = 5
    world = World(4, peers, Weather(delay=0.05, jitter=0.02), policy=policy_for(peers))
    for i in range(peers):
        world.clock.at(0.0, world.add(Poisoner if i == peers - 1 else Node, speed=2.0).boot)
    world.clock.run_until(120.0)
    assert world.height() >= 12 and not [r for _, _, r in world.reports if r.kind == "light"]
    rounds = [c.record.body for c in world.records.values() if world.by_key[c.record.author].honest]
    assert all(len(body.updates) == peers - 1 for body in rounds[2:])
