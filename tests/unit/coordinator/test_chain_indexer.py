"""Following the chain: finals are signed once and in order, credits settle when final, a restart loses nothing."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from time import monotonic

import pytest

from coordinator.chain_indexer import ChainIndexer
from coordinator.credits.plausibility import PlausibilityCheck
from coordinator.directives import DirectiveEffects
from coordinator.errors import LedgerConflictError, LedgerError
from coordinator.finalizer import Finalizer
from coordinator.history import RoundPoint, charts, tokens_per_second
from coordinator.indexed_chain import IndexedChain
from coordinator.ledger import AdmissionRow, Ledger
from coordinator.ledger_thread import LedgerThread
from protocol.audits import AuditRule
from protocol.ids import Round
from protocol.ledger.credits import CreditRule, credits_of, sum_credits
from protocol.message_codec import KeySigner
from protocol.messages import Directive, Finalization, Rollback, Verdict
from tests.support.coordinator_fakes import FakeSwarm, make_spec, peer, state
from tests.support.specs import OWNER
from tests.support.waiting import ended

SPEC = make_spec()
RULE = CreditRule.of(SPEC)
DEPTH = SPEC.checkpoint.final_depth


class Indexed:
    """A chain that an indexer keeps up to date, with what else tests read."""

    def __init__(self, swarm, ledger, now, waited, on_pass):
        self.chain = IndexedChain(AuditRule.of(swarm.spec))
        self.finalizer = Finalizer(swarm.spec, OWNER, swarm, ledger, self.chain, time=waited)
        directives = DirectiveEffects(swarm.spec.round, self.chain)
        self.indexer = ChainIndexer(
            swarm.spec, swarm, ledger, self.chain, self.finalizer, PlausibilityCheck(swarm.spec), directives,
            now, on_pass=on_pass,
        )  # fmt: skip

    def __getattr__(self, name):
        return getattr(self.chain if hasattr(self.chain, name) else self.indexer, name)


@asynccontextmanager
async def following(swarm, tmp_path, now=lambda: 1000.0, waited=monotonic, first=None):
    ledger = LedgerThread()
    await ledger.open(tmp_path / "ledger.sqlite", swarm.spec, now)
    passes = asyncio.Semaphore(0)
    indexed = Indexed(swarm, ledger, now, waited, passes.release)
    if first is not None:
        await first(indexed)
    await indexed.indexer.read_ledger()
    indexed.indexer.start()
    await ended(passes.acquire())

    async def until(done):
        async def wait():
            while not done():
                await passes.acquire()

        await ended(wait())

    try:
        yield indexed, until
    finally:
        await indexed.indexer.stop()
        await ledger.close()


def rounds(swarm, count, **how):
    for _ in range(count):
        swarm.round({0: 600, 1: 700}, **how)


async def test_a_round_is_final_when_enough_are_built_on_it(tmp_path):
    swarm = FakeSwarm(SPEC)
    async with following(swarm, tmp_path) as (f, until):
        rounds(swarm, DEPTH)
        await until(lambda: len(f.open) == DEPTH)
        assert f.posted is None and not swarm.finals
        rounds(swarm, 2)
        await until(lambda: f.posted and f.posted[0] == 1)
        final = swarm.finals[-1]
        assert (final.author, final.body.round) == (OWNER.key, 1)
        assert final.body.record == swarm.chain.certificates[1].record.digest
        credited = [credits_of(c, RULE) for c in swarm.chain.certificates]
        assert f.settled == sum_credits(credited[:2])
        assert f.pending == sum_credits(credited[2:])


async def test_pending_credits_follow_the_chain_when_it_turns_and_settled_ones_stay(tmp_path):
    swarm = FakeSwarm(SPEC)
    async with following(swarm, tmp_path) as (f, until):
        rounds(swarm, DEPTH + 1)
        await until(lambda: f.posted is not None)
        held, settled = f.settled, dict(f.settled)
        other = swarm.chain.fork(1)
        for _ in range(DEPTH):
            other.add({5: 5000})
        swarm.turn_to(other)
        await until(lambda: peer(5).key in f.pending)
        assert set(f.pending) == {peer(5).key}
        assert f.settled == settled
        assert f.settled is held, "an open round costs no pass over all keys that ever earned"


async def test_a_coordinator_that_was_away_catches_up_and_counts_every_round_once(tmp_path):
    swarm = FakeSwarm(SPEC)
    for away in (0, 7, 400):  # 400: more than a page
        rounds(swarm, away)
        async with following(swarm, tmp_path) as (f, until):
            rounds(swarm, 2)
            total = len(swarm.chain.certificates)
            await until(lambda total=total: f.head and f.head[0] == total - 1)
            credited = [credits_of(c, RULE) for c in swarm.chain.certificates]
            cut = max(0, total - DEPTH)
            assert f.settled == sum_credits(credited[:cut])
            assert f.pending == sum_credits(credited[cut:])
            assert f.history.tokens == sum(c.tokens for c in credited[:cut])
    finals = [s.body.round for s in swarm.finals]
    assert finals == sorted(finals)


async def test_killed_between_settling_and_publishing_the_final_is_published_after_the_restart(tmp_path):
    swarm = FakeSwarm(SPEC)

    async def lost(final):
        raise OSError("no network")

    publish, swarm.publish_final = swarm.publish_final, lost
    async with following(swarm, tmp_path) as (f, until):
        rounds(swarm, DEPTH + 1)
        await until(lambda: f.posted is not None)
    assert not swarm.finals
    swarm.publish_final = publish
    async with following(swarm, tmp_path) as (f, until):
        await until(lambda: swarm.finals)
        assert swarm.finals[-1].body.record == f.posted[1]


async def test_rounds_whose_commit_was_not_acknowledged_are_not_forgotten(tmp_path, monkeypatch):
    swarm, lost = FakeSwarm(make_spec(total_tokens=5 * 1300 * SPEC.data.window)), []
    async with following(swarm, tmp_path) as (f, until):
        run = LedgerThread.run

        async def answer_lost(self, work):
            done = await run(self, work)
            if not lost and await run(self, lambda ledger: ledger.last()):
                lost.append(work)
                raise LedgerError("the connection was lost after the commit")
            return done

        monkeypatch.setattr(LedgerThread, "run", answer_lost)
        rounds(swarm, DEPTH + 1)
        await until(lambda: f.problem)
        assert f.posted is None and len(lost) == 1
        swarm.changed()
        await until(lambda: f.posted)
        assert len(f.history) == len(f.recent) == 1
        rounds(swarm, 1)
        await until(lambda: f.posted[0] == 4)  # the tokens of all rounds end the run


async def test_a_lost_ledger_is_made_again_from_the_chain_and_its_finals(tmp_path):
    swarm = FakeSwarm(SPEC)
    rounds(swarm, 10)
    deep = swarm.chain.certificates[8].record
    swarm.finals.append(KeySigner(OWNER).sign(Finalization(SPEC.run_id, deep.body.round, deep.digest)))
    async with following(swarm, tmp_path) as (f, until):
        await until(lambda: f.posted)
        assert f.posted == (8, deep.digest)
        assert swarm.finals == [swarm.finals[0]] * len(swarm.finals)


async def test_a_ledger_that_loses_its_last_commits_is_read_again_and_nobody_is_accused(tmp_path, caplog):
    """As when a replica takes over, or an older dump is restored, under a coordinator that runs."""
    swarm = FakeSwarm(SPEC)
    async with following(swarm, tmp_path) as (f, until):
        rounds(swarm, DEPTH + 2)
        await until(lambda: f.posted and f.posted[0] == 1)
        with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, closing(sqlite3.connect(":memory:")) as old:
            db.backup(old)
            rounds(swarm, 3)
            await until(lambda: f.posted and f.posted[0] == 4)
            old.backup(db)
        rounds(swarm, 1)
        await until(lambda: f.posted and f.posted[0] == 5)
        credited = [credits_of(c, RULE) for c in swarm.chain.certificates]
        assert f.settled == sum_credits(credited[:6]) and f.pending == sum_credits(credited[6:])
        assert len(f.history) == 6 and swarm.finals[-1].body.round == 5
        assert not f.problem and "cannot follow the chain" not in caplog.text
        with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
            assert db.execute("SELECT count(*) FROM rounds").fetchone() == (6,)


async def test_an_open_round_is_folded_once(tmp_path, monkeypatch):
    folded = []

    def counted(certificate, rule):
        folded.append(certificate.digest)
        return credits_of(certificate, rule)

    monkeypatch.setattr("coordinator.chain_indexer.credits_of", counted)
    swarm = FakeSwarm(SPEC)
    async with following(swarm, tmp_path) as (f, until):
        for _ in range(3):
            rounds(swarm, 1)
            await until(lambda: f.head and f.head[1] == swarm.head)
    assert len(folded) == 3


async def test_the_times_of_a_branch_that_lost_are_forgotten(tmp_path):
    swarm, clock = FakeSwarm(SPEC), [1000.0]
    async with following(swarm, tmp_path, lambda: clock[0]) as (f, until):
        rounds(swarm, 1)
        await until(lambda: len(f.first_seen) == 1)
        lost, other = swarm.head, swarm.chain.fork(0)
        other.add({5: 800}, attempt=1)
        clock[0] += 1
        swarm.turn_to(other)
        await until(lambda: len(f.first_seen) == 2)
        for _ in range(DEPTH):
            clock[0] += 1
            rounds(swarm, 1)
            await until(lambda: f.head and f.head[1] == swarm.head)
        await until(lambda: f.posted)
        assert lost not in f.first_seen and swarm.head in f.first_seen


async def test_a_verdict_outlives_the_ledger_that_is_made_again(tmp_path):
    swarm = FakeSwarm(HOLDING)
    rounds(swarm, DEPTH + 6)
    record = swarm.chain.certificates[-2].digest
    verdict = Verdict(record, peer(1).key, "too much")
    async with following(swarm, tmp_path, first=lambda f: f.indexer.note_verdicts([verdict])) as (f, until):
        await until(lambda: f.posted and f.posted[0] == 5)
        assert f.verdicts == (verdict,)


async def test_a_final_that_contradicts_the_ledger_is_said_loudly_and_nothing_is_settled(tmp_path, caplog):
    swarm = FakeSwarm(SPEC)
    async with following(swarm, tmp_path) as (f, until):
        rounds(swarm, DEPTH + 1)
        await until(lambda: f.posted is not None)
        before = dict(f.settled)
        other = FakeSwarm(SPEC)
        other.round({8: 9})
        record = other.chain.certificates[0].record
        swarm.finals.append(KeySigner(OWNER).sign(Finalization(SPEC.run_id, Round(0), record.digest)))
        rounds(swarm, 3)
        await until(lambda: f.problem)
        said = "another finalization with this run's key"  # as docs/operating.md names it
        assert said in f.problem and "Stop the other coordinator" in f.problem and said in caplog.text
        assert f.settled == before


async def test_a_chain_that_does_not_lead_on_from_the_ledger_is_waited_for(tmp_path):
    swarm = FakeSwarm(SPEC)
    async with following(swarm, tmp_path) as (f, until):
        rounds(swarm, DEPTH + 1)
        await until(lambda: f.posted is not None)
        good, stranger = swarm.chain, FakeSwarm(SPEC)
        rounds(stranger, 9, attempt=1)
        swarm.turn_to(stranger.chain)
        await until(lambda: f.problem)
        assert "waiting for the chain after round 0" in f.problem and not f.caught_up
        swarm.turn_to(good)
        await until(lambda: not f.problem)


async def test_a_view_that_gives_no_chain_settles_nothing(tmp_path, caplog):
    swarm = FakeSwarm(SPEC)
    async with following(swarm, tmp_path) as (f, until):
        whole = swarm.certificates_after

        async def holes(record, limit):
            got = await whole(record, limit)
            return got[1:] if got else got

        swarm.certificates_after = holes
        rounds(swarm, DEPTH + 2)
        await until(lambda: f.problem)
        assert "not a chain" in caplog.text and f.posted is None


async def test_the_times_of_rounds_survive_a_restart(tmp_path):
    swarm, clock = FakeSwarm(SPEC), [1000.0]
    async with following(swarm, tmp_path, lambda: clock[0]) as (f, until):
        for _ in range(DEPTH + 3):
            clock[0] += 10
            rounds(swarm, 1)
            await until(lambda: f.head and f.head[1] == swarm.head)
        before = f.points()
    clock[0] = 9000.0
    async with following(swarm, tmp_path, lambda: clock[0]) as (f, until):
        assert f.points() == before
        assert all(p.seen_at is not None for p in before)


def test_the_rate_is_of_accepted_tokens_and_falls_when_no_round_comes():
    points = [RoundPoint(r, 1000 * (r + 1), 5.0, 100.0 + 10 * r) for r in range(10)]
    assert tokens_per_second(points, 190.0) == pytest.approx(100)
    assert tokens_per_second(points, 195.0) == pytest.approx(100)
    assert tokens_per_second(points, 600.0) < 20
    assert tokens_per_second(points[:1], 100.0) == 0
    assert tokens_per_second([RoundPoint(0, 1, 1.0, None)] * 3, 1.0) == 0


def test_charts_are_thinned_and_keep_the_mean_by_tokens():
    points = [RoundPoint(r, 10 * (r + 1), float(r), None if r == 5 else float(r)) for r in range(5000)]
    c = charts(points, limit=100)
    assert len(c.tokens) == len(c.loss) == 100 and len(c.times) == len(c.rates) <= 100
    assert c.tokens[-1] == 50_000
    assert sum(c.loss) / 100 == pytest.approx(4999 / 2)
    assert all(r == pytest.approx(10) for r in c.rates)
    assert charts([]).tokens == []


async def test_nothing_is_final_whose_state_the_observer_does_not_hold(tmp_path):
    """Else an owner, split off with a peer that withholds its updates, would bind the swarm to what nobody can have."""
    swarm = FakeSwarm(SPEC)
    swarm.held = 1
    async with following(swarm, tmp_path) as (f, until):
        rounds(swarm, DEPTH + 4)
        await until(lambda: len(f.open) == DEPTH + 3)
        assert f.posted is not None and f.posted[0] == 0
        swarm.held = 3
        swarm.changed()
        await until(lambda: f.posted and f.posted[0] == 2)
        assert swarm.finals[-1].body.round == 2


async def test_only_what_most_of_the_stake_is_for_becomes_final(tmp_path):
    """Else an owner that only receives a lone certifier's records would sign its branch."""
    swarm = FakeSwarm(SPEC)
    async with following(swarm, tmp_path) as (f, until):
        rounds(swarm, DEPTH + 1)
        await until(lambda: f.posted and f.posted[0] == 0)
        swarm.unbacked = {c.digest for c in swarm.chain.certificates[2:]}
        rounds(swarm, 3)
        await until(lambda: len(f.open) == DEPTH + 2)
        assert f.posted is not None and f.posted[0] == 1 and swarm.finals[-1].body.round == 1
        swarm.unbacked.clear()
        swarm.changed()
        await until(lambda: f.posted and f.posted[0] == 3)


