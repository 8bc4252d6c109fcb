"""The tables, for both databases. A database with another schema version is refused with the remedy.

The index (`state` to `balances`) follows from the certificates of final records and can be rebuilt from them. The
rest are notes of this coordinator, on which no credit depends.
"""

from __future__ import annotations

import re

from coordinator.errors import LedgerError
from coordinator.ledger.database import Database
from protocol.ids import RunId

FORM = 4

REMEDY = "move it away: credits are computed again from the chain"

TABLES = """
-- `epoch`: rollbacks so far; `settled`: number of settled final rounds, which settle in the order of their numbers.
CREATE TABLE state (
    run     BLOB   NOT NULL PRIMARY KEY,
    form    BIGINT NOT NULL,
    epoch   BIGINT NOT NULL,
    settled BIGINT NOT NULL
);

-- Final records, numbered from 0 in the order in which they became final. A rollback clears `on_branch`.
CREATE TABLE rounds (
    number     BIGINT  NOT NULL PRIMARY KEY CHECK (number >= 0),
    round      BIGINT  NOT NULL CHECK (round >= 0),
    on_branch  BIGINT  NOT NULL,
    record     BLOB    NOT NULL UNIQUE,
    parent     BLOB    NOT NULL,
    base_state BLOB    NOT NULL,
    loss       REAL    NOT NULL,
    tokens     BIGINT  NOT NULL CHECK (tokens > 0),
    voided_tokens BIGINT NOT NULL CHECK (voided_tokens >= 0),   -- of earlier records on its branch
    time       BIGINT  NOT NULL,   -- unix milliseconds when this row was written
    seen_at    REAL,               -- unix seconds when the record was first seen; NULL: this coordinator was away
    final      BLOB                -- the owner's signed finalization, where one was made for this very round
);
CREATE UNIQUE INDEX branch ON rounds (round) WHERE on_branch = 1;

CREATE TABLE peers (
    id   BIGINT NOT NULL PRIMARY KEY CHECK (id > 0),
    peer BLOB   NOT NULL UNIQUE
);

-- Accepted updates. `header` is the digest of the signed header; `voided_by` the round whose record voids the credit.
CREATE TABLE lines (
    number        BIGINT NOT NULL REFERENCES rounds (number),
    line          BIGINT NOT NULL CHECK (line >= 0),
    peer          BIGINT NOT NULL REFERENCES peers (id),
    header        BLOB   NOT NULL,
    windows       BIGINT NOT NULL CHECK (windows > 0),
    micro_credits BIGINT NOT NULL CHECK (micro_credits >= 0),
    voided_by     BIGINT CHECK (voided_by > number),
    PRIMARY KEY (number, line)
);
CREATE UNIQUE INDEX lines_by_peer ON lines (peer, number);
CREATE INDEX lines_voided ON lines (voided_by) WHERE voided_by IS NOT NULL;

-- What each peer has. `last_at`: when the newest record with the peer in it was seen; NULL: not at first hand.
CREATE TABLE balances (
    peer           BIGINT NOT NULL PRIMARY KEY REFERENCES peers (id),
    pending_micro  BIGINT NOT NULL CHECK (pending_micro >= 0),
    pending_tokens BIGINT NOT NULL,
    pending_rounds BIGINT NOT NULL,
    settled_micro  BIGINT NOT NULL CHECK (settled_micro >= 0),
    settled_tokens BIGINT NOT NULL,
    settled_rounds BIGINT NOT NULL,
    voided_micro   BIGINT NOT NULL CHECK (voided_micro >= 0),
    voided_tokens  BIGINT NOT NULL,
    voided_rounds  BIGINT NOT NULL,
    last_at        REAL
);

-- Verdicts that this coordinator has reached; a directive brings them into the chain.
CREATE TABLE verdicts (
    record BLOB   NOT NULL,
    peer   BLOB   NOT NULL,
    round  BIGINT NOT NULL,
    reason TEXT   NOT NULL,
    PRIMARY KEY (record, peer)
);

-- Announced updates that a round left out: the newest of each peer and in all (`store.MAX_REFUSALS`).
CREATE TABLE refusals (
    id     BIGINT NOT NULL PRIMARY KEY,
    round  BIGINT NOT NULL,
    parent BLOB   NOT NULL,
    record BLOB   NOT NULL,
    peer   BLOB   NOT NULL,
    header BLOB   NOT NULL,
    reason TEXT   NOT NULL,
    at     REAL   NOT NULL,
    UNIQUE (peer, record, header)
);

-- The account to which a peer belongs; the newest statement counts.
CREATE TABLE bindings (
    id      BIGINT NOT NULL PRIMARY KEY,
    peer    BLOB   NOT NULL,
    account BLOB   NOT NULL,
    time    BIGINT NOT NULL,
    encoded BLOB   NOT NULL
);

-- When a record that is not final yet was first seen: for the chart by time, across restarts.
CREATE TABLE first_seen (
    record  BLOB   NOT NULL PRIMARY KEY,
    round   BIGINT NOT NULL,
    seen_at REAL   NOT NULL
);

-- The newest admission of each peer.
CREATE TABLE admissions (
    peer       BLOB   NOT NULL PRIMARY KEY,
    name       TEXT   NOT NULL,
    first_at   BIGINT NOT NULL,
    not_before BIGINT NOT NULL,
    not_after  BIGINT NOT NULL,
    encoded    BLOB   NOT NULL
);
"""

