"""The ledger as written down: settlements, verdicts, rollbacks, the tree. The same in both databases."""

from __future__ import annotations

import pytest

from coordinator.errors import LedgerConflictError, LedgerError
from coordinator.ledger import BindingRow, Ledger, RefusedUpdate, TreeHeadRow, integrity
from coordinator.ledger.store import connect
from protocol.ids import Digest, Round
from protocol.ledger.credits import CreditRule, credits_of, sum_credits
from protocol.ledger.entries import decode_entry, decode_line
from protocol.ledger.state import LedgerState
from protocol.ledger.void_orders import VoidOrder, seal_void_order
from protocol.merkle import leaf_hash, tree_hash
from tests.support import postgres_world
from tests.support.coordinator_fakes import ChainMaker, back_to, make_spec, peer
from tests.support.specs import OWNER, identity

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


def accounts_of(chain: ChainMaker):
    return [credits_of(c, RULE) for c in chain.certificates]


def verdict_on(account, i: int, reason: str = "too much for the time it had", by=OWNER) -> bytes:
    line = account.lines[i]
    return seal_void_order(
        by, VoidOrder(SPEC.run_id, account.round, account.record, line.peer, line.update, reason)
    ).encoded


def kinds(ledger: Ledger) -> list[str]:
    return [decode_entry(sent).kind for sent in ledger.entries(0, 1000)]


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
    accounts = accounts_of(chain_of(5))
    for account in accounts:
        ledger.post(account)
        ledger = again(ledger, ledger_place)
    assert kinds(ledger) == ["round"] * 3 + ["settle", "round", "settle", "round", "settle"]
    assert settled_in(ledger) == sum_credits(accounts[:3])
    standing = ledger.balances()[peer(1).key]
    assert standing.pending == sum_credits(accounts[3:])[peer(1).key] and not standing.voided.rounds
    assert [e.status for e in ledger.history_of(peer(1).key)] == ["pending"] * 2 + ["settled"] * 3
    assert [e.number for e in ledger.history_of(peer(1).key, limit=2)] == [4, 3]
    first = ledger.history_of(peer(1).key, limit=2)[-1].entry
    assert [e.number for e in ledger.history_of(peer(1).key, before=first)] == [2, 1, 0]


def test_a_verdict_voids_a_line_while_it_is_pending_and_never_after(ledger, ledger_place):
    accounts = accounts_of(chain_of(4))
    for account in accounts[:2]:
        ledger.post(account)
    ledger.void(verdict_on(accounts[1], 0))
    ledger = again(ledger, ledger_place)
    with pytest.raises(LedgerConflictError, match="voided already"):
        ledger.void(verdict_on(accounts[1], 0))
    for account in accounts[2:]:
        ledger.post(account)
    with pytest.raises(LedgerConflictError, match="what is settled stays"):
        ledger.void(verdict_on(accounts[1], 1))
    with pytest.raises(LedgerConflictError, match="does not own the run"):
        ledger.void(verdict_on(accounts[3], 1, by=identity("stranger")))
    lost = accounts[1].lines[0]
    standing = ledger.balances()[lost.peer]
    assert (standing.voided.micro_credits, standing.voided.rounds) == (lost.micro_credits, 1)
    assert standing.settled.micro_credits == accounts[0].lines[0].micro_credits
    assert [e.status for e in ledger.history_of(lost.peer)] == ["pending", "pending", "voided", "settled"]
    assert kinds(ledger) == ["round", "round", "void", "round", "settle", "round", "settle"]


