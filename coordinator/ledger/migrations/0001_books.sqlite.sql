-- The ledger of one run. Everything down to `bindings` is the ledger: rows are added and never change, and the database
-- itself refuses anything else. `branch` and `balances` follow from it and are kept in the same transaction, so that
-- a start need not read everything; `Ledger.check` compares. First-seen times and admissions may be lost without losing credit.
--
-- An account is a number: 0 issuance; of the peer with id p, 4p+1 pending, 4p+2 settled, 4p+3 voided. The view
-- `account_sums` names them.

CREATE TABLE log (
    run BLOB NOT NULL PRIMARY KEY CHECK (length(run) = 32)
) WITHOUT ROWID;

-- `encoded` are the entry's bytes as they were hashed (protocol/wire/ledger.proto); `leaf` is SHA-256(0x00, encoded).
CREATE TABLE entries (
    sequence INTEGER NOT NULL PRIMARY KEY CHECK (sequence >= 0),
    kind     TEXT    NOT NULL CHECK (kind IN ('round', 'settle', 'void', 'rollback')),
    previous BLOB    NOT NULL CHECK (length(previous) = 32),
    leaf     BLOB    NOT NULL CHECK (length(leaf) = 32),
    time     INTEGER NOT NULL,          -- unix milliseconds
    encoded     BLOB    NOT NULL
);
CREATE INDEX entries_by_kind ON entries (kind, sequence);

-- Hashes of the complete subtrees of the Merkle tree over the leaves; level 0 are the leaves themselves, in `entries`.
CREATE TABLE nodes (
    level INTEGER NOT NULL CHECK (level > 0),
    place INTEGER NOT NULL CHECK (place >= 0),
    hash  BLOB    NOT NULL CHECK (length(hash) = 32),
    PRIMARY KEY (level, place)
) WITHOUT ROWID;

-- What is known of a round beside its entry. `number` counts round entries from 0.
CREATE TABLE rounds (
    entry      INTEGER NOT NULL PRIMARY KEY REFERENCES entries (sequence),
    number     INTEGER NOT NULL UNIQUE CHECK (number >= 0),
    round      INTEGER NOT NULL CHECK (round >= 0),
    record     BLOB    NOT NULL UNIQUE CHECK (length(record) = 32),
    parent     BLOB    NOT NULL CHECK (length(parent) = 32),
    base_state BLOB    NOT NULL CHECK (length(base_state) = 32),
    loss       REAL    NOT NULL,
    tokens     INTEGER NOT NULL CHECK (tokens > 0),
    seen_at    REAL,                    -- unix seconds when this coordinator first saw the record; NULL: it was away
    final      BLOB                     -- the owner's signed final, where one was made for this very round
);

CREATE TABLE peers (
    id   INTEGER NOT NULL PRIMARY KEY CHECK (id > 0),
    peer BLOB    NOT NULL UNIQUE CHECK (length(peer) = 32)
);

-- The leaves under a round entry's `lines_root`.
CREATE TABLE lines (
    entry INTEGER NOT NULL REFERENCES rounds (entry),
    line  INTEGER NOT NULL CHECK (line >= 0),
    peer  INTEGER NOT NULL REFERENCES peers (id),
    encoded  BLOB    NOT NULL,
    PRIMARY KEY (entry, line)
) WITHOUT ROWID;
CREATE UNIQUE INDEX lines_by_peer ON lines (peer, entry);

-- Double entry: from one account to another, by the entry `sequence`, for a line of the round entry `entry`. A line is
-- issued once, and leaves pending once: that is the primary key.
CREATE TABLE transfers (
    entry         INTEGER NOT NULL,
    line          INTEGER NOT NULL,
    source        INTEGER NOT NULL,
    target        INTEGER NOT NULL,
    sequence      INTEGER NOT NULL REFERENCES entries (sequence),
    micro_credits INTEGER NOT NULL CHECK (micro_credits >= 0),
    PRIMARY KEY (entry, line, source),
    FOREIGN KEY (entry, line) REFERENCES lines (entry, line),
    CHECK ((source = 0 AND target % 4 = 1) OR (source % 4 = 1 AND target IN (source + 1, source + 2)))
) WITHOUT ROWID;