AUDITS = """
-- Work reports that final records carry, of updates that are pending or decided. `number` is the carrying round's.
CREATE TABLE IF NOT EXISTS work_reports (
    number   BIGINT NOT NULL REFERENCES rounds (number),
    place    BIGINT NOT NULL,
    record   BLOB   NOT NULL,   -- the audited record
    header   BLOB   NOT NULL,
    reporter BLOB   NOT NULL,
    kind     TEXT   NOT NULL,
    scores   TEXT   NOT NULL,   -- JSON: [[name, value, threshold], ...]
    PRIMARY KEY (number, place)
);
CREATE INDEX IF NOT EXISTS work_reports_by_record ON work_reports (record);

-- Decisions of juries that final records state, about the update of a peer in a record. `refuted`: keys in a row.
CREATE TABLE IF NOT EXISTS decisions (
    number    BIGINT NOT NULL REFERENCES rounds (number),
    record    BLOB   NOT NULL,
    peer      BIGINT NOT NULL REFERENCES peers (id),
    convicted BIGINT NOT NULL,
    refuted   BLOB   NOT NULL,
    PRIMARY KEY (number, record, peer)
);

-- Convictions that the owner's directives in final records lift: that of a peer in a round.
CREATE TABLE IF NOT EXISTS pardons (
    number BIGINT NOT NULL REFERENCES rounds (number),
    peer   BLOB   NOT NULL,
    round  BIGINT NOT NULL,
    PRIMARY KEY (number, peer, round)
);
"""
"""Made at each start: older tables with this schema version do not have them."""

INDEXES = (
    "CREATE INDEX IF NOT EXISTS refusals_by_round ON refusals (round)",
    "CREATE INDEX IF NOT EXISTS bindings_by_peer ON bindings (peer)",
)
"""Made at each start: older tables with this schema version do not have them."""

_POSTGRES = {"BLOB": "BYTEA", "REAL": "DOUBLE PRECISION"}
"""Types that PostgreSQL calls otherwise. Its REAL has 4 bytes, which round unix seconds to 128 s."""


def prepare(db: Database, run: RunId) -> None:
    """Make the tables if there are none. Raises LedgerError if they are of another run or schema version."""
    with db.transaction():
        tables = db.tables()
        if not tables:
            _create(db, TABLES)
            db.query("INSERT INTO state (run, form, epoch, settled) VALUES (?, ?, 0, 0)", (bytes(run), FORM))
        else:
            _check(db, tables, run)
        for index in INDEXES:
            db.query(index)
        _create(db, AUDITS)


def _create(db: Database, text: str) -> None:
    for name, theirs in _POSTGRES.items() if db.dialect == "postgresql" else ():
        text = re.sub(rf"\b{name}\b", theirs, text)
    db.script(text)


def _check(db: Database, tables: set[str], run: RunId) -> None:
    rows = db.query("SELECT run, form FROM state") if "state" in tables else []
    if not rows or rows[0][1] != FORM:
        form = f"of schema version {rows[0][1]}, not {FORM}" if rows else "no ledger of this Cairn"
        raise LedgerError(f"{db.where} is {form}: start the version that made it, or {REMEDY}")
    if bytes(rows[0][0]) != run:
        other = RunId(bytes(rows[0][0])).short
        raise LedgerError(f"{db.where} is the ledger of run {other}, not of {run.short}: start with another folder")
