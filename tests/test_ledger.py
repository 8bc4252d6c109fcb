"""The ledger: one transaction a round, append-only, and no kill loses or doubles a credit."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from coordinator.credits import Balance, CreditRule, account_for, pending
from coordinator.errors import LedgerConflictError, LedgerError
from coordinator.ledger import Admitted, Binding, Head, Ledger, Refusal
from protocol.ids import Digest
from tests.coordinator_fakes import PARAMETERS, ChainMaker, make_spec, peer

SPEC = make_spec()
RULE = CreditRule.of(SPEC)


def make_accounts(rounds: int):
    chain = ChainMaker(SPEC)
    for r in range(rounds):
        chain.add({n: 500 + 10 * n + r for n in range(3)}, loss=5 - r / 100)
    return [account_for(c, RULE) for c in chain.certificates]


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "ledger.sqlite", SPEC)
    yield opened
    opened.close()


def test_credits_are_whole_micro_credits_of_model_flops():
    window = SPEC.data.window
    assert RULE == CreditRule(6, PARAMETERS, window, hold_rounds=0)
    assert RULE.micro_credits(1000) == 6 * PARAMETERS * 1000 * window // 10**9
    assert CreditRule(6, 10**9, 128).micro_credits(10**6) == 768_000_000  # beyond what a double divides exactly
    chain = ChainMaker(SPEC)
    account = account_for(chain.add({0: 1000, 1: 3000}), RULE)
    assert {e.peer: e.micro_credits for e in account.entries} == {
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
    assert ledger.balances() == pending(accounts)
    newest = ledger.history_of(peer(0).key, limit=2)
    assert [e.round for e in newest] == [4, 3]


def test_settling_a_round_again_changes_nothing(ledger):
    accounts = make_accounts(3)
    for account in accounts + accounts:
        ledger.post(account)
    assert ledger.post(accounts[1]) is False
    assert ledger.balances() == pending(accounts)


def test_another_record_for_a_settled_round_is_refused_loudly(ledger):
    chain = ChainMaker(SPEC)
    first = account_for(chain.add({0: 10}), RULE)
    other = account_for(ChainMaker(SPEC).add({0: 10}, attempt=1), RULE)
    ledger.post(first)
    with pytest.raises(LedgerConflictError, match="settled with record"):
        ledger.post(other)
    assert ledger.last() == (0, first.record)


def test_other_entries_for_a_settled_record_are_refused_loudly(ledger):
    account = make_accounts(1)[0]
    ledger.post(account)
    inflated = replace(account, entries=tuple(replace(e, micro_credits=e.micro_credits + 1) for e in account.entries))
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
    a, line = accounts[0], accounts[0].entries[0]
    ledger.refuse(Refusal(a.round, a.parent, a.record, line.peer, line.update, "came too late", 5.0))
    ledger.add_head(Head(ledger.size(), ledger.root(), 5, b"head"))
    ledger.bind(Binding(line.peer, peer(7).key, 5, b"word"))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "statement", ["UPDATE {t} SET {c} = {c}", "DELETE FROM {t}", "INSERT OR REPLACE INTO {t} SELECT * FROM {t}"]
)
def test_the_database_itself_refuses_to_change_what_is_written(ledger, table, statement):
    filled(ledger)
    ledger.close()
    db = sqlite3.connect(ledger.where)
    before = db.execute(f"SELECT * FROM {table}").fetchall()
    column = db.execute(f"SELECT name FROM pragma_table_info('{table}')").fetchone()[0]
    assert before
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        with db:
            db.execute(statement.format(t=table, c=column))
    assert db.execute(f"SELECT * FROM {table}").fetchall() == before
    db.close()


@pytest.mark.parametrize(
    "statement",
    [
        # By another unique column than the key.
        "INSERT OR REPLACE INTO rounds SELECT entry + 1, number, round, record, parent, base_state, 0, 1, NULL, NULL "
        "FROM rounds WHERE number = 3",
        "INSERT OR REPLACE INTO lines SELECT entry, line + 50, peer, sent FROM lines",
        # Credit twice: settled after it was settled, issued again, out of nowhere, to somebody else.
        "INSERT INTO transfers SELECT entry, line, source, target + 1, sequence, 1 FROM transfers WHERE source > 0",
        "INSERT INTO transfers SELECT entry, line, source, target, sequence, 1 FROM transfers WHERE source = 0",
        "INSERT INTO transfers SELECT entry, line, target, 4, sequence, 1 FROM transfers WHERE source = 0",
        "INSERT INTO transfers SELECT entry, line + 70, 0, target, sequence, 1 FROM transfers WHERE source = 0",
        # A gap, and a link that does not fit.
        "INSERT INTO entries SELECT sequence + 9, kind, previous, leaf, time, sent FROM entries",
        "INSERT INTO entries SELECT max(sequence) + 1, kind, previous, leaf, time, sent FROM entries",
    ],
)
def test_the_database_itself_refuses_what_does_not_follow(ledger, statement):
    filled(ledger)
    ledger.close()
    db = sqlite3.connect(ledger.where)
    db.execute("PRAGMA foreign_keys = ON")
    with pytest.raises(sqlite3.IntegrityError):
        with db:
            db.execute(statement)
    db.close()


def test_a_ledger_of_another_form_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path, SPEC).close()
    db = sqlite3.connect(path)
    with db:
        db.execute("INSERT INTO migrations (number, name) VALUES (99, 'future')")
    db.close()
    with pytest.raises(LedgerError, match="form 99.*move it away"):
        Ledger(path, SPEC)
    old = tmp_path / "old.sqlite"
    db = sqlite3.connect(old)
    db.executescript("CREATE TABLE rounds (run BLOB); CREATE TABLE credits (run BLOB); PRAGMA user_version = 1")
    db.close()
    with pytest.raises(LedgerError, match="form 1, from before.*move it away"):
        Ledger(old, SPEC)


def test_a_ledger_of_another_run_is_refused(tmp_path):
    Ledger(tmp_path / "ledger.sqlite", SPEC).close()
    with pytest.raises(LedgerError, match="is the ledger of run"):
        Ledger(tmp_path / "ledger.sqlite", make_spec(seed=9))


def test_a_file_that_is_no_ledger_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"hello" * 1000)
    with pytest.raises(LedgerError, match="move it away"):
        Ledger(tmp_path / "ledger.sqlite", SPEC)
    with pytest.raises(LedgerError, match="check that the folder exists"):
        Ledger(tmp_path / "missing" / "ledger.sqlite", SPEC)


def test_when_a_record_was_seen_goes_with_it_into_the_ledger(ledger):
    accounts = make_accounts(2)
    ledger.saw(accounts[0].record, accounts[0].round, 1000.0)
    ledger.saw(accounts[0].record, accounts[0].round, 2000.0)
    assert ledger.sightings() == {accounts[0].record: 1000.0}
    for account in accounts:
        ledger.post(account)
    assert [r.seen_at for r in ledger.rounds()] == [1000.0, None]
    assert ledger.sightings() == {}


def test_admissions_of_peers_without_credits_are_forgotten_in_the_end(ledger):
    ledger.post(make_accounts(1)[0])
    for n in (0, 9):
        ledger.admit(Admitted(peer(n).key, f"p{n}", 1, 1, 10, b"x"))
    ledger.admit(Admitted(peer(0).key, "new name", 5, 5, 20, b"y"))
    assert ledger.forget_admissions(1000) == 1
    assert ledger.admissions() == [Admitted(peer(0).key, "new name", 1, 5, 20, b"y")]


WORKER = """
import sys
from pathlib import Path
from tests.test_ledger import make_accounts, SPEC
from coordinator.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), SPEC)
accounts = make_accounts(60)
print("ready", flush=True)
# Everything from the start again, as a coordinator does that does not trust its memory.
for account in accounts:
    ledger.post(account)
    print(account.round, flush=True)
