"""The ledger in PostgreSQL, by URL (psycopg 3, the extra `postgres`): a schema of its own for each run.

There is one writer at a time: each transaction first acquires an advisory lock of the run. A lost connection is
restored for the next transaction; the interrupted one was not acknowledged, and its callers repeat it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from coordinator.errors import LedgerError
from coordinator.ledger.database import Database, Row
from protocol.ids import RunId

CONNECT_SECONDS = 10
SETTINGS = {
    "synchronous_commit": "on",
    "lock_timeout": "10s",
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "60s",
    "client_min_messages": "warning",
}


class PostgresDatabase(Database):
    """A connection to the schema `cairn_` and the first 16 digits of the run id, which is made on first use."""

    dialect = "postgresql"
    SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

    def __init__(self, url: str, run: RunId, *, reader: bool = False):
        self._url = url
        self._schema = f"cairn_{run.hex()[:16]}"
        self._lock = int.from_bytes(run[:8], "big", signed=True)
        self._reader = reader
        self.where = _shown(url)
        with self._explained():
            self._db = self._connected()

    def _connected(self) -> psycopg.Connection:
        # No timeout of the server helps when its host vanishes: the client has to notice. Unix sockets ignore these.
        db = psycopg.connect(
            self._url, autocommit=True, connect_timeout=CONNECT_SECONDS, keepalives=1, keepalives_idle=10,
            keepalives_interval=5, keepalives_count=3, tcp_user_timeout=30_000,
        )  # fmt: skip
        try:
            for name, value in SETTINGS.items():
                db.execute("SELECT set_config(%s, %s, false)", (name, value))
            if self._reader:
                db.execute("SET default_transaction_read_only = on")
            elif not db.execute("SELECT FROM pg_namespace WHERE nspname = %s", (self._schema,)).rowcount:
                # Only then: even IF NOT EXISTS asks for the right to create one in the database.
                db.execute(f"CREATE SCHEMA IF NOT EXISTS {self._schema}".encode())
            db.execute("SELECT set_config('search_path', %s, false)", (self._schema,))
        except BaseException:
            db.close()
            raise
        return db

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        with self._explained():
            self._again()
            cursor = self._db.execute(_translated(sql), values) if values else self._db.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        with self._explained(), self._db.cursor() as cursor:
            cursor.executemany(_translated(sql), rows)

    def script(self, text: str) -> None:
        with self._explained():
            self._db.execute(text.encode())

    def begin(self) -> None:
        self.query("BEGIN")
        try:
            self.query("SELECT pg_advisory_xact_lock(?)", (self._lock,))
        except LedgerError:
            with self._explained():
                self._db.rollback()
            raise

    def _again(self) -> None:
        """Reconnect, but only between transactions: within one, a lost connection is an error."""
        if self._db.closed and not self._open:
            self._db = self._connected()

    @property
    def in_transaction(self) -> bool:
        status = self._db.info.transaction_status
        return not self._db.closed and status in (TransactionStatus.INTRANS, TransactionStatus.ACTIVE)

    def tables(self) -> set[str]:
        return {r[0] for r in self.query("SELECT tablename FROM pg_tables WHERE schemaname = ?", (self._schema,))}

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (psycopg.Error, OverflowError) as e:
            said = " ".join(str(e).split())
            raise LedgerError(f"{self.where}: {said}: {_remedy(e)}") from e


@cache
def _translated(sql: str) -> bytes:
    return sql.replace("%", "%%").replace("?", "%s").encode()


def _shown(url: str) -> str:
    """Return the address without the password."""
    try:
        parts = conninfo_to_dict(url)
    except psycopg.Error as e:
        raise LedgerError(
            f"{url.split('@')[-1]} is no address of a database: want postgresql://USER@HOST/DATABASE"
        ) from e
    return f"postgresql://{parts.get('host', 'localhost')}/{parts.get('dbname', '')}"


def _remedy(error: Exception) -> str:
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return "another coordinator of this run writes there: stop it first"
    if isinstance(error, psycopg.errors.DiskFull):
        return "free some disk space on the server; what was acknowledged is kept, and the rest is tried again"
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return "the user of the URL must own the schema, or may create one in the database"
    if isinstance(error, psycopg.OperationalError):
        return "check that the server runs and that the URL is right; what was acknowledged is kept"
    return "look at the server's log; credits can be computed again from the chain"