def test_after_a_rollback_the_chain_goes_on_elsewhere_and_what_was_issued_stays(ledger, ledger_place):
    chain = chain_of(4)
    accounts = accounts_of(chain)
    for account in accounts:
        ledger.post(account)
    word, later = (back_to(SPEC, accounts[1].record, 1, sequence=n) for n in (1, 2))
    assert ledger.rollback(accounts[1].record, Round(1), word)
    assert ledger.rollback(accounts[1].record, Round(1), word) is False
    ledger = again(ledger, ledger_place)
    assert ledger.last() == (1, accounts[1].record)
    with pytest.raises(LedgerConflictError, match="rolled back"):
        ledger.post(accounts[2])
    other = chain.fork(2)
    for r in range(3):
        other.add({5: 9000 + r}, attempt=1)
    for account in accounts_of(other):
        ledger.post(account)
    # The owner's next word names the rollback again: what came after it stays.
    assert ledger.rollback(accounts[1].record, Round(1), later) is False
    assert ledger.accounts(limit=9) == accounts_of(other)
    assert [r.round for r in ledger.rounds()] == [0, 1, 2, 3, 4]
    # All of the branch that was left settled by the count of rounds, like any other.
    assert settled_in(ledger)[peer(0).key] == sum_credits(accounts)[peer(0).key]
    with pytest.raises(LedgerConflictError, match="branch has no such round"):
        ledger.rollback(accounts[3].record, Round(3), back_to(SPEC, accounts[3].record, 3, 2))
    with pytest.raises(LedgerConflictError, match="not signed by the run's owner"):
        ledger.rollback(accounts[1].record, Round(1), back_to(SPEC, accounts[1].record, 1, 2, by=identity("x")))


def test_all_settles_when_the_run_has_its_tokens(tmp_path):
    chain = chain_of(5)
    spec = make_spec(credit={"hold_rounds": 2}, total_tokens=sum(a.tokens for a in accounts_of(chain)))
    rule, chain = CreditRule.of(spec), ChainMaker(spec)
    for r in range(5):
        chain.add({n: 5000 + 100 * n + r for n in range(3)})
    ledger = Ledger(tmp_path / "ledger.sqlite", spec)
    for c in chain.certificates:
        ledger.post(credits_of(c, rule))
    assert kinds(ledger)[-4:] == ["round", "settle", "settle", "settle"]
    assert not any(s.pending.rounds for s in ledger.balances().values()) and ledger.check() == []
    ledger.close()


def test_the_log_is_a_chain_of_hashes_and_a_merkle_tree(ledger):
    for account in accounts_of(chain_of(9)):
        ledger.post(account)
    sent = ledger.entries(0, 1000)
    leaves = [leaf_hash(e) for e in sent]
    assert len(sent) == ledger.size() == 16 and ledger.entries(3, 2) == sent[3:5]
    assert [ledger.node(0, i) for i in range(16)] == leaves
    assert [bytes(decode_entry(e).previous) for e in sent[1:]] == leaves[:-1]
    for size in range(17):
        assert ledger.root(size) == tree_hash(leaves[:size])
    for level in range(5):
        for i in range(16 >> level):
            assert ledger.node(level, i) == tree_hash(leaves[i << level : (i + 1) << level])
    with pytest.raises(IndexError):
        ledger.node(0, 16)
    with pytest.raises(IndexError):
        ledger.node(5, 0)


def test_a_stranger_replays_the_log_and_gets_the_same_balances(ledger):
    accounts = accounts_of(chain_of(5))
    for account in accounts:
        ledger.post(account)
    ledger.void(verdict_on(accounts[4], 2))
    books = LedgerState.of(SPEC)
    for i, sent in enumerate(ledger.entries(0, 1000)):
        books.replay(sent, ledger.lines(i))
    assert books.balances == ledger.balances() and books.leaf == ledger.node(0, ledger.size() - 1)
    entry = ledger.entry_of(accounts[2].record)
    assert entry == 2 and [decode_line(x) for x in ledger.lines(entry)] == list(accounts[2].lines)
    assert ledger.entry_of(Digest(bytes(32))) is None and ledger.lines(3) == []


def test_a_clock_that_was_set_back_writes_the_time_of_the_entry_before(ledger_place):
    clock = [5000.0]
    ledger = Ledger(ledger_place, SPEC, now=lambda: clock[0])
    for account in accounts_of(chain_of(4)):
        ledger.post(account)
        clock[0] -= 1000
    assert {decode_entry(e).time for e in ledger.entries(0, 100)} == {5_000_000}
    assert ledger.check() == []
    ledger.close()


