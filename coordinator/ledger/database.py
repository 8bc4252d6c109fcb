"""What differs between SQLite and PostgreSQL: how one connects, begins, and what an error means.

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
    """One connection. `where` names it to people, without a password."""

    dialect: str
    where: str
    _open = False

    @abstractmethod
    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """The rows that a statement gives. Raises LedgerError, as all below."""

    @abstractmethod
    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """The statement for each row."""

    @abstractmethod
    def script(self, text: str) -> None:
        """Several statements, within the transaction that is open."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a transaction that writes: no other writer until its end."""

    @property
    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether one is open. After some errors (a full disk, a lost connection) the database ends it by itself."""

    @abstractmethod
    def tables(self) -> set[str]:
        """The names of the tables that are there."""

    @abstractmethod
    def close(self) -> None: ...

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it is on disk when this ends without an error, or none."""
        self.begin()
        self._open = True
        try:
            yield
            self.query("COMMIT")
        except BaseException:
            with suppress(LedgerError):  # the first error is the one to tell
                self.query("ROLLBACK")
            raise
        finally:
            self._open = False

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A part of a transaction that fails by itself."""
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
            # Autocommit: transactions are begun by hand, so that there is never one open by accident.
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10, check_same_thread=False)
        try:
            self.query("PRAGMA journal_mode = WAL")
            self.query("PRAGMA synchronous = FULL")
            self.query("PRAGMA foreign_keys = ON")
            self.query("PRAGMA trusted_schema = OFF")
            # A page that a failing disk gave back wrong is noticed where SQLite can notice it.
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

    def form(self) -> int:
        """`PRAGMA user_version`: 1 in ledgers from before there were migrations."""
        return self.query("PRAGMA user_version")[0][0]

    def damage(self) -> str:
        """What SQLite itself finds wrong with the file; "" for nothing. Reads all of it."""
        found = [r[0] for r in self.query("PRAGMA integrity_check(3)")]
        return "" if found == ["ok"] else "; ".join(found)

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
        statement += part + ";"  # a trigger has more than one: SQLite knows where it ends
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _remedy(text: str) -> str:
    if "locked" in text:
        return "another coordinator uses this folder: stop it first"
    if "full" in text:
        return "free some disk space and start again; nothing that was settled is lost"
    if "unable to open" in text or "readonly" in text:
        return "check that the folder exists and that you may write there"
    return "restore the file from a copy, or move it away: credits are computed again from the chain"
