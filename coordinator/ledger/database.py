"""The difference between SQLite and PostgreSQL: connections, transactions, and the meaning of errors.

Statements are written once, with `?` for values. Both databases are used by one thread at a time.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coordinator.errors import LedgerError

Row = tuple[Any, ...]


class Database(ABC):
    """One connection. `where` names it to people, without a password. All methods raise LedgerError."""

    dialect: str
    where: str
    SNAPSHOT = "BEGIN"
    _open = False

    @abstractmethod
    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Row]: ...

    @abstractmethod
    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None: ...

    @abstractmethod
    def script(self, text: str) -> None:
        """Run several statements within the open transaction."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a writing transaction: there is no other writer until its end."""

    @property
    @abstractmethod
    def in_transaction(self) -> bool:
        """True while a transaction is open.

        After some errors (a full disk, a lost connection) the database ends it by itself.
        """

    @abstractmethod
    def tables(self) -> set[str]: ...

    @abstractmethod
    def close(self) -> None: ...

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes within durable if the context ends without an error, else none."""
        self.begin()
        self._open = True
        try:
            yield
            self.query("COMMIT")
        except BaseException:
            with suppress(LedgerError):  # the first error is the one to report
                self.query("ROLLBACK")
            raise
        finally:
            self._open = False

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read everything within as of one moment, whatever is written meanwhile."""
        self.query(self.SNAPSHOT)
        try:
            yield
        finally:
            self.query("ROLLBACK")

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Make a section of a transaction that fails by itself."""
        self.query("SAVEPOINT part")
        try:
            yield
        except BaseException:
            with suppress(LedgerError):
                self.query("ROLLBACK TO SAVEPOINT part")
                self.query("RELEASE SAVEPOINT part")
            raise
        self.query("RELEASE SAVEPOINT part")


class SqliteDatabase(Database):
    """A file (https://sqlite.org/wal.html): write-ahead log, and every commit is synced to disk before it returns."""

    dialect = "sqlite"

    def __init__(self, path: Path, *, reader: bool = False):
        self.where = str(path)
        with self._explained():
            # Autocommit: transactions are begun by hand, so that none is open by accident.
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10, check_same_thread=False)
        try:
            self.query("PRAGMA journal_mode = WAL")
            self.query("PRAGMA synchronous = FULL")
            self.query("PRAGMA foreign_keys = ON")
            self.query("PRAGMA trusted_schema = OFF")
            # SQLite checks each page, so that it can detect one that a failing disk returned wrong.
            self.query("PRAGMA cell_size_check = ON")
            if reader:
                self.query("PRAGMA query_only = ON")
        except LedgerError:
            self._db.close()
            raise

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        with self._explained():
            return self._db.execute(sql, values).fetchall()

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        with self._explained():
            self._db.executemany(sql, rows)

    def script(self, text: str) -> None:
        # Not executescript: that would commit before the schema is whole.
        for statement in _statements(text):
            self.query(statement)

    def begin(self) -> None:
        self.query("BEGIN IMMEDIATE")

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction

    def tables(self) -> set[str]:
        return {r[0] for r in self.query("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def damage(self, *, quick: bool = False) -> str:
        """Return what SQLite itself finds wrong with the file; "" for nothing.

        Reads all of it, or, if `quick`, only the balances, which name every peer.
        """
        found = [] if quick else [r[0] for r in self.query("PRAGMA integrity_check(3)") if r[0] != "ok"]
        # A lost page can leave a sound file in which rows name others that are gone: a join would leave those out.
        rows = self.query("PRAGMA foreign_key_check" + "(balances)" * quick)
        dangling = sorted({(r[0], r[2]) for r in rows})
        found += [f"rows of {table} name rows of {other} that are missing" for table, other in dangling]
        return "; ".join(found)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError) as e:
            raise LedgerError(f"{self.where}: {e}: {_remedy(str(e))}") from e


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for part in script.split(";")[:-1]:
        statement += part + ";"  # a trigger has several statements: SQLite knows where it ends
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _remedy(text: str) -> str:
    if "locked" in text:
        return "another coordinator uses this folder: stop it first"
    if "full" in text:
        return "free some disk space; what was acknowledged is kept, and the rest is tried again"
    if "unable to open" in text or "readonly" in text:
        return "check that the folder exists and that you may write there"
    return "restore the file from a copy, or move it away: credits are computed again from the chain"
