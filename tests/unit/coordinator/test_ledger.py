"""The ledger: one transaction a round, and no kill loses or doubles a credit."""

from __future__ import annotations

import datetime
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from coordinator.errors import LedgerConflictError, LedgerError
from coordinator.ledger import AdmissionRow, BindingRow, Ledger, RefusedUpdate
from coordinator.ledger.database import Database
from coordinator.ledger.store import connect
from protocol.ids import Digest
from protocol.ledger.credits import Balance, CreditRule, credits_of, sum_credits
from tests.support import postgres_world
from tests.support.coordinator_fakes import PARAMETERS, ChainMaker, make_credits, make_spec, peer

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
    credits = credits_of(chain.add({0: 1000, 1: 3000}), RULE)
    assert {e.peer: e.micro_credits for e in credits.lines} == {
        peer(0).key: RULE.micro_credits(1000),
        peer(1).key: RULE.micro_credits(3000),
    }


def test_a_settled_round_is_read_back_whole(ledger):
    rounds = make_credits(5)
    for credits in rounds:
        assert ledger.post(credits)
    assert ledger.round_credits(limit=10) == rounds
    assert ledger.round_credits(after=2, limit=1) == rounds[3:4]
    assert ledger.last() == (4, rounds[4].record)
    assert settled_in(ledger) == sum_credits(rounds)
    newest = ledger.history_of(peer(0).key, limit=2)
    assert [e.round for e in newest] == [4, 3]


def test_settling_a_round_again_changes_nothing(ledger):
    rounds = make_credits(3)
    for credits in rounds + rounds:
        ledger.post(credits)
    assert ledger.post(rounds[1]) is False
    assert settled_in(ledger) == sum_credits(rounds)


def test_another_record_for_a_settled_round_is_refused_loudly(ledger):
    chain = ChainMaker(SPEC)
    first = credits_of(chain.add({0: 10}), RULE)
    other = credits_of(ChainMaker(SPEC).add({0: 10}, attempt=1), RULE)
    ledger.post(first)
    with pytest.raises(LedgerConflictError, match="posted with record"):
        ledger.post(other)
    assert ledger.last() == (0, first.record)


def test_other_entries_for_a_settled_record_are_refused_loudly(ledger):
    credits = make_credits(1)[0]
    ledger.post(credits)
    inflated = replace(credits, lines=tuple(replace(e, micro_credits=e.micro_credits + 1) for e in credits.lines))
    with pytest.raises(LedgerConflictError, match="not what record"):
        ledger.post(inflated)


def test_a_round_that_does_not_follow_the_last_is_refused(ledger):
    rounds = make_credits(3)
    with pytest.raises(LedgerConflictError, match="is empty"):
        ledger.post(rounds[1])
    ledger.post(rounds[0])
    with pytest.raises(LedgerConflictError, match="does not follow"):
        ledger.post(rounds[2])
    with pytest.raises(LedgerConflictError, match="does not follow"):
        ledger.post(replace(rounds[1], parent=Digest(bytes(32))))
    assert ledger.last() == (0, rounds[0].record)


def filled(ledger) -> None:
    """Something in every table of the ledger."""
    rounds = make_credits(4)
    for credits in rounds:
        ledger.post(credits)
    a, line = rounds[0], rounds[0].lines[0]
    ledger.add_refusal(RefusedUpdate(a.round, a.parent, a.record, line.peer, line.update, "came too late", 5.0))
    ledger.add_binding(BindingRow(line.peer, peer(7).key, 5, b"word"))


def test_the_database_itself_refuses_what_is_doubled_or_does_not_follow(ledger, ledger_place):
    filled(ledger)
    with bare(ledger_place) as db:
        db.query("SELECT 1")
        for statement in (
            "INSERT INTO lines SELECT number, 99, peer, header, windows, micro_credits, NULL FROM lines WHERE line = 0",
            "INSERT INTO lines SELECT number, line, 99, header, windows, micro_credits, NULL FROM lines WHERE line = 0",
            "INSERT INTO rounds SELECT 99, round, 1, record, parent, base_state, loss, tokens, time, seen_at, final "
            "FROM rounds WHERE number = 1",
            "UPDATE rounds SET round = 0 WHERE number = 1",
            "UPDATE lines SET voided_by = 0 WHERE number = 1",
            "UPDATE balances SET pending_micro = -1",
        ):
            with pytest.raises(LedgerError):
                db.query(statement)


def test_a_ledger_with_another_schema_version_is_refused_with_the_remedy(ledger, ledger_place):
    with bare(ledger_place) as db:
        db.query("UPDATE state SET form = 99")
    with pytest.raises(LedgerError, match="schema version 99.*move it away"):
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
        assert second.size() == 0 and ledger.size() == 4
        second.close()
    else:
        with pytest.raises(LedgerError, match="is the ledger of run"):
            Ledger(ledger_place, other)


