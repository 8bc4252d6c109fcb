-- The ledger of one run. Everything down to `bindings` is the ledger: rows are added and never change, and the database
-- itself refuses anything else. `branch` and `balances` follow from it and are kept in the same transaction, so that
-- a start need not read everything; `Ledger.check` compares. First-seen times and admissions may be lost without losing credit.
--
-- An account is a number: 0 issuance; of the peer with id p, 4p+1 pending, 4p+2 settled, 4p+3 voided. The view
-- `account_sums` names them.

CREATE TABLE log (
    run BYTEA NOT NULL PRIMARY KEY CHECK (length(run) = 32)
);

-- `encoded` are the entry's bytes as they were hashed (protocol/wire/ledger.proto); `leaf` is SHA-256(0x00, encoded).
CREATE TABLE entries (
    sequence BIGINT NOT NULL PRIMARY KEY CHECK (sequence >= 0),
    kind     TEXT    NOT NULL CHECK (kind IN ('round', 'settle', 'void', 'rollback')),
    previous BYTEA    NOT NULL CHECK (length(previous) = 32),
    leaf     BYTEA    NOT NULL CHECK (length(leaf) = 32),
    time     BIGINT NOT NULL,          -- unix milliseconds
    encoded     BYTEA    NOT NULL
);
CREATE INDEX entries_by_kind ON entries (kind, sequence);

-- Hashes of the complete subtrees of the Merkle tree over the leaves; level 0 are the leaves themselves, in `entries`.
CREATE TABLE nodes (
    level BIGINT NOT NULL CHECK (level > 0),
    place BIGINT NOT NULL CHECK (place >= 0),
    hash  BYTEA    NOT NULL CHECK (length(hash) = 32),
    PRIMARY KEY (level, place)
);

-- What is known of a round beside its entry. `number` counts round entries from 0.
CREATE TABLE rounds (
    entry      BIGINT NOT NULL PRIMARY KEY REFERENCES entries (sequence),
    number     BIGINT NOT NULL UNIQUE CHECK (number >= 0),
    round      BIGINT NOT NULL CHECK (round >= 0),
    record     BYTEA    NOT NULL UNIQUE CHECK (length(record) = 32),
    parent     BYTEA    NOT NULL CHECK (length(parent) = 32),
    base_state BYTEA    NOT NULL CHECK (length(base_state) = 32),
    loss       DOUBLE PRECISION    NOT NULL,
    tokens     BIGINT NOT NULL CHECK (tokens > 0),
    seen_at    DOUBLE PRECISION,                    -- unix seconds when this coordinator first saw the record; NULL: it was away
    final      BYTEA                     -- the owner's signed final, where one was made for this very round
);

CREATE TABLE peers (
    id   BIGINT NOT NULL PRIMARY KEY CHECK (id > 0),
    peer BYTEA    NOT NULL UNIQUE CHECK (length(peer) = 32)
);

-- The leaves under a round entry's `lines_root`.
CREATE TABLE lines (
    entry BIGINT NOT NULL REFERENCES rounds (entry),
    line  BIGINT NOT NULL CHECK (line >= 0),
    peer  BIGINT NOT NULL REFERENCES peers (id),
    encoded  BYTEA    NOT NULL,
    PRIMARY KEY (entry, line)
);
CREATE UNIQUE INDEX lines_by_peer ON lines (peer, entry);

-- Double entry: from one account to another, by the entry `sequence`, for a line of the round entry `entry`. A line is
-- issued once, and leaves pending once: that is the primary key.
CREATE TABLE transfers (
    entry         BIGINT NOT NULL,
    line          BIGINT NOT NULL,
    source        BIGINT NOT NULL,
    target        BIGINT NOT NULL,
    sequence      BIGINT NOT NULL REFERENCES entries (sequence),
    micro_credits BIGINT NOT NULL CHECK (micro_credits >= 0),
    PRIMARY KEY (entry, line, source),
    FOREIGN KEY (entry, line) REFERENCES lines (entry, line),
    CHECK ((source = 0 AND target % 4 = 1) OR (source % 4 = 1 AND target IN (source + 1, source + 2)))
);

