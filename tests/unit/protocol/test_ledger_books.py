"""The ledger as written down: settlements, verdicts, rollbacks. The same in both databases."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from coordinator.errors import LedgerConflictError, LedgerError
from coordinator.ledger import BindingRow, Ledger, RefusedUpdate, store
from coordinator.ledger.store import connect
from protocol.ids import Digest, Round
from protocol.ledger.credits import CreditRule, credits_of, sum_credits
from protocol.message_codec import KeySigner
from protocol.messages import Directive, Rollback, Verdict
from tests.support import postgres_world
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.specs import OWNER

SPEC = make_spec(credit={"hold_rounds": 2})
RULE = CreditRule.of(SPEC)


def settled_in(ledger: Ledger):
    """Return what every peer has settled."""
    return {peer: b.settled for peer, b in ledger.balances().items() if b.settled.rounds}


def chain_of(rounds: int) -> ChainMaker:
    chain = ChainMaker(SPEC)
    for r in range(rounds):
        chain.add({n: 5000 + 100 * n + r for n in range(3)})
    return chain


def credits_in(chain: ChainMaker):
    return [credits_of(c, RULE) for c in chain.certificates]


def back(record: Digest, round_: int, epoch: int = 1) -> Rollback:
    return Rollback(epoch, record, Round(round_), state(round_))


def carry(chain: ChainMaker, sequence: int, verdicts: tuple[Verdict, ...], rollback: Rollback | None = None) -> None:
    """Let the next record carry a directive."""
    body = Directive(SPEC.run_id, sequence, rollback=rollback, verdicts=verdicts)
    chain.carry(KeySigner(OWNER).sign(body))


@pytest.fixture
def ledger(ledger_place):
    opened = Ledger(ledger_place, SPEC)
    yield opened
    assert opened.check() == []
    opened.close()


def again(ledger: Ledger, where: str) -> Ledger:
    """Return the ledger that a new process reads."""
    ledger.close()
    ledger.__init__(where, SPEC)  # the fixture closes this one
    return ledger


def test_credit_is_pending_until_enough_rounds_are_posted_after_it(ledger, ledger_place):
    rounds = credits_in(chain_of(5))
    for credits in rounds:
        ledger.post(credits)
        ledger = again(ledger, ledger_place)
    assert (ledger.size(), ledger.settled_count()) == (5, 3)
    assert settled_in(ledger) == sum_credits(rounds[:3])
    standing = ledger.balances()[peer(1).key]
    assert standing.pending == sum_credits(rounds[3:])[peer(1).key] and not standing.voided.rounds
    assert [e.status for e in ledger.history_of(peer(1).key)] == ["pending"] * 2 + ["settled"] * 3
    assert [e.number for e in ledger.history_of(peer(1).key, limit=2)] == [4, 3]
    assert [e.number for e in ledger.history_of(peer(1).key, before=3)] == [2, 1, 0]


def test_a_verdict_voids_a_line_while_it_is_pending_and_never_after(ledger, ledger_place):
    chain = chain_of(2)
    first, second = credits_in(chain)
    lost = second.lines[0]
    ledger.add_verdicts(second.round, [Verdict(second.record, lost.peer, "too fast")] * 2)
    assert [v.peer for v in ledger.verdicts(9, [first, second])] == [lost.peer]
    for credits in (first, second):
        ledger.post(credits)
    assert len(ledger.verdicts(9)) == 1  # no record carries it yet
    carry(chain, 1, ledger.verdicts(9))
    chain.add({1: 50})
    ledger = again(ledger, ledger_place)
    ledger.post(credits_in(chain)[2])
    assert ledger.verdicts(9) == ()
    late = (Verdict(first.record, first.lines[1].peer, "too late"), Verdict(second.record, lost.peer, "twice"))
    carry(chain, 2, tuple(sorted(late, key=lambda v: (v.record, v.peer))))
    chain.add({1: 60})
    ledger.post(credits_in(chain)[3])
    b = ledger.balances()[lost.peer]
    assert (b.voided.micro_credits, b.voided.rounds) == (lost.micro_credits, 1)
    assert b.settled.micro_credits == first.lines[0].micro_credits
    assert [e.status for e in ledger.history_of(lost.peer)][-2:] == ["voided", "settled"]
    assert ledger.balances()[first.lines[1].peer].voided.rounds == 0
    assert ledger.credited(1, 1)[0].voided == {0: 2}


def test_verdicts_that_never_came_into_the_chain_are_forgotten(ledger, ledger_place):
    chain = chain_of(6)
    for credits in credits_in(chain):
        ledger.add_verdicts(credits.round, [Verdict(credits.record, credits.lines[0].peer, "too fast")])
        lost = Digest(bytes([credits.round]) * 32)
        ledger.add_verdicts(credits.round, [Verdict(lost, peer(0).key, "another branch")])
        ledger.post(credits)
    rounds = credits_in(chain)
    assert [v.record for v in ledger.verdicts(99)] == [a.record for a in rounds[-len(ledger.verdicts(99)) :]]
    assert rounds[5].record in {v.record for v in ledger.verdicts(99)} and len(ledger.verdicts(1)) == 1
    with closing(connect(ledger_place, SPEC, reader=True)) as found:
        stored = {bytes(r[0]) for r in found.query("SELECT record FROM verdicts")}
    assert bytes([0]) * 32 not in stored and bytes([5]) * 32 in stored


def test_verdicts_of_forks_and_those_that_the_branch_carries_crowd_out_no_other(ledger):
    """Up to 64 verdicts are given at once: only those that can still void something on this branch count."""
    chain = chain_of(1)
    ledger.post(credits_in(chain)[0])
    for n in range(70):
        ledger.add_verdicts(Round(1), [Verdict(Digest(bytes([n]) * 32), peer(0).key, "a fork that is never final")])
    chain.add({n: 40 + n for n in range(70)})
    wrong = credits_in(chain)[1]
    ledger.add_verdicts(Round(1), [Verdict(wrong.record, line.peer, "too fast") for line in wrong.lines])
    first = ledger.verdicts(64, [wrong])
    assert len(first) == 64 and {v.record for v in first} == {wrong.record}
    carry(chain, 1, first)
    chain.add({1: 50})
    following = credits_in(chain)[2]
    rest = ledger.verdicts(64, [wrong, following])
    assert len(rest) == 6 and not set(rest) & set(first)
    assert ledger.verdicts(64, [wrong]) == first  # on a branch without that record they are due again


def test_after_a_rollback_the_chain_goes_on_elsewhere_and_what_was_issued_stays(ledger, ledger_place):
    chain = chain_of(4)
    rounds = credits_in(chain)
    for credits in rounds:
        ledger.post(credits)
    rollback = back(rounds[1].record, 2)
    assert ledger.rollback(rollback)
    assert ledger.rollback(rollback) is False and ledger.epoch() == 1
    ledger = again(ledger, ledger_place)
    assert ledger.last() == (1, rounds[1].record)
    with pytest.raises(LedgerConflictError, match="rolled back"):
        ledger.post(rounds[2])
    other = chain.fork(2)
    for r in range(3):
        other.add({5: 9000 + r}, attempt=1)
    for credits in credits_in(other):
        ledger.post(credits)
    # The owner's next directive names the rollback again: what came after it stays.
    assert ledger.rollback(rollback) is False
    assert ledger.round_credits(limit=9) == credits_in(other)
    assert [r.round for r in ledger.rounds()] == [0, 1, 2, 3, 4]
    # All of the branch that was left settled by the count of rounds, like any other.
    assert settled_in(ledger)[peer(0).key] == sum_credits(rounds)[peer(0).key]
    with pytest.raises(LedgerConflictError, match="no such record is on the branch"):
        ledger.rollback(back(rounds[3].record, 4, 2))


def test_all_settles_when_the_run_has_its_tokens(tmp_path):
    chain = chain_of(5)
    spec = make_spec(credit={"hold_rounds": 2}, total_tokens=sum(a.tokens for a in credits_in(chain)))
    rule, chain = CreditRule.of(spec), ChainMaker(spec)
    for r in range(5):
        chain.add({n: 5000 + 100 * n + r for n in range(3)})
    ledger = Ledger(tmp_path / "ledger.sqlite", spec)
    for c in chain.certificates:
        ledger.post(credits_of(c, rule))
    assert ledger.settled_count() == ledger.size() == 5
    assert not any(s.pending.rounds for s in ledger.balances().values()) and ledger.check() == []
    ledger.close()


def test_the_index_is_made_again_from_the_certificates(ledger_place, tmp_path):
    """Also what verdicts voided, and what a rollback left."""
    chain = chain_of(3)
    left = credits_in(chain)
    carry(chain, 1, (Verdict(left[2].record, peer(1).key, "too fast"),))
    chain.add({2: 70})
    left = credits_in(chain)
    other = chain.fork(2)
    carry(other, 2, (), back(left[1].record, 2))
    for r in range(4):
        other.add({5: 9000 + r}, attempt=1)
    answers = []
    for where in (ledger_place, str(tmp_path / "again.sqlite")):
        ledger = Ledger(where, SPEC)
        for credits in [*left, *credits_in(other)[2:]]:  # the rollback follows from the record that carries it
            ledger.post(credits)
        answers.append((ledger.balances(), ledger.last(), ledger.round_credits(limit=99), ledger.settled_count(),
                        [[x.status for x in ledger.history_of(peer(n).key)] for n in range(6)],
                        [replace(r, time=0) for r in ledger.credited(0, 99)]))  # fmt: skip
        assert ledger.check() == [] and ledger.balances()[peer(1).key].voided.rounds == 1
        ledger.close()
    assert answers[0] == answers[1]


def test_a_clock_that_was_set_back_writes_the_time_of_the_round_before(ledger_place):
    clock = [5000.0]
    ledger = Ledger(ledger_place, SPEC, now=lambda: clock[0])
    for credits in credits_in(chain_of(4)):
        ledger.post(credits)
        clock[0] -= 1000
    assert {r.time for r in ledger.credited(0, 100)} == {5_000_000}
    assert ledger.check() == []
    ledger.close()


def test_refusals_are_bounded_for_each_peer_and_in_all(ledger, monkeypatch):
    monkeypatch.setattr("coordinator.ledger.store.MAX_REFUSALS_OF_PEER", 3)
    monkeypatch.setattr("coordinator.ledger.store.MAX_REFUSALS", 8)
    (credits,) = credits_in(chain_of(1))
    ledger.post(credits)

    def refuse(number: int, of: int) -> None:
        update = Digest(bytes([of, number]) + bytes(30))
        ledger.add_refusal(RefusedUpdate(credits.round, credits.parent, credits.record, peer(of).key, update, "", 1.0))

    def kept(of: int) -> list[int]:
        return sorted(r.update[1] for _, r in ledger.refused(peer(of).key))

    refuse(0, 2)
    for n in range(6):
        refuse(n, 1)
    assert kept(1) == [3, 4, 5] and kept(2) == [0]
    for n in range(3):
        refuse(n, 3)
        refuse(n, 4)
    assert kept(3) == kept(4) == [0, 1, 2] and kept(2) == [] and len(kept(1)) == 2


def test_refusals_of_records_that_never_became_final_are_deleted(ledger, ledger_place):
    chain = chain_of(4)
    rounds = credits_in(chain)
    for credits in rounds:
        for record in (credits.record, Digest(bytes([credits.round]) * 32)):
            ledger.add_refusal(
                RefusedUpdate(credits.round, credits.parent, record, peer(8).key, Digest(bytes(32)), "late", 1.0)
            )
        ledger.post(credits)
    with closing(connect(ledger_place, SPEC, reader=True)) as found:
        stored = {bytes(r[0]) for r in found.query("SELECT record FROM refusals")}
    hold = SPEC.credit.hold_rounds
    assert {bytes(a.record) for a in rounds} <= stored
    assert {r[0] for r in stored if len(set(r)) == 1} == set(range(4 - hold, 4))


def test_refusals_and_bindings_are_kept_in_order(ledger):
    rounds = credits_in(chain_of(2))
    for credits in rounds:
        ledger.post(credits)
    who = peer(8).key
    first, second = (RefusedUpdate(a.round, a.parent, a.record, who, Digest(bytes(32)), "late", 3.5) for a in rounds)
    assert ledger.add_refusal(first) and ledger.add_refusal(second) and not ledger.add_refusal(first)
    (number, newest), (_, oldest) = ledger.refused(who)
    assert (newest, oldest) == (second, first) and [r for _, r in ledger.refused(who, before=number)] == [first]
    assert ledger.refused(peer(0).key) == []
    words = [BindingRow(who, peer(n).key, n, b"word") for n in (1, 2)]
    for word in words:
        ledger.add_binding(word)
    assert ledger.bindings() == words


def test_two_processes_with_one_ledger_do_not_double_a_round(ledger, ledger_place):
    rounds = credits_in(chain_of(6))
    second = Ledger(ledger_place, SPEC)
    for i, credits in enumerate(rounds):
        assert (ledger, second)[i % 2].post(credits)
        assert not (second, ledger)[i % 2].post(credits)
    assert second.balances() == ledger.balances() and second.check() == []
    second.close()


def test_a_transaction_that_fails_leaves_nothing_in_memory_either(ledger):
    rounds = credits_in(chain_of(3))
    ledger.post(rounds[0])
    with pytest.raises(RuntimeError):
        with ledger.group():
            ledger.post(rounds[1])
            raise RuntimeError("the machine is on fire")
    assert ledger.last() == (0, rounds[0].record) and ledger.size() == 1
    with ledger.group():
        ledger.post(rounds[1])
        with pytest.raises(LedgerConflictError):
            ledger.post(stranger())
        ledger.post(rounds[2])
    assert ledger.last() == (2, rounds[2].record)


def stranger():
    """Round 0 of another chain."""
    other = ChainMaker(SPEC)
    other.add({7: 1}, attempt=3)
    return credits_in(other)[0]


CHANGES = [
    "UPDATE lines SET windows = windows + 1 WHERE line = 1 AND number = 4",
    "UPDATE lines SET micro_credits = micro_credits + 1 WHERE number = 4 AND line = 1",
    "DELETE FROM lines WHERE number = 4",
    "UPDATE rounds SET tokens = tokens + 1 WHERE number = 3",
    "UPDATE rounds SET on_branch = 0 WHERE number = 3",
    "UPDATE rounds SET parent = record WHERE number = 3",
]
OF_ALL = [
    "UPDATE lines SET voided_by = 3 WHERE number = 1 AND line = 1",
    "UPDATE balances SET settled_micro = settled_micro + 1",
    "DELETE FROM balances WHERE peer = 1",
    "UPDATE state SET settled = settled - 1",
]


@pytest.mark.parametrize("change", CHANGES + OF_ALL)
def test_what_does_not_add_up_is_said_at_the_start(ledger_place, change):
    posted_and_altered(ledger_place, change)
    with pytest.raises(LedgerError, match="is damaged: .*computed again from the chain"):
        Ledger(ledger_place, SPEC)


@pytest.mark.parametrize("change", CHANGES)
def test_of_a_large_ledger_the_newest_rounds_are_checked(tmp_path, monkeypatch, change):
    monkeypatch.setattr(store, "CHECKED_LINES", 0)
    place = str(tmp_path / "ledger.sqlite")
    posted_and_altered(place, change)
    with pytest.raises(LedgerError, match="is damaged: .*computed again from the chain"):
        Ledger(place, SPEC)


def posted_and_altered(place: str, change: str) -> None:
    """Five rounds, and then what an operator with the database's own tools can do."""
    ledger = Ledger(place, SPEC)
    for credits in credits_in(chain_of(5)):
        ledger.post(credits)
    ledger.close()
    Ledger(place, SPEC).close()
    db = connect(place, SPEC)
    db.query(change)
    db.close()


def test_a_connection_that_is_lost_is_an_error_once_and_then_made_again(postgres_url):
    import psycopg

    with postgres_world.empty_database(postgres_url) as where:
        ledger, rounds = Ledger(where, SPEC), credits_in(chain_of(3))
        reader = Ledger(where, SPEC, reader=True)
        ledger.post(rounds[0])
        with psycopg.connect(postgres_url, autocommit=True) as db:
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'ledger_%'")
        with pytest.raises(LedgerError, match="check that the server runs"):
            ledger.post(rounds[1])
        with pytest.raises(LedgerError):
            reader.size()
        assert reader.size() == 1
        assert ledger.post(rounds[1]) and ledger.post(rounds[2]) and ledger.check() == []
        ledger.close()
        reader.close()


def test_a_server_that_is_not_there_is_said_without_the_password():
    if reason := postgres_world.missing():
        pytest.skip(reason)
    with pytest.raises(LedgerError, match="check that the server runs") as e:
        Ledger("postgresql://cairn:secret@127.0.0.1:1/nothing", SPEC)
    assert "secret" not in str(e.value)
    with pytest.raises(LedgerError, match="is no address of a ledger"):
        Ledger("mysql://somewhere", SPEC)