def test_a_role_that_owns_its_schema_needs_no_right_to_make_one(postgres_url):
    with postgres_world.empty_database(postgres_url) as url, bare(url) as db:
        db.query("DROP SCHEMA cairn_" + SPEC.run_id.hex()[:16])
        db.query("CREATE ROLE clerk LOGIN")
        clerk = url.replace("cairn@", "clerk@")
        try:
            with pytest.raises(LedgerError, match="must own the schema"):
                Ledger(clerk, SPEC)
            db.query(f"CREATE SCHEMA cairn_{SPEC.run_id.hex()[:16]} AUTHORIZATION clerk")
            with closing(Ledger(clerk, SPEC)) as ledger:
                filled(ledger)
                assert ledger.size() == 4
        finally:
            db.query("DROP OWNED BY clerk")
            db.query("DROP ROLE clerk")


def test_a_server_whose_host_vanishes_is_noticed_by_the_client(postgres_url, monkeypatch):
    psycopg = pytest.importorskip("psycopg")
    made, connect = [], psycopg.connect
    monkeypatch.setattr(psycopg, "connect", lambda *a, **k: made.append(connect(*a, **k)) or made[-1])
    with postgres_world.empty_database(postgres_url) as url, bare(f"{url}&keepalives=0") as db:
        assert db.query("SELECT 1") == [(1,)]
        used = {"keepalives": "1"} | made[-1].info.get_parameters()  # it leaves out the defaults of libpq
        assert {name: value for name, value in used.items() if name.startswith(("keepalives", "tcp_"))} == {
            "keepalives": "1", "keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3",
            "tcp_user_timeout": "30000",
        }  # fmt: skip


def test_a_file_that_is_no_ledger_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"hello" * 1000)
    with pytest.raises(LedgerError, match="move it away"):
        Ledger(tmp_path / "ledger.sqlite", SPEC)
    with pytest.raises(LedgerError, match="check that the folder exists"):
        Ledger(tmp_path / "missing" / "ledger.sqlite", SPEC)


def test_a_sound_file_that_has_lost_a_peer_is_refused(tmp_path, monkeypatch):
    """A disk that lied left one: its rounds were read without that peer's lines."""
    where = str(tmp_path / "ledger.sqlite")
    ledger = Ledger(where, SPEC)
    ledger.post(credits_of(ChainMaker(SPEC).add({0: 1, 1: 2}), RULE))
    ledger.close()
    with closing(sqlite3.connect(where)) as db, db:
        db.execute("DELETE FROM peers WHERE id = 1")
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with pytest.raises(LedgerError, match="rows of lines name rows of peers that are missing"):
        Ledger(where, SPEC)
    monkeypatch.setattr("coordinator.ledger.store.CHECKED_LINES", 0)  # of a large one less is read
    with pytest.raises(LedgerError, match="rows of balances name rows of peers that are missing"):
        Ledger(where, SPEC)


def test_when_a_record_was_seen_goes_with_it_into_the_ledger(ledger):
    rounds = make_credits(2)
    ledger.note_first_seen(rounds[0].record, rounds[0].round, 1000.0)
    ledger.note_first_seen(rounds[0].record, rounds[0].round, 2000.0)
    assert ledger.first_seen() == {rounds[0].record: 1000.0}
    for credits in rounds:
        ledger.post(credits)
    assert [r.seen_at for r in ledger.rounds()] == [1000.0, None]
    assert ledger.first_seen() == {}


def test_times_are_kept_to_the_millisecond(ledger):
    credits, at = make_credits(1)[0], 1_700_000_123.456
    ledger.note_first_seen(credits.record, credits.round, at)
    ledger.post(credits)
    assert [r.seen_at for r in ledger.rounds()] == [at]
    peers = [line.peer for line in credits.lines]
    assert ledger.active_since(dict.fromkeys(peers, lambda: 0.0)) == dict.fromkeys(peers, at)


def test_admissions_are_renewed_and_forgotten(ledger):
    for n in (0, 9):
        ledger.add_admission(AdmissionRow(peer(n).key, f"p{n}", 1, 1, 10, b"x"))
    ledger.add_admission(AdmissionRow(peer(0).key, "new name", 5, 5, 20, b"y"))
    ledger.forget_admissions([peer(9).key, peer(5).key])
    assert ledger.admissions() == [AdmissionRow(peer(0).key, "new name", 1, 5, 20, b"y")]


def test_a_ledger_that_forgets_uniqueness_would_be_caught_by_these_tests():
    rounds = make_credits(3)
    doubled = sum_credits(rounds + rounds[:1])
    assert doubled != sum_credits(rounds)
    assert doubled[peer(0).key] == sum_credits(rounds)[peer(0).key].plus(
        next(e for e in rounds[0].lines if e.peer == peer(0).key)
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


def test_a_certificate_that_clients_do_not_take_yet_is_not_served(tmp_path):
    from coordinator import tls

    made = tls.load_or_make(tmp_path)
    early = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=3)
    with pytest.raises(tls.CertificateFileError, match="clients refuse it until then: set this machine's clock"):
        tls.load_or_make(tmp_path, now=early)
    assert tls.load_or_make(tmp_path) == made