async def test_a_record_without_most_of_the_stake_waits_for_the_hold_and_then_what_followed_is_final(tmp_path):
    """If most of the stake left at once, nothing would ever be final again."""
    swarm, now = FakeSwarm(SPEC), 0.0
    async with following(swarm, tmp_path, waited=lambda: now) as (f, until):
        rounds(swarm, DEPTH + 4)
        swarm.unbacked = {swarm.chain.certificates[1].digest}
        await until(lambda: f.posted and f.posted[0] == 0)
        now = f.finalizer.patience - 1
        swarm.changed()
        await until(lambda: len(f.open) == DEPTH + 3)
        assert f.posted is not None and f.posted[0] == 0
        now += 2
        swarm.changed()
        await until(lambda: f.posted and f.posted[0] == 3)


async def test_the_last_rounds_of_a_run_that_is_over_become_final(tmp_path):
    swarm = FakeSwarm(make_spec(total_tokens=5 * 1300 * SPEC.data.window))
    async with following(swarm, tmp_path) as (f, until):
        swarm.held = 4
        rounds(swarm, 5)
        await until(lambda: len(f.open) + (f.posted[0] + 1 if f.posted else 0) == 5)
        assert f.open
        swarm.held = 5
        swarm.changed()
        await until(lambda: f.posted and f.posted[0] == 4)
        assert not f.open and not f.pending