-- Announced updates that a round left out.
CREATE TABLE refusals (
    id     INTEGER NOT NULL PRIMARY KEY,
    round  INTEGER NOT NULL,
    parent BLOB    NOT NULL CHECK (length(parent) = 32),
    record BLOB    NOT NULL CHECK (length(record) = 32),
    peer   BLOB    NOT NULL CHECK (length(peer) = 32),
    header BLOB    NOT NULL CHECK (length(header) = 32),     -- digest of the signed header
    reason TEXT    NOT NULL,
    at     REAL    NOT NULL,
    UNIQUE (peer, record, header)
);

-- Signed tree heads.
CREATE TABLE heads (
    id   INTEGER NOT NULL PRIMARY KEY,
    size INTEGER NOT NULL CHECK (size >= 0),
    root BLOB    NOT NULL CHECK (length(root) = 32),
    time INTEGER NOT NULL,
    encoded BLOB    NOT NULL
);

-- Which account a peer belongs to; the newest word counts.
CREATE TABLE bindings (
    id      INTEGER NOT NULL PRIMARY KEY,
    peer    BLOB    NOT NULL CHECK (length(peer) = 32),
    account BLOB    NOT NULL CHECK (length(account) = 32),
    time    INTEGER NOT NULL,
    encoded    BLOB    NOT NULL
);

-- Derived: the round entries that lead to the newest one; a rollback cuts it.
CREATE TABLE branch (
    round INTEGER NOT NULL PRIMARY KEY,
    entry INTEGER NOT NULL
);

-- Derived: what each peer has. `last_at`: when the newest record with the peer in it was seen; NULL: not at first hand.
CREATE TABLE balances (
    peer           INTEGER NOT NULL PRIMARY KEY REFERENCES peers (id),
    pending_micro  INTEGER NOT NULL CHECK (pending_micro >= 0),
    pending_tokens INTEGER NOT NULL,
    pending_rounds INTEGER NOT NULL,
    settled_micro  INTEGER NOT NULL CHECK (settled_micro >= 0),
    settled_tokens INTEGER NOT NULL,
    settled_rounds INTEGER NOT NULL,
    voided_micro   INTEGER NOT NULL CHECK (voided_micro >= 0),
    voided_tokens  INTEGER NOT NULL,
    voided_rounds  INTEGER NOT NULL,
    last_at        REAL
);

-- When a record that is not final yet was first seen: for the chart by time, across restarts.
CREATE TABLE first_seen (
    record  BLOB    NOT NULL PRIMARY KEY,
    round   INTEGER NOT NULL,
    seen_at REAL    NOT NULL
) WITHOUT ROWID;

-- Who was admitted, under which name, until when: the newest admission of each peer.
CREATE TABLE admissions (
    peer       BLOB    NOT NULL PRIMARY KEY,
    name       TEXT    NOT NULL,
    first_at   INTEGER NOT NULL,
    not_before INTEGER NOT NULL,
    not_after  INTEGER NOT NULL,
    encoded       BLOB    NOT NULL         -- the signed admission
) WITHOUT ROWID;

-- For checking by hand: every account by its name; the sum over all is zero.
CREATE VIEW account_sums AS
WITH moved AS (
    SELECT target AS account, micro_credits AS amount FROM transfers
    UNION ALL
    SELECT source AS account, -micro_credits AS amount FROM transfers
)
SELECT CASE account % 4 WHEN 0 THEN 'issuance' WHEN 1 THEN 'pending/' WHEN 2 THEN 'settled/' ELSE 'voided/' END
       || coalesce(lower(hex(peer)), '') AS account,
       sum(amount) AS micro_credits
