"""A file of JSON rows that grows at its end, up to a bound: added rows survive a crash."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from coordinator.durable import LineFile
from coordinator.errors import CoordinatorError
from protocol.errors import os_reason

Row = dict[str, Any]
MAX_FILE = 64 * 1024 * 1024


class JsonLines:
    """The newest rows, oldest first, in memory and in a file. Thread-safe: `rows` is never changed in place.

    When there are one and a half times `most` rows, only the newest `most` are kept.
    """

    def __init__(self, path: Path, most: int):
        self._file = LineFile(path)
        self._most = most
        self._damaged = False
        self._lock = threading.Lock()
        self.rows: list[Row] = self._read()

    def add(self, *rows: Row) -> None:
        """Add rows, on disk when this returns. Raises CoordinatorError; they are in memory all the same."""
        with self._lock:
            self.rows = [*self.rows, *rows]
            if self._damaged or len(self.rows) > self._most + self._most // 2:
                self.rows = self.rows[-self._most :]
                self._write(self._file.rewrite, self.rows)
            else:
                self._write(self._file.append, rows)

    def change(self, change: Callable[[Row], Row]) -> None:
        """Replace every row by what `change` returns. Raises CoordinatorError."""
        with self._lock:
            changed = [change(row) for row in self.rows]
            if changed != self.rows:
                self.rows = changed
                self._write(self._file.rewrite, self.rows)

    def save(self) -> None:
        """Write what an earlier call could not. Raises CoordinatorError."""
        with self._lock:
            if self._damaged:
                self._write(self._file.rewrite, self.rows)

    def _write(self, write: Callable[[Iterable[bytes]], None], rows: Iterable[Row]) -> None:
        """Append or rewrite rows. After a failure half a line may be in the file: the next call rewrites it."""
        encoded = [json.dumps(row, separators=(",", ":"), allow_nan=False).encode() for row in rows]
        try:
            write(encoded)
        except OSError as e:
            self._damaged = True
            raise _error(self._file.path, e) from None
        self._damaged = False

    def _read(self) -> list[Row]:
        """Return the rows in the file; lines that a crash tore, and anything else that is no row, are skipped."""
        try:
            lines = self._file.read(MAX_FILE)
        except OSError as e:
            raise _error(self._file.path, e) from None
        rows = []
        for line in lines[-2 * self._most :]:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows[-self._most :]


def _error(path: Path, e: OSError) -> CoordinatorError:
    return CoordinatorError(f"{path} cannot be used: {os_reason(e)}: free some disk space, or repair it")