"""


def test_no_kill_loses_or_doubles_a_credit(tmp_path):
    path, accounts = tmp_path / "ledger.sqlite", make_accounts(60)
    settled = -1
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02):
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert worker.stdout is not None
        try:
            assert worker.stdout.readline() == b"ready\n"
            time.sleep(delay)
        finally:
            worker.send_signal(signal.SIGKILL)
            said = worker.stdout.read().split()
            worker.wait()
            worker.stdout.close()
        ledger = Ledger(path, SPEC)
        last = ledger.last()
        count = 0 if last is None else last[0] + 1
        # Said means committed; and what is there is exactly a beginning of the chain's accounts.
        assert count >= max(settled, *(int(s) for s in said), -1) + 1 if said else count >= settled + 1
        assert ledger.accounts(limit=100) == accounts[:count]
        assert ledger.balances() == pending(accounts[:count])
        settled = count - 1
        ledger.close()
    ledger = Ledger(path, SPEC)
    for account in accounts:
        ledger.post(account)
    assert ledger.balances() == pending(accounts) != {}
    ledger.close()


def test_a_ledger_that_forgets_uniqueness_would_be_caught_by_these_tests():
    accounts = make_accounts(3)
    doubled = pending(accounts + accounts[:1])
    assert doubled != pending(accounts)
    assert doubled[peer(0).key] == pending(accounts)[peer(0).key].plus(
        next(e for e in accounts[0].entries if e.peer == peer(0).key)
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
