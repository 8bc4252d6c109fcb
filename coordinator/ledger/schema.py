"""Brings a database to the newest schema by the numbered migrations that are missing, in one transaction."""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.errors import LedgerError
from coordinator.ledger.database import Database
from protocol.ids import RunId

FOLDER = Path(__file__).parent / "migrations"
_NAME = re.compile(r"^(\d{4})_(\w+)(?:\.(sqlite|postgresql))?\.sql$")
_TABLE = """CREATE TABLE migrations (
    number BIGINT NOT NULL PRIMARY KEY,
    name   TEXT   NOT NULL
)"""
_REMEDY = "start the version that made it, or move it away (credits are computed again from the chain)"


def migrations(dialect: str, folder: Path = FOLDER) -> list[tuple[int, str, Path]]:
    """Return number, name and file of each migration for a database, in order. Raises LedgerError for a gap."""
    found: dict[int, tuple[int, str, Path]] = {}
    for path in sorted(folder.glob("*.sql")):
        match = _NAME.match(path.name)
        if match is None:
            raise LedgerError(f"{path} is not named NUMBER_NAME.sql or NUMBER_NAME.DATABASE.sql: a fault of this Cairn")
        if match[3] in (None, dialect):
            if int(match[1]) in found:
                raise LedgerError(f"{path}: two migrations have this number: a fault of this Cairn")
            found[int(match[1])] = (int(match[1]), match[2], path)
    if sorted(found) != list(range(1, len(found) + 1)):
        raise LedgerError(f"{folder} lacks a migration for {dialect}: a fault of this Cairn")
    return [found[number] for number in sorted(found)]


def migrate(db: Database, run: RunId, folder: Path = FOLDER) -> None:
    """Bring a database to the newest schema. Raises LedgerError if it is of another run or of a newer schema."""
    known = migrations(db.dialect, folder)
    with db.transaction():
        tables = db.tables()
        if "migrations" not in tables:
            if tables:
                raise LedgerError(f"{db.where} has tables that are no ledger of this Cairn: {_REMEDY}")
            db.query(_TABLE)
        there = dict(db.query("SELECT number, name FROM migrations"))
        newer = [n for n in there if n > len(known)]
        if newer:
            raise LedgerError(f"{db.where} is a ledger of form {max(newer)}, newer than this Cairn's: {_REMEDY}")
        for number, name, path in known:
            if number not in there:
                db.script(path.read_text())
                db.query("INSERT INTO migrations (number, name) VALUES (?, ?)", (number, name))
        if not (rows := db.query("SELECT run FROM log")):
            db.query("INSERT INTO log (run) VALUES (?)", (bytes(run),))
        elif bytes(rows[0][0]) != run:
            other = RunId(bytes(rows[0][0])).short
            raise LedgerError(f"{db.where} is the ledger of run {other}, not of {run.short}: start with another folder")