def test_refusals_heads_and_bindings_are_kept_in_order(ledger):
    accounts = accounts_of(chain_of(2))
    for account in accounts:
        ledger.post(account)
    who = peer(8).key
    first, second = (RefusedUpdate(a.round, a.parent, a.record, who, Digest(bytes(32)), "late", 3.5) for a in accounts)
    assert ledger.add_refusal(first) and ledger.add_refusal(second) and not ledger.add_refusal(first)
    (number, newest), (_, oldest) = ledger.refusals(who)
    assert (newest, oldest) == (second, first) and [r for _, r in ledger.refusals(who, before=number)] == [first]
    assert ledger.refusals(peer(0).key) == []
    heads = [TreeHeadRow(n, ledger.root(n), 1000 + n, b"sent %d" % n) for n in (1, 2)]
    for head in heads:
        ledger.add_head(head)
    assert ledger.heads() == [heads[1]] and ledger.heads(limit=9) == heads[::-1] and ledger.heads(before=2) == heads[:1]
    words = [BindingRow(who, peer(n).key, n, b"word") for n in (1, 2)]
    for word in words:
        ledger.add_binding(word)
    assert ledger.bindings() == words


def test_two_processes_with_one_ledger_do_not_double_a_round(ledger, ledger_place):
    accounts = accounts_of(chain_of(6))
    second = Ledger(ledger_place, SPEC)
    for i, account in enumerate(accounts):
        assert (ledger, second)[i % 2].post(account)
        assert not (second, ledger)[i % 2].post(account)
    assert second.balances() == ledger.balances() and second.check() == []
    second.close()


def test_a_transaction_that_fails_leaves_nothing_in_memory_either(ledger):
    accounts = accounts_of(chain_of(3))
    ledger.post(accounts[0])
    with pytest.raises(RuntimeError):
        with ledger.group():
            ledger.post(accounts[1])
            raise RuntimeError("the machine is on fire")
    assert ledger.last() == (0, accounts[0].record) and ledger.size() == 1
    with ledger.group():
        ledger.post(accounts[1])
        with pytest.raises(LedgerConflictError):
            ledger.post(stranger())
        ledger.post(accounts[2])
    assert ledger.last() == (2, accounts[2].record)


def stranger():
    """Round 0 of another chain."""
    other = ChainMaker(SPEC)
    other.add({7: 1}, attempt=3)
    return accounts_of(other)[0]


@pytest.mark.parametrize(
    "table, change",
    [
        ("lines", "UPDATE lines SET encoded = (SELECT encoded FROM lines WHERE entry = 0 AND line = 0) WHERE line = 1"),
        ("entries", "UPDATE entries SET encoded = (SELECT encoded FROM entries WHERE sequence = 0) WHERE sequence = 2"),
        ("entries", "UPDATE entries SET time = 1, kind = 'void' WHERE sequence = 2"),
        ("entries", "UPDATE entries SET time = time + 1 WHERE sequence = 7"),
        ("transfers", "UPDATE transfers SET micro_credits = micro_credits + 1 WHERE entry = 1 AND line = 1"),
        ("nodes", "UPDATE nodes SET hash = (SELECT leaf FROM entries WHERE sequence = 0) WHERE level = 2"),
        ("rounds", "UPDATE rounds SET tokens = tokens + 1 WHERE number = 3"),
        ("transfers", "DELETE FROM transfers WHERE source > 0 AND entry = 1"),
        ("balances", "UPDATE balances SET settled_micro = settled_micro + 1"),
        ("balances", "DELETE FROM balances WHERE peer = 1"),
        ("branch", "DELETE FROM branch WHERE round = 4"),
    ],
)
def test_what_somebody_altered_behind_the_ledgers_back_is_said_at_the_start(ledger_place, table, change):
    posted_and_altered(ledger_place, table, change)
    with pytest.raises(LedgerError, match="is damaged: .*computed again from the chain"):
        Ledger(ledger_place, SPEC)


