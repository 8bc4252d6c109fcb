"""A file of JSON lines that only grows at its end, to a bound: what was added is there after a crash."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.errors import CoordinatorError

Row = dict[str, Any]
MAX_FILE = 64 * 1024 * 1024


class JsonLines:
    """The newest rows, oldest first, in memory and in `path`; when there are `most` and a half, the oldest go.
    Thread-safe: `rows` is never changed in place."""

    def __init__(self, path: Path, most: int):
        self._path = path
        self._most = most
        self._torn = False
        self._lock = threading.Lock()
        self.rows: list[Row] = self._read()

    def add(self, *rows: Row) -> None:
        """Keep rows; durable when it returns. Raises CoordinatorError: they are in memory all the same."""
        with self._lock:
            self.rows = [*self.rows, *rows]
            if self._torn or len(self.rows) > self._most + self._most // 2:
                self.rows = self.rows[-self._most :]
                self._rewrite()
                return
            try:
                with self._path.open("ab") as file:
                    file.write(_lines(rows))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as e:
                self._torn = True  # half a line may be there: the next one writes all anew
                raise _error(self._path, e) from None

    def change(self, change: Callable[[Row], Row]) -> None:
        """Every row through this; the file anew if one differs. Raises CoordinatorError."""
        with self._lock:
            changed = [change(row) for row in self.rows]
            if changed != self.rows:
                self.rows = changed
                self._rewrite()

    def _rewrite(self) -> None:
        draft = self._path.with_name(f".{self._path.name}.draft")
        try:
            with draft.open("wb") as file:
                file.write(_lines(self.rows))
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self._path)
            self._torn = False
        except OSError as e:
            self._torn = True
            raise _error(self._path, e) from None

    def _read(self) -> list[Row]:
        """What is there. A line that a crash tore, or anything else that is no row, is passed over."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - MAX_FILE))
                data = file.read(MAX_FILE)
        except FileNotFoundError:
            return []
        except OSError as e:
            raise _error(self._path, e) from None
        self._torn = bool(data) and not data.endswith(b"\n")
        rows = []
        for line in data.splitlines()[-2 * self._most :]:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows[-self._most :]


def _lines(rows: Any) -> bytes:
    return b"".join(json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n" for row in rows)


def _error(path: Path, e: OSError) -> CoordinatorError:
    return CoordinatorError(
        f"{path} cannot be used: {(e.strerror or str(e)).lower()}: free some disk space, or mend it"
    )
