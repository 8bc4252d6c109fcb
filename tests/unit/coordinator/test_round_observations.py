"""The coordinator's observations of rounds: the split of time, the reasons for absences, the next round; kept on
disk."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from coordinator.non_participation import REASONS
from coordinator.observation_file import ObservationFile
from coordinator.overview import next_round_seconds
from coordinator.page.json_view import round_charts
from coordinator.peer_registry import RATE_SECONDS, PeerRegistry
from coordinator.round_observations import MAX_EARLY_PROPOSALS, MAX_WITH_ABSENCES, RoundObservations, TypicalDurations
from protocol.ids import Digest
from protocol.ledger.credits import CreditRule, credits_of
from protocol.messages import AuditDecision
from tests.support.coordinator_fakes import FakeSwarm, make_spec, peer

SPEC = make_spec()
RULE = CreditRule.of(SPEC)
MEMBER = SPEC.round.member_seconds


class Watch:
    """A swarm, its observations, and a clock."""

    def __init__(self):
        self.swarm = FakeSwarm(SPEC)
        self.now = 1000.0
        self.seen = RoundObservations(lambda: MEMBER, lambda: self.now)
        self.swarm.listen(self.seen.receive)

    def certified(self, certificate):
        return self.seen.decide(credits_of(certificate, RULE), self.swarm.heartbeats())

    def round(self, work, *, train=20.0, exchange=4.0, commit=1.0):
        certificate = self.swarm.chain.add(work)
        self.now += train
        self.swarm.hear(*certificate.record.body.updates)
        self.now += exchange
        self.swarm.hear(certificate.record)
        self.now += commit
        return self.certified(certificate)


def test_a_rounds_time_is_split_into_training_exchange_and_commit():
    w = Watch()
    assert w.round({0: 10, 1: 10}).whole is None, "nobody saw when the first one began"
    seen = w.round({0: 10, 1: 10}, train=30, exchange=5, commit=2)
    assert (seen.train, seen.exchange, seen.commit, seen.whole) == (30, 5, 2, 37)
    assert seen.certified == w.now and w.seen.began == w.now
    assert w.seen.typical() == TypicalDurations(37, 7)
    assert set(w.seen.announcements(seen.record)) == {peer(0).key, peer(1).key}


def test_a_pause_is_no_part_of_the_round_that_it_falls_into():
    w = Watch()
    w.round({0: 10})
    w.now += 10_000
    w.seen.note_pause()
    seen = w.round({0: 10}, train=30, exchange=5, commit=2)
    assert (seen.train, seen.whole) == (30, 37)
    certificate = w.swarm.chain.add({0: 10})
    w.now += 20
    w.swarm.hear(*certificate.record.body.updates)
    w.now += 5
    w.seen.note_pause()  # peers that have announced are still in the round
    assert w.certified(certificate).whole == 25


def test_announcements_that_come_before_their_round_began_here_count_for_it():
    w = Watch()
    first, second = w.swarm.chain.add({0: 10}), w.swarm.chain.add({0: 10})
    w.swarm.hear(*second.record.body.updates, second.record)
    w.now += 1
    assert w.certified(first).announced is None
    assert w.seen.first_announced == 1000.0
    assert w.certified(second).commit == 1.0


def test_whoever_a_record_convicts_is_not_said_to_be_late():
    w = Watch()
    audited = w.swarm.chain.add({0: 10, 1: 10})
    w.certified(audited)
    rival = w.swarm.chain.fork(1).add({0: 10, 1: 10})
    w.swarm.hear(*rival.record.body.updates)
    decision = AuditDecision(audited.digest, peer(0).key, True)
    (absent,) = w.certified(w.swarm.chain.add({1: 10}, decisions=[decision])).absent or ()
    assert (absent.peer, absent.reason) == (peer(0).key, "convicted")


def test_why_a_peer_is_not_in_a_round_is_said_in_words():
    w = Watch()
    w.round(dict.fromkeys(range(10), 10))
    now = len(w.swarm.chain.certificates)
    parent = w.swarm.head
    late, unlucky = (w.swarm.chain.fork(now).add({n: 10}).record.body.updates[0] for n in (1, 2))
    beats = {
        3: dict(phase="syncing"), 4: dict(round=now - 1), 5: dict(head=Digest(bytes(32))), 6: dict(windows=0),
        7: dict(windows=33), 8: dict(phase="exchanging"), 9: dict(seconds_since=MEMBER + 1),
        12: dict(phase="observing"),
    }  # fmt: skip
    certificate = w.swarm.chain.add({0: 10})
    for n, fields in beats.items():
        w.swarm.beat(n, **({"round": now, "head": parent} | fields))
    w.now += 20
    w.swarm.hear(unlucky, *certificate.record.body.updates)
    w.now += 5
    w.swarm.hear(certificate.record)
    w.now += 2.5
    w.swarm.hear(late)
    seen = w.certified(certificate)
    found = {a.peer: (a.reason, a.message) for a in seen.absent or ()}
    why = {n: found[peer(n).key][0] for n in range(1, 10)}
    assert why == {
        1: "late", 2: "not fetched", 3: "syncing", 4: "behind", 5: "other branch", 6: "no window", 7: "no announcement",
        8: "not received", 9: "silent",
    }  # fmt: skip
    assert found[peer(1).key][1] == "announced 2.5 s after the record was proposed"
    assert "33 windows" in found[peer(7).key][1] and "1 round behind" in found[peer(4).key][1]
    assert peer(12).key not in found and peer(0).key not in found
    # One that is gone is missed once, in the round after its last.
    del w.swarm.heard[peer(9).key]
    assert peer(9).key not in {a.peer for a in w.round({0: 10}).absent or ()}
    assert {*why.values(), "left", "convicted"} == REASONS


def test_bytes_of_a_round_come_from_counters_that_may_begin_anew():
    w = Watch()
    w.swarm.beat(0, bytes_up=1000, bytes_down=50)
    w.swarm.beat(1, bytes_up=500, bytes_down=50)
    w.round({0: 10})
    w.swarm.beat(0, bytes_up=1700, bytes_down=80)
    w.swarm.beat(1, bytes_up=40, bytes_down=90)
    seen = w.round({0: 10})
    assert (seen.sent, seen.received, seen.training) == (740, 70, 2)


def there(kind: str) -> int:
    """Return how many objects of a class are in memory."""
    gc.collect()
    return sum(type(o).__name__ == kind for o in gc.get_objects())


def test_one_author_cannot_fill_the_memory_nor_replace_what_came_first():
    w = Watch()
    w.round({0: 10})
    chain, before, rivals = w.swarm.chain, there("_Proposal"), []
    for attempt in range(200):
        fork = chain.fork(1)
        rivals.append(fork.add({1: 10}, attempt=attempt))
        w.swarm.hear(rivals[-1].record, *fork.add({1: 10}, loss=attempt / 7).record.body.updates)
    assert there("_Proposal") - before == 64
    announced = []
    for rival in rivals:  # as it becomes the head
        w.certified(rival)
        announced.append(w.seen.first_announced is not None)
    assert announced == [False] * 199 + [True], "of the early updates, one was kept"


def test_of_proposals_that_come_early_few_are_kept_and_none_whole():
    w = Watch()
    w.round({0: 10})
    before = there("RoundRecord")
    for n in range(MAX_EARLY_PROPOSALS + 5):
        w.swarm.hear(w.swarm.chain.fork(0).add({n: 10}).record)
    assert there("RoundRecord") == before and there("_Proposal") == MAX_EARLY_PROPOSALS


def test_what_was_seen_outlives_a_restart_and_a_torn_line(tmp_path):
    w, file = Watch(), ObservationFile(tmp_path / "observations.jsonl")
    w.swarm.beat(3, phase="syncing")
    for _ in range(3):
        w.round({0: 10, 1: 10})
    file.append(w.seen.take_unsaved())
    assert not w.seen.take_unsaved()
    with open(file.path, "ab") as out:
        out.write(b'[4,"torn')
    file.append([])
    again = Watch()
    again.swarm, again.now = w.swarm, w.now
    again.swarm.listen(again.seen.receive)
    again.seen.restore(file.read())
    assert list(again.seen) == list(w.seen)
    # The round that was under way meanwhile began when the record before it was certified.
    later = again.round({0: 10}, train=9)
    assert later.train == pytest.approx(9) and (later.absent or ())[0].reason == "syncing"
    file.append(again.seen.take_unsaved())
    assert len(file.read()) == 4


def test_a_pause_at_a_restart_is_no_part_of_the_round_after_it():
    w = Watch()
    w.round({0: 10})
    again = Watch()
    again.swarm, again.now = w.swarm, w.now
    again.swarm.listen(again.seen.receive)
    again.seen.restore(list(w.seen))
    again.now += 10_000
    again.seen.note_pause()
    assert again.round({0: 10}, train=9).train == 9


def test_a_round_on_another_branch_does_not_follow():
    w = Watch()
    w.round({0: 10})
    rival = w.swarm.chain.fork(1).add({1: 10})
    credits, last = (credits_of(c, RULE) for c in (rival, w.swarm.chain.certificates[0]))
    assert w.seen.is_followed_by(credits) and not w.seen.is_followed_by(last)
    w.round({0: 10})
    assert not w.seen.is_followed_by(credits)


def test_the_file_is_bounded_and_rubbish_in_it_is_left_out(tmp_path):
    w, file = Watch(), ObservationFile(tmp_path / "observations.jsonl", max_bytes=4000)
    for _ in range(100):
        w.round({0: 10})
        file.append(w.seen.take_unsaved())
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 2 * 4300
    kept = file.read()
    assert kept == list(w.seen)[-len(kept) :] and len(kept) > 20
    file.path.write_bytes(b'{"a":1}\n\xff\n[1,2]\n[]\n' + b"[" * 100_000 + b"\n")
    assert all(s in kept for s in file.read())
    ObservationFile(tmp_path / "missing" / "x.jsonl").append(kept)  # said in the log; nothing is lost but that


def test_old_rounds_keep_their_times_and_lose_who_was_not_in():
    w = Watch()
    w.swarm.beat(3, phase="syncing")
    for _ in range(MAX_WITH_ABSENCES + 3):
        w.round({0: 10})
    every = list(w.seen)
    assert [s.absent is None for s in every] == [True] * 3 + [False] * MAX_WITH_ABSENCES
    charts = round_charts(every, limit=100)
    assert len(charts["times"]) <= 100 and charts["train"][1] == pytest.approx(20)
    assert charts["times"][-1] == pytest.approx(every[-1].certified, abs=0.1)


# -- when the next round is due -----------------------------------------------------------------------------------


def due(work=(), **changes):
    known = dict(target_tokens=1000, max_seconds=300.0, elapsed=10.0, announced=None, typical=TypicalDurations(60, 8))
    return next_round_seconds(work, **(known | changes))


def test_the_next_round_is_due_when_the_tokens_are_done_and_exchanged():
    assert due([(110, 5), (300, 5)]) == pytest.approx((1000 - 410) / 10 + 8)
    assert due([(110, 5)], typical=None) == pytest.approx(178)
    assert due([(5010, 5)]) == 8, "all is done: the exchange is left"
    assert due([(0, 0.1)]) == 290 + 8, "a round ends after max_seconds whatever was done"


def test_once_updates_are_announced_only_the_exchange_is_left():
    assert due([(0, 5)], announced=3.0) == 5
    assert due([(0, 5)], announced=30.0) == 0
    assert due([(0, 5)], announced=3.0, typical=None) is None


def test_without_speeds_rounds_so_far_tell_and_without_rounds_nothing_does():
    assert due() == 50
    assert due(elapsed=None) is None and due(typical=None) is None


# -- what peers do, and since when -------------------------------------------------------------------------------


def test_a_peers_state_has_a_beginning_and_its_counters_a_speed():
    swarm, book = FakeSwarm(SPEC), PeerRegistry(lambda: MEMBER)
    for i in range(12):
        swarm.beat(0, phase="exchanging" if i % 2 else "training", bytes_up=30_000 * i, bytes_down=0)
        book.update(swarm.heartbeats(), 1000.0 + 3 * i)
    known = book.get(peer(0).key)
    assert known is not None and known.since == 1000.0, "training and exchanging are one"
    assert known.up_per_second == pytest.approx(10_000) and RATE_SECONDS <= 33
    swarm.beat(0, phase="syncing", bytes_up=5)
    book.update(swarm.heartbeats(), 1036.0)
    known = book.get(peer(0).key)
    assert known is not None and known.since == 1036.0 and known.up_per_second == pytest.approx(10_000)
    book.update(swarm.heartbeats(), 1036.0 + MEMBER + 1)
    known = book.get(peer(0).key)
    assert known is not None and known.since == known.heard_at, "it was away: all begins anew"


def test_a_clock_that_is_set_back_keeps_nobody_who_left_and_stops_no_rate():
    swarm, book = FakeSwarm(SPEC), PeerRegistry(lambda: MEMBER)
    swarm.beat(1)
    for step, now in enumerate((1e6, *(1000.0 + 3 * i for i in range(12)))):
        swarm.beat(0, bytes_up=3000 * step, bytes_down=0)
        book.update(swarm.heartbeats(), now)
        swarm.heard.pop(peer(1).key, None)
    known, left = book.get(peer(0).key), book.get(peer(1).key)
    assert known is not None and known.up_per_second == pytest.approx(1000)
    assert book.phase(left, 1000.0 + MEMBER + 1) == "silent"


def test_of_a_peer_that_the_observer_has_forgotten_little_is_kept():
    swarm, book = FakeSwarm(SPEC), PeerRegistry(lambda: MEMBER)
    swarm.beat(0, unreachable=(1, 2), bytes_up=5)
    book.update(swarm.heartbeats(), 1000.0)
    known = book.get(peer(0).key)
    assert known is not None and known.heartbeat.unreachable == (1, 2)
    book.update({}, 1001.0)
    gone = book.get(peer(0).key)
    assert gone == replace(known, heartbeat=replace(known.heartbeat, unreachable=()))