@pytest.mark.parametrize(
    "table, change",
    [
        ("lines", "UPDATE lines SET encoded = (SELECT encoded FROM lines WHERE entry = 0 AND line = 0) WHERE line = 1"),
        ("entries", "UPDATE entries SET encoded = (SELECT encoded FROM entries WHERE sequence = 0) WHERE sequence = 2"),
        ("entries", "UPDATE entries SET leaf = previous WHERE sequence = 7"),
        ("entries", "UPDATE entries SET time = time + 1 WHERE sequence = 7"),
        ("nodes", "UPDATE nodes SET hash = (SELECT leaf FROM entries WHERE sequence = 0) WHERE level = 3"),
        ("balances", "UPDATE balances SET settled_micro = settled_micro + 1"),
    ],
)
def test_of_a_large_ledger_the_chain_the_sums_and_the_newest_rounds_are_checked(tmp_path, monkeypatch, table, change):
    monkeypatch.setattr(integrity, "CHECKED_LINES", 0)
    place = str(tmp_path / "ledger.sqlite")
    ledger = Ledger(place, SPEC)
    for account in accounts_of(chain_of(2)):
        ledger.post(account)
    ledger.close()
    Ledger(place, SPEC).close()
    posted_and_altered(place, table, change)
    with pytest.raises(LedgerError, match="is damaged: .*computed again from the chain"):
        Ledger(place, SPEC)


def test_a_line_that_is_noted_as_another_peers_is_said(tmp_path):
    """Its bytes are as they were, and so is every hash; but receipts are looked for by the note."""
    place = str(tmp_path / "ledger.sqlite")
    posted_and_altered(place, "lines", "UPDATE lines SET peer = 99 WHERE entry = 1 AND line = 1")
    with pytest.raises(LedgerError, match="the lines of entry 1 are noted as those of other peers"):
        Ledger(place, SPEC)


def posted_and_altered(place: str, table: str, change: str) -> None:
    """Five rounds, and then what an operator with the database's own tools can do."""
    ledger = Ledger(place, SPEC)
    for account in accounts_of(chain_of(5)):
        ledger.post(account)
    ledger.close()
    db = connect(place, SPEC)
    if db.dialect == "postgresql":
        db.query(f"ALTER TABLE {table} DISABLE TRIGGER USER")
    else:
        for (name,) in db.query(f"SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = '{table}'"):
            db.query(f"DROP TRIGGER {name}")
        db.query("PRAGMA foreign_keys = OFF")
    db.query(change)
    db.close()


def test_a_check_is_of_one_moment_whatever_is_written_meanwhile(ledger, ledger_place):
    accounts = accounts_of(chain_of(6))
    for account in accounts[:3]:
        ledger.post(account)
    reader = Ledger(ledger_place, SPEC, reader=True)
    query = reader._db.query

    def writing_meanwhile(sql: str, values=()):
        rows = query(sql, values)
        if accounts[3:] and sql.startswith("SELECT kind"):
            ledger.post(accounts.pop(3))
        return rows

    reader._db.query = writing_meanwhile
    assert reader.check() == [] and ledger.size() > 9
    reader.close()


def test_a_connection_that_is_lost_is_an_error_once_and_then_made_again(postgres_url):
    import psycopg

    with postgres_world.empty_database(postgres_url) as where:
        ledger, accounts = Ledger(where, SPEC), accounts_of(chain_of(3))
        reader = Ledger(where, SPEC, reader=True)
        ledger.post(accounts[0])
        with psycopg.connect(postgres_url, autocommit=True) as db:
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'ledger_%'")
        with pytest.raises(LedgerError, match="check that the server runs"):
            ledger.post(accounts[1])
        with pytest.raises(LedgerError):
            reader.size()
        assert reader.size() == 1
        assert ledger.post(accounts[1]) and ledger.post(accounts[2]) and ledger.check() == []
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