async def test_a_run_is_over_when_it_has_its_tokens_without_voided_ones(tmp_path):
    swarm, window = FakeSwarm(make_spec(total_tokens=5 * 1300 * SPEC.data.window)), SPEC.data.window
    async with following(swarm, tmp_path) as (f, until):
        rounds(swarm, 1)
        rounds(swarm, 1, voided=1000)
        rounds(swarm, 3)
        await until(lambda: f.head and f.head[0] == 4)
        assert f.progress == 5500 * window and f.points()[-1].tokens == 6500 * window
        rounds(swarm, DEPTH)
        await until(lambda: f.posted and f.posted[0] == DEPTH + 4)
        assert f.history.progress == f.progress == (1300 * (5 + DEPTH) - 1000) * window
    async with following(swarm, tmp_path) as (f, until):
        assert f.progress == (1300 * (5 + DEPTH) - 1000) * window


# -- settling, verdicts, rollback -------------------------------------------------------------------------------

HOLDING = make_spec(credit={"hold_rounds": 2})


async def test_final_rounds_are_pending_until_they_were_held_long_enough(tmp_path):
    swarm = FakeSwarm(HOLDING)
    credited = []
    for rounds_more in (DEPTH + 4, 3):  # the second time after a restart
        rounds(swarm, rounds_more)
        credited = [credits_of(c, RULE) for c in swarm.chain.certificates]
        async with following(swarm, tmp_path) as (f, until):
            await until(lambda: f.head and f.head[1] == swarm.head)
            posted = len(credited) - DEPTH
            assert f.posted == (posted - 1, credited[posted - 1].record)
            assert f.settled == sum_credits(credited[: posted - 2])
            assert f.pending == sum_credits(credited[posted - 2 :])
            assert not any(b.voided.rounds for b in f.balances.values())