FROM moved LEFT JOIN peers ON peers.id = account / 4
GROUP BY account, peer;

-- Nothing above `branch` is ever changed or removed. INSERT OR REPLACE removes without asking the triggers on DELETE.
CREATE TRIGGER log_are_never_changed BEFORE UPDATE ON log
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER log_are_never_removed BEFORE DELETE ON log
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER log_are_added_once BEFORE INSERT ON log
WHEN EXISTS (SELECT 1 FROM log WHERE run = NEW.run)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TRIGGER entries_are_never_changed BEFORE UPDATE ON entries
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER entries_are_never_removed BEFORE DELETE ON entries
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER entries_are_added_once BEFORE INSERT ON entries
WHEN EXISTS (SELECT 1 FROM entries WHERE sequence = NEW.sequence)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TRIGGER nodes_are_never_changed BEFORE UPDATE ON nodes
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER nodes_are_never_removed BEFORE DELETE ON nodes
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER nodes_are_added_once BEFORE INSERT ON nodes
WHEN EXISTS (SELECT 1 FROM nodes WHERE level = NEW.level AND place = NEW.place)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TRIGGER rounds_are_never_changed BEFORE UPDATE ON rounds
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER rounds_are_never_removed BEFORE DELETE ON rounds
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER rounds_are_added_once BEFORE INSERT ON rounds
WHEN EXISTS (SELECT 1 FROM rounds WHERE entry = NEW.entry OR number = NEW.number OR record = NEW.record)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TRIGGER peers_are_never_changed BEFORE UPDATE ON peers
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER peers_are_never_removed BEFORE DELETE ON peers
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER peers_are_added_once BEFORE INSERT ON peers
WHEN EXISTS (SELECT 1 FROM peers WHERE id = NEW.id OR peer = NEW.peer)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TRIGGER lines_are_never_changed BEFORE UPDATE ON lines
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER lines_are_never_removed BEFORE DELETE ON lines
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER lines_are_added_once BEFORE INSERT ON lines
WHEN EXISTS (SELECT 1 FROM lines WHERE (entry = NEW.entry AND line = NEW.line) OR (peer = NEW.peer AND entry = NEW.entry))
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TRIGGER transfers_are_never_changed BEFORE UPDATE ON transfers
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER transfers_are_never_removed BEFORE DELETE ON transfers
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER transfers_are_added_once BEFORE INSERT ON transfers
WHEN EXISTS (SELECT 1 FROM transfers WHERE entry = NEW.entry AND line = NEW.line AND source = NEW.source)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TRIGGER refusals_are_never_changed BEFORE UPDATE ON refusals
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER refusals_are_never_removed BEFORE DELETE ON refusals
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER refusals_are_added_once BEFORE INSERT ON refusals
WHEN EXISTS (SELECT 1 FROM refusals WHERE id = NEW.id OR (peer = NEW.peer AND record = NEW.record AND header = NEW.header))
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TRIGGER heads_are_never_changed BEFORE UPDATE ON heads
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER heads_are_never_removed BEFORE DELETE ON heads
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER heads_are_added_once BEFORE INSERT ON heads
WHEN EXISTS (SELECT 1 FROM heads WHERE id = NEW.id)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TRIGGER bindings_are_never_changed BEFORE UPDATE ON bindings
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER bindings_are_never_removed BEFORE DELETE ON bindings
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER bindings_are_added_once BEFORE INSERT ON bindings
WHEN EXISTS (SELECT 1 FROM bindings WHERE id = NEW.id)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

-- One chain of hashes, without gaps.
CREATE TRIGGER entries_follow_each_other BEFORE INSERT ON entries
WHEN NEW.sequence > 0 AND NOT EXISTS (
    SELECT 1 FROM entries WHERE sequence = NEW.sequence - 1 AND leaf = NEW.previous
)
BEGIN SELECT RAISE(ABORT, 'an entry must name the one before it'); END;
