"""The owner's directives in the run's folder: a file of lines, shortened to those that still count."""

from __future__ import annotations

import base64
import logging
from contextlib import suppress
from pathlib import Path

from coordinator.durable import LineFile
from coordinator.errors import CoordinatorError
from protocol.errors import MalformedError, ProtocolError
from protocol.ids import Digest
from protocol.message_codec import MessageDecoder
from protocol.messages import Directive, Signed

log = logging.getLogger(__name__)

FILE = "directives"
"""In the run's folder:

one line for each directive, base64 of its envelope, and "done N RECORD" once the ledger has followed the N-th
rollback. RECORD (hexadecimal) is the newest final record that it left, if it left any.
"""

MAX_LINE = 128 * 1024
MAX_FILE = 256 * 1024 * 1024
FULL = 4 * 1024 * 1024
"""Bytes from which only the newest directive and the first of each rollback are kept, with the "done" lines."""


class DirectiveFile:
    """The directives of one run, in the order in which they were stored. Blocking; raises CoordinatorError."""

    def __init__(self, folder: Path, decoder: MessageDecoder):
        self._file = LineFile(folder / FILE, mode=0o600)
        self._decoder = decoder

    def read(self) -> tuple[list[Signed[Directive]], dict[int, Digest | None]]:
        """Return the directives, oldest first, and the newest final record that each rollback has left.

        The second has the epochs of all rollbacks that the ledger has followed; None if one left no final record.
        A line that a kill has torn is skipped: its directive was not acknowledged.
        """
        directives: list[Signed[Directive]] = []
        done: dict[int, Digest | None] = {}
        try:
            lines = self._file.read(MAX_FILE)
        except OSError as e:
            raise CoordinatorError(
                f"{self._file.path} cannot be read: {(e.strerror or str(e)).lower()}; mend its permissions"
            ) from None
        for line in lines:
            if line.startswith(b"done "):
                with suppress(ValueError, MalformedError):
                    _, epoch, *left = line.split()
                    done[int(epoch)] = Digest(bytes.fromhex(left[0].decode())) if left else None
                continue
            try:
                if not line.strip() or len(line) > MAX_LINE:
                    continue
                directives.append(self._decoder.decode(base64.b64decode(line, validate=True), Directive))
            except (ValueError, MalformedError, ProtocolError) as e:
                log.warning("%s: a line is skipped: %s", self._file.path, e)
        return directives, done

    def append(self, directive: Signed[Directive]) -> None:
        """Store a directive; it is on disk when this returns."""
        self._append(_line(directive))

    def mark_done(self, epoch: int, left: Digest | None) -> None:
        """Store that the ledger has followed this rollback, and the newest final record that it left."""
        self._append(_done_line(epoch, left))

    def _append(self, line: bytes) -> None:
        """Add a line, and shorten a full file. A kill between the two leaves the longer file."""
        try:
            self._file.append([line])
        except OSError as e:
            why = (e.strerror or str(e)).lower()
            raise CoordinatorError(f"{self._file.path} cannot be written: {why}; the directive was not given") from None
        try:
            if self._file.path.stat().st_size >= FULL:
                self._file.rewrite(self._needed())
        except (OSError, CoordinatorError) as e:
            log.warning("%s has everything, and cannot be shortened: %s; free some disk space", self._file.path, e)

    def _needed(self) -> list[bytes]:
        """Return the lines that `RunControl` reads after a restart."""
        directives, done = self.read()
        first: dict[int, Signed[Directive]] = {}
        for d in directives:
            if d.body.epoch:
                first.setdefault(d.body.epoch, d)
        kept = list(first.values())
        newest = max(directives, key=lambda d: d.body.precedence, default=None)
        if newest is not None and newest not in kept:
            kept.append(newest)
        return [*map(_line, kept), *(_done_line(epoch, left) for epoch, left in done.items())]


def _line(directive: Signed[Directive]) -> bytes:
    return base64.b64encode(directive.encoded)


def _done_line(epoch: int, left: Digest | None) -> bytes:
    return b"done %d" % epoch + (b"" if left is None else b" %b" % left.hex().encode())
