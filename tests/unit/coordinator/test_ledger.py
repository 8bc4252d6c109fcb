"""The ledger: one transaction a round, append-only, and no kill loses or doubles a credit."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from coordinator.errors import LedgerConflictError, LedgerError
from coordinator.ledger import AdmissionRow, BindingRow, Ledger, RefusedUpdate, TreeHeadRow
from coordinator.ledger.database import Database, SqliteDatabase
from coordinator.ledger.schema import migrate, migrations
from coordinator.ledger.store import connect
from protocol.ids import Digest
from protocol.ledger.credits import Balance, CreditRule, credits_of, sum_credits
from tests.support.coordinator_fakes import PARAMETERS, ChainMaker, make_accounts, make_spec, peer

SPEC = make_spec()
RULE = CreditRule.of(SPEC)


def settled_in(ledger: Ledger):
    """Return what every peer has settled."""
    return {peer: b.settled for peer, b in ledger.balances().items() if b.settled.rounds}


@pytest.fixture
def ledger(ledger_place):
    opened = Ledger(ledger_place, SPEC)
    yield opened
    opened.close()


@contextmanager
def bare(where: str) -> Iterator[Database]:
    """Open the database as its operator would, without the ledger around it."""
    db = connect(where, SPEC)
    try:
        yield db
    finally:
        db.close()


def test_credits_are_whole_micro_credits_of_model_flops():
    window = SPEC.data.window
    assert RULE == CreditRule(6, PARAMETERS, window, hold_rounds=0)
    assert RULE.micro_credits(1000) == 6 * PARAMETERS * 1000 * window // 10**9
    assert CreditRule(6, 10**9, 128).micro_credits(10**6) == 768_000_000  # beyond what a double divides exactly
    chain = ChainMaker(SPEC)
    account = credits_of(chain.add({0: 1000, 1: 3000}), RULE)
    assert {e.peer: e.micro_credits for e in account.lines} == {
        peer(0).key: RULE.micro_credits(1000),
        peer(1).key: RULE.micro_credits(3000),
    }


def test_a_settled_round_is_read_back_whole(ledger):
    accounts = make_accounts(5)
    for account in accounts:
        assert ledger.post(account)
    assert ledger.accounts(limit=10) == accounts
    assert ledger.accounts(after=2, limit=1) == accounts[3:4]
    assert ledger.last() == (4, accounts[4].record)
    assert settled_in(ledger) == sum_credits(accounts)
    newest = ledger.history_of(peer(0).key, limit=2)
    assert [e.round for e in newest] == [4, 3]


def test_settling_a_round_again_changes_nothing(ledger):
    accounts = make_accounts(3)
    for account in accounts + accounts:
        ledger.post(account)
    assert ledger.post(accounts[1]) is False
    assert settled_in(ledger) == sum_credits(accounts)


def test_another_record_for_a_settled_round_is_refused_loudly(ledger):
    chain = ChainMaker(SPEC)
    first = credits_of(chain.add({0: 10}), RULE)
    other = credits_of(ChainMaker(SPEC).add({0: 10}, attempt=1), RULE)
    ledger.post(first)
    with pytest.raises(LedgerConflictError, match="settled with record"):
        ledger.post(other)
    assert ledger.last() == (0, first.record)


def test_other_entries_for_a_settled_record_are_refused_loudly(ledger):
    account = make_accounts(1)[0]
    ledger.post(account)
    inflated = replace(account, lines=tuple(replace(e, micro_credits=e.micro_credits + 1) for e in account.lines))
    with pytest.raises(LedgerConflictError, match="not what record"):
        ledger.post(inflated)


def test_a_round_that_does_not_follow_the_last_is_refused(ledger):
    accounts = make_accounts(3)
    with pytest.raises(LedgerConflictError, match="is empty"):
        ledger.post(accounts[1])
    ledger.post(accounts[0])
    with pytest.raises(LedgerConflictError, match="does not follow"):
        ledger.post(accounts[2])
    with pytest.raises(LedgerConflictError, match="does not follow"):
        ledger.post(replace(accounts[1], parent=Digest(bytes(32))))
    assert ledger.last() == (0, accounts[0].record)


TABLES = ("log", "entries", "nodes", "rounds", "peers", "lines", "transfers", "refusals", "heads", "bindings")


def filled(ledger) -> None:
    """Something in every table of the ledger."""
    accounts = make_accounts(4)
    for account in accounts:
        ledger.post(account)
    a, line = accounts[0], accounts[0].lines[0]
    ledger.add_refusal(RefusedUpdate(a.round, a.parent, a.record, line.peer, line.update, "came too late", 5.0))
    ledger.add_head(TreeHeadRow(ledger.size(), ledger.root(), 5, b"head"))
    ledger.add_binding(BindingRow(line.peer, peer(7).key, 5, b"word"))


@pytest.mark.parametrize("table", TABLES)
def test_the_database_itself_refuses_to_change_what_is_written(ledger, ledger_place, table):
    filled(ledger)
    with bare(ledger_place) as db:
        before = db.query(f"SELECT * FROM {table}")
        assert before
        column = {"log": "run", "entries": "time", "nodes": "hash", "rounds": "loss", "peers": "peer",
                  "transfers": "micro_credits", "refusals": "reason"}.get(table, "encoded")  # fmt: skip
        statements = [f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}"]
        if db.dialect == "sqlite":
            statements.append(f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}")
        else:
            statements += [
                f"TRUNCATE {table} CASCADE",
                f"INSERT INTO {table} SELECT * FROM {table} ON CONFLICT ({db_key(table)}) DO UPDATE "
                f"SET {column} = excluded.{column}",
            ]
        for statement in statements:
            with pytest.raises(LedgerError, match="append-only"):
                db.query(statement)
        assert db.query(f"SELECT * FROM {table}") == before


def db_key(table: str) -> str:
    keys = {"log": "run", "entries": "sequence", "nodes": "level, place", "rounds": "entry", "lines": "entry, line",
            "transfers": "entry, line, source"}  # fmt: skip
    return keys.get(table, "id")


@pytest.mark.parametrize(
    "statement",
    [
        # Credit twice: settled after it was settled, issued again, out of nowhere, to somebody else.
        "INSERT INTO transfers SELECT entry, line, source, target + 1, sequence, 1 FROM transfers WHERE source > 0",
        "INSERT INTO transfers SELECT entry, line, source, target, sequence, 1 FROM transfers WHERE source = 0",
        "INSERT INTO transfers SELECT entry, line, target, 4, sequence, 1 FROM transfers WHERE source = 0",
        "INSERT INTO transfers SELECT entry, line + 70, 0, target, sequence, 1 FROM transfers WHERE source = 0",
        "INSERT INTO lines SELECT entry, line + 50, peer, encoded FROM lines",
        # A gap, and a link that does not fit.
        "INSERT INTO entries SELECT sequence + 99, kind, previous, leaf, time, encoded FROM entries",
        "INSERT INTO entries SELECT sequence + 1, kind, previous, leaf, time, encoded FROM entries WHERE sequence = 7",
    ],
)
def test_the_database_itself_refuses_what_does_not_follow(ledger, ledger_place, statement):
    filled(ledger)
    with bare(ledger_place) as db:
        with pytest.raises(LedgerError):
            db.query(statement)


def test_sqlite_does_not_replace_a_row_by_another_unique_column_than_the_key(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", SPEC)
    filled(ledger)
    ledger.close()
    with bare(str(tmp_path / "ledger.sqlite")) as db, pytest.raises(LedgerError, match="append-only"):
        db.query(
            "INSERT OR REPLACE INTO rounds SELECT entry + 1, number, round, record, parent, base_state, 0, 1, NULL, "
            "NULL FROM rounds WHERE number = 3"
        )


def test_a_ledger_of_a_newer_form_is_refused_with_the_remedy(ledger, ledger_place):
    with bare(ledger_place) as db:
        db.query("INSERT INTO migrations (number, name) VALUES (99, 'future')")
    with pytest.raises(LedgerError, match="form 99.*move it away"):
        Ledger(ledger_place, SPEC)


def test_a_database_with_other_tables_is_refused_with_the_remedy(tmp_path):
    db = sqlite3.connect(tmp_path / "old.sqlite")
    db.executescript("CREATE TABLE rounds (run BLOB); CREATE TABLE credits (run BLOB); PRAGMA user_version = 1")
    db.close()
    with pytest.raises(LedgerError, match="no ledger of this Cairn.*move it away"):
        Ledger(tmp_path / "old.sqlite", SPEC)


def test_a_file_of_another_run_is_refused_and_a_server_keeps_many_runs(ledger, ledger_place):
    other = make_spec(seed=9)
    if "postgresql" in ledger_place:
        second = Ledger(ledger_place, other)
        filled(ledger)
        assert second.size() == 0 and ledger.size() == 8
        second.close()
    else:
        with pytest.raises(LedgerError, match="is the ledger of run"):
            Ledger(ledger_place, other)


def test_migrations_are_numbered_without_gaps_and_run_once(tmp_path):
    for dialect in ("sqlite", "postgresql"):
        known = migrations(dialect)
        assert [number for number, _, _ in known] == list(range(1, len(known) + 1))
    (tmp_path / "0001_a.sql").write_text("CREATE TABLE log (run BLOB); CREATE TABLE a (x INTEGER);")
    db = SqliteDatabase(tmp_path / "x.sqlite")
    migrate(db, SPEC.run_id, tmp_path)
    (tmp_path / "0002_b.sqlite.sql").write_text("ALTER TABLE a ADD COLUMN y INTEGER;")
    (tmp_path / "0002_b.postgresql.sql").write_text("ALTER TABLE a ADD COLUMN y BIGINT;")
    migrate(db, SPEC.run_id, tmp_path)
    migrate(db, SPEC.run_id, tmp_path)
    db.query("SELECT x, y FROM a")
    # One that fails leaves nothing of itself.
    (tmp_path / "0003_c.sql").write_text("CREATE TABLE c (x INTEGER); CREATE TABLE a (x INTEGER);")
    with pytest.raises(LedgerError, match="already exists"):
        migrate(db, SPEC.run_id, tmp_path)
    assert "c" not in db.tables() and db.query("SELECT count(*) FROM migrations") == [(2,)]
    (tmp_path / "0005_e.sql").write_text("SELECT 1;")
    with pytest.raises(LedgerError, match="lacks a migration"):
        migrate(db, SPEC.run_id, tmp_path)
    db.close()


def test_a_file_that_is_no_ledger_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"hello" * 1000)
    with pytest.raises(LedgerError, match="move it away"):
        Ledger(tmp_path / "ledger.sqlite", SPEC)
    with pytest.raises(LedgerError, match="check that the folder exists"):
        Ledger(tmp_path / "missing" / "ledger.sqlite", SPEC)


def test_when_a_record_was_seen_goes_with_it_into_the_ledger(ledger):
    accounts = make_accounts(2)
    ledger.note_first_seen(accounts[0].record, accounts[0].round, 1000.0)
    ledger.note_first_seen(accounts[0].record, accounts[0].round, 2000.0)
    assert ledger.first_seen() == {accounts[0].record: 1000.0}
    for account in accounts:
        ledger.post(account)
    assert [r.seen_at for r in ledger.rounds()] == [1000.0, None]
    assert ledger.first_seen() == {}


def test_admissions_are_renewed_and_forgotten(ledger):
    for n in (0, 9):
        ledger.add_admission(AdmissionRow(peer(n).key, f"p{n}", 1, 1, 10, b"x"))
    ledger.add_admission(AdmissionRow(peer(0).key, "new name", 5, 5, 20, b"y"))
    ledger.forget_admissions([peer(9).key, peer(5).key])
    assert ledger.admissions() == [AdmissionRow(peer(0).key, "new name", 1, 5, 20, b"y")]


def test_a_ledger_that_forgets_uniqueness_would_be_caught_by_these_tests():
    accounts = make_accounts(3)
    doubled = sum_credits(accounts + accounts[:1])
    assert doubled != sum_credits(accounts)
    assert doubled[peer(0).key] == sum_credits(accounts)[peer(0).key].plus(
        next(e for e in accounts[0].lines if e.peer == peer(0).key)
    )
    assert Balance() == Balance(0, 0, 0)


def test_the_tls_certificate_is_made_once_and_is_the_owners_alone(tmp_path):
    from coordinator import tls

    first = tls.load_or_make(tmp_path)
    assert tls.load_or_make(tmp_path) == first
    path = tmp_path / tls.FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    tls.load_or_make(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(tls.CertificateFileError, match="damaged.*move it away"):
        tls.load_or_make(tmp_path)