-- Announced updates that a round left out.
CREATE TABLE refusals (
    id     BIGINT NOT NULL PRIMARY KEY,
    round  BIGINT NOT NULL,
    parent BYTEA    NOT NULL CHECK (length(parent) = 32),
    record BYTEA    NOT NULL CHECK (length(record) = 32),
    peer   BYTEA    NOT NULL CHECK (length(peer) = 32),
    header BYTEA    NOT NULL CHECK (length(header) = 32),     -- digest of the signed header
    reason TEXT    NOT NULL,
    at     DOUBLE PRECISION    NOT NULL,
    UNIQUE (peer, record, header)
);

-- Signed tree heads.
CREATE TABLE heads (
    id   BIGINT NOT NULL PRIMARY KEY,
    size BIGINT NOT NULL CHECK (size >= 0),
    root BYTEA    NOT NULL CHECK (length(root) = 32),
    time BIGINT NOT NULL,
    encoded BYTEA    NOT NULL
);

-- Which account a peer belongs to; the newest word counts.
CREATE TABLE bindings (
    id      BIGINT NOT NULL PRIMARY KEY,
    peer    BYTEA    NOT NULL CHECK (length(peer) = 32),
    account BYTEA    NOT NULL CHECK (length(account) = 32),
    time    BIGINT NOT NULL,
    encoded    BYTEA    NOT NULL
);

-- Derived: the round entries that lead to the newest one; a rollback cuts it.
CREATE TABLE branch (
    round BIGINT NOT NULL PRIMARY KEY,
    entry BIGINT NOT NULL
);

-- Derived: what each peer has. `last_at`: when the newest record with the peer in it was seen; NULL: not at first hand.
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
    last_at        DOUBLE PRECISION
);

-- When a record that is not final yet was first seen: for the chart by time, across restarts.
CREATE TABLE first_seen (
    record  BYTEA    NOT NULL PRIMARY KEY,
    round   BIGINT NOT NULL,
    seen_at DOUBLE PRECISION    NOT NULL
);

-- Who was admitted, under which name, until when: the newest admission of each peer.
CREATE TABLE admissions (
    peer       BYTEA    NOT NULL PRIMARY KEY,
    name       TEXT    NOT NULL,
    first_at   BIGINT NOT NULL,
    not_before BIGINT NOT NULL,
    not_after  BIGINT NOT NULL,
    encoded       BYTEA    NOT NULL         -- the signed admission
);

-- For checking by hand: every account by its name; the sum over all is zero.
CREATE VIEW account_sums AS
WITH moved AS (
    SELECT target AS account, micro_credits AS amount FROM transfers
    UNION ALL
    SELECT source AS account, -micro_credits AS amount FROM transfers
)
SELECT CASE account % 4 WHEN 0 THEN 'issuance' WHEN 1 THEN 'pending/' WHEN 2 THEN 'settled/' ELSE 'voided/' END
       || coalesce(encode(peer, 'hex'), '') AS account,
       sum(amount)::BIGINT AS micro_credits
FROM moved LEFT JOIN peers ON peers.id = account / 4
GROUP BY account, peer;

-- Nothing above `branch` is ever changed or removed.
CREATE FUNCTION refuse_to_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'the ledger is append-only' USING ERRCODE = 'integrity_constraint_violation'; END $$;

CREATE TRIGGER log_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON log
FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change();
CREATE TRIGGER entries_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON entries
FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change();
CREATE TRIGGER nodes_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON nodes
FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change();
CREATE TRIGGER rounds_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON rounds
FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change();
CREATE TRIGGER peers_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON peers
FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change();
CREATE TRIGGER lines_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON lines
FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change();
CREATE TRIGGER transfers_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON transfers
FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change();
CREATE TRIGGER refusals_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON refusals
FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change();
CREATE TRIGGER heads_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON heads
FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change();
CREATE TRIGGER bindings_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON bindings
FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change();

-- One chain of hashes, without gaps.
CREATE FUNCTION follow_the_one_before() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.sequence > 0 AND NOT EXISTS (
        SELECT 1 FROM entries WHERE sequence = NEW.sequence - 1 AND leaf = NEW.previous
    ) THEN
        RAISE EXCEPTION 'an entry must name the one before it' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER entries_follow_each_other BEFORE INSERT ON entries
FOR EACH ROW EXECUTE FUNCTION follow_the_one_before();