def test_when_the_clock_was_set_back_nobody_is_judged_by_it():
    spec = make_spec(credit={"hold_rounds": 9, "max_teraflops_per_second": 1})
    swarm = FakeSwarm(spec)
    swarm.round({0: 900_000_000 // spec.data.window})
    certificate, who, judge = swarm.chain.certificates[0], peer(0).key, PlausibilityCheck(spec)
    assert len(judge.verdicts(certificate, 10_000.0, {who: 9_990.0})) == 1
    assert judge.verdicts(certificate, 10_000.0, {who: 13_000.0}) == []


def test_an_update_is_judged_by_what_it_claims_and_not_by_its_weight():
    """Weighed windows may be of earlier rounds, and a claim that is weighed later must be true, too."""
    spec = make_spec(credit={"hold_rounds": 9, "max_teraflops_per_second": 1})
    swarm, much = FakeSwarm(spec), 900_000_000 // spec.data.window
    swarm.round({0: 600, 1: much})
    certificate, keys = swarm.chain.certificates[0], [peer(n).key for n in (0, 1)]
    weights = tuple(much if u.author == keys[0] else 600 for u in certificate.record.body.updates)
    record = replace(certificate.record, body=replace(certificate.record.body, weights=weights))
    found = PlausibilityCheck(spec).verdicts(replace(certificate, record=record), 20.0, dict.fromkeys(keys, 0.0))
    assert [(v.record, v.peer) for v in found] == [(certificate.digest, keys[1])]


async def test_what_nobody_can_have_done_is_voided_with_the_numbers_and_only_at_first_hand(tmp_path):
    # A peer of 28,832 parameters and 6 FLOPs: 10^12 FLOPs a second are 5.8 million tokens.
    spec = make_spec(credit={"hold_rounds": 9, "max_teraflops_per_second": 1})
    swarm, clock = FakeSwarm(spec), [10_000.0]
    too_much = 900_000_000 // spec.data.window
    swarm.round({0: too_much, 1: 600})  # before this coordinator was there: not judged
    ledger = LedgerThread()
    await ledger.open(tmp_path / "ledger.sqlite", spec)
    for n, at in ((2, 9_000), (3, 9_990)):
        await ledger.run(lambda db, n=n, at=at: db.add_admission(AdmissionRow(peer(n).key, "", at, at, 2 * at, b"")))
    await ledger.close()
    async with following(swarm, tmp_path, lambda: clock[0]) as (f, until):

        async def one(work):
            clock[0] += 20
            swarm.round(work)
            await until(lambda: f.head and f.head[1] == swarm.head)

        # 2 was admitted long ago, 3 just now, of 4 nothing is known: it cannot be judged.
        await one({0: 600, 2: too_much, 3: too_much, 4: too_much})
        await one({0: 600, 4: too_much})
        await one({0: 600, 4: 600})
        for _ in range(DEPTH):
            await one({0: 600})
        records = [c.digest for c in swarm.chain.certificates]
        verdicts = f.verdicts
        assert [(v.record, v.peer) for v in verdicts] == [(records[1], peer(3).key), (records[2], peer(4).key)]
        assert verdicts[0].reason == "1.42 teraflops a second over 110 s: at most 1 are believed"
        assert "over 100 s" in verdicts[1].reason and not any(b.voided.rounds for b in f.balances.values())
    async with following(swarm, tmp_path, lambda: clock[0]) as (f, until):
        assert f.verdicts == verdicts  # a restart forgets none
        swarm.chain.carry(
            KeySigner(OWNER).sign(Directive(spec.run_id, 1, verdicts=tuple(sorted(verdicts, key=_place))))
        )
        for _ in range(DEPTH + 1):
            swarm.round({0: 600})
        await until(lambda: f.head and f.head[1] == swarm.head)
        assert {p: b.voided.rounds for p, b in f.balances.items() if b.voided.rounds} == {
            peer(3).key: 1,
            peer(4).key: 1,
        }
        assert f.pending[peer(2).key].rounds == 1 and f.pending[peer(4).key].rounds == 2 and f.verdicts == ()


async def test_a_key_whose_admission_was_forgotten_is_judged_by_the_admission_in_its_header(tmp_path):
    spec = make_spec(credit={"hold_rounds": 9, "max_teraflops_per_second": 1})
    swarm, too_much = FakeSwarm(spec), 900_000_000 // spec.data.window
    swarm.round({0: 600})
    swarm.chain.admitted_at = {peer(1).key: 9_990, peer(2).key: 9_000}
    async with following(swarm, tmp_path, lambda: 10_000.0) as (f, until):
        swarm.round({0: 600, 1: too_much, 2: too_much})
        await until(lambda: f.head and f.head[1] == swarm.head)
        assert [v.peer for v in f.verdicts] == [peer(1).key]


async def test_updates_are_judged_after_a_failed_write_and_by_the_time_before_it(tmp_path, monkeypatch, caplog):
    spec = make_spec(credit={"hold_rounds": 9, "max_teraflops_per_second": 1})
    swarm, clock, failed, add = FakeSwarm(spec), [10_000.0], [], Ledger.add_verdicts

    def full_once(ledger, round_, verdicts):
        if not failed:
            failed.append(round_)
            raise LedgerError("the disk of /runs is full")
        add(ledger, round_, verdicts)

    swarm.round({0: 600})
    swarm.chain.admitted_at = {peer(1).key: 9_990}
    async with following(swarm, tmp_path, lambda: clock[0]) as (f, until):
        monkeypatch.setattr(Ledger, "add_verdicts", full_once)
        swarm.round({0: 600, 1: 900_000_000 // spec.data.window})
        await until(lambda: f.problem)
        assert "the disk of /runs is full" in caplog.text and "/runs" not in f.problem  # anybody reads it
        clock[0] += 3000
        swarm.changed()
        await until(lambda: f.head and f.head[1] == swarm.head)
        assert [(v.peer, "over 90 s" in v.reason) for v in f.verdicts] == [(peer(1).key, True)]
        assert f.first_seen[swarm.head] == 10_000


def _place(v):
    return v.record, v.peer


async def test_after_a_rollback_the_ledger_follows_the_new_branch_and_keeps_what_was_issued(tmp_path):
    swarm = FakeSwarm(HOLDING)
    async with following(swarm, tmp_path) as (f, until):
        rounds(swarm, DEPTH + 4)
        await until(lambda: f.posted and f.posted[0] == 3)
        old = [credits_of(c, RULE) for c in swarm.chain.certificates]
        swarm.finals.clear()
        back = Rollback(1, old[1].record, Round(2), state(2))
        assert await f.rollback(back)
        assert await f.rollback(back) is False
        assert f.posted == (1, old[1].record) and len(f.history) == 2
        first_branch, other = swarm.chain.certificates, swarm.chain.fork(2)
        for r in range(DEPTH + 2):
            other.add({5: 800 + r}, attempt=1)
        swarm.turn_to(other)
        await until(lambda: f.posted and f.posted[0] == 3)
        new = [credits_of(c, RULE) for c in other.certificates]
        assert f.posted[1] == new[3].record and not f.problem
        assert f.settled == sum_credits(old[:4])
        assert f.pending == sum_credits(new[2:])
        with pytest.raises(LedgerConflictError, match="no such record is on the branch"):
            await f.rollback(Rollback(2, old[2].record, Round(3), state(3)))
    async with following(swarm, tmp_path) as (f, until):
        assert f.posted == (3, new[3].record) and f.settled == sum_credits(old[:4])
        before = f.balances
    for file in tmp_path.glob("ledger.sqlite*"):
        file.unlink()
    swarm.left = first_branch
    async with following(swarm, tmp_path, first=lambda f: f.post_abandoned(old[3].record, back)) as (f, until):
        await until(lambda: f.posted and f.posted[0] == 3)
        assert f.balances == before


async def test_a_rollback_whose_commit_was_not_acknowledged_is_followed_when_it_is_repeated(tmp_path, monkeypatch):
    swarm, run, lost = FakeSwarm(HOLDING), LedgerThread.run, []
    async with following(swarm, tmp_path) as (f, until):
        rounds(swarm, DEPTH + 4)
        await until(lambda: f.posted and f.posted[0] == 3)
        back = Rollback(1, swarm.chain.certificates[1].digest, Round(2), state(2))

        async def answer_lost(self, work):
            done = await run(self, work)
            if not lost and await run(self, lambda ledger: ledger.epoch()):
                lost.append(work)
                raise LedgerError("the connection was lost after the commit")
            return done

        monkeypatch.setattr(LedgerThread, "run", answer_lost)
        with pytest.raises(LedgerError, match="after the commit"):
            await f.rollback(back)
        await f.rollback(back)
        assert f.posted == (1, back.record) and len(f.history) == 2
