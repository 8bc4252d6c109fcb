-- The coordinator's database: one file a run. `rounds` and `credits` are the ledger: rows are added once a round is
-- final, in one transaction a round, and never change. Everything else may be lost without losing credit.

CREATE TABLE rounds (
    run         BLOB    NOT NULL CHECK (length(run) = 32),
    round       INTEGER NOT NULL CHECK (round >= 0),
    record      BLOB    NOT NULL CHECK (length(record) = 32),
    parent      BLOB    NOT NULL CHECK (length(parent) = 32),
    base_state  BLOB    NOT NULL CHECK (length(base_state) = 32),
    loss        REAL    NOT NULL,
    tokens      INTEGER NOT NULL CHECK (tokens > 0),
    seen_at     REAL,                 -- unix seconds when this coordinator first saw the record; NULL: it was away
    final       BLOB,                 -- the owner's signed final, where one was made for this very round
    PRIMARY KEY (run, round)
) WITHOUT ROWID;

CREATE TABLE credits (
    run           BLOB    NOT NULL CHECK (length(run) = 32),
    round         INTEGER NOT NULL,
    record        BLOB    NOT NULL CHECK (length(record) = 32),
    peer          BLOB    NOT NULL CHECK (length(peer) = 32),
    windows       INTEGER NOT NULL CHECK (windows > 0),
    tokens        INTEGER NOT NULL CHECK (tokens > 0),
    micro_credits INTEGER NOT NULL CHECK (micro_credits >= 0),
    PRIMARY KEY (run, round, peer),
    FOREIGN KEY (run, round) REFERENCES rounds (run, round)
) WITHOUT ROWID;

CREATE INDEX credits_by_peer ON credits (run, peer, round);

CREATE TRIGGER rounds_are_never_changed BEFORE UPDATE ON rounds
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER rounds_are_never_removed BEFORE DELETE ON rounds
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER credits_are_never_changed BEFORE UPDATE ON credits
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER credits_are_never_removed BEFORE DELETE ON credits
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

-- INSERT OR REPLACE removes without asking the triggers above.
CREATE TRIGGER rounds_are_added_once BEFORE INSERT ON rounds
WHEN EXISTS (SELECT 1 FROM rounds WHERE run = NEW.run AND round = NEW.round)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER credits_are_added_once BEFORE INSERT ON credits
WHEN EXISTS (SELECT 1 FROM credits WHERE run = NEW.run AND round = NEW.round AND peer = NEW.peer)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

-- A round is appended to the one before it: no gaps, one chain.
CREATE TRIGGER rounds_follow_each_other BEFORE INSERT ON rounds
WHEN NEW.round > 0 AND NOT EXISTS (
    SELECT 1 FROM rounds WHERE run = NEW.run AND round = NEW.round - 1 AND record = NEW.parent
)
BEGIN SELECT RAISE(ABORT, 'a round must be the child of the one before it'); END;

-- When a record that is not final yet was first seen: for the chart by time, across restarts.
CREATE TABLE sightings (
    run     BLOB    NOT NULL,
    record  BLOB    NOT NULL,
    round   INTEGER NOT NULL,
    seen_at REAL    NOT NULL,
    PRIMARY KEY (run, record)
) WITHOUT ROWID;

-- Who was admitted, under which name, until when: the newest admission of each peer.
CREATE TABLE admissions (
    run        BLOB    NOT NULL,
    peer       BLOB    NOT NULL,
    name       TEXT    NOT NULL,
    first_at   INTEGER NOT NULL,
    not_before INTEGER NOT NULL,
    not_after  INTEGER NOT NULL,
    sent       BLOB    NOT NULL,      -- the signed admission
    PRIMARY KEY (run, peer)
) WITHOUT ROWID;
