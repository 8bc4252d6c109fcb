"""The owner's directives in the run's folder: a file of lines, shortened to those that still count."""

from __future__ import annotations

import base64
import logging
from contextlib import suppress
from pathlib import Path

from coordinator.durable import LineFile
from coordinator.errors import CoordinatorError
from protocol.errors import MalformedError, ProtocolError
from protocol.ids import Digest, PeerKey
from protocol.message_codec import MessageDecoder
from protocol.messages import Directive, RoundChanges, Signed

log = logging.getLogger(__name__)

FILE = "directives"
"""In the run's folder:

one line for each directive, base64 of its envelope, and "done N RECORD" once the ledger has followed the N-th
rollback. RECORD (hexadecimal) is the newest final record that it left, if it left any.
"""

MAX_LINE = 128 * 1024
MAX_FILE = 256 * 1024 * 1024
FULL = 4 * 1024 * 1024
"""Bytes from which only the newest directive is kept, those that changed rollback, ban, pause or policy, and "done"."""


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
                f"{self._file.path} cannot be read: {(e.strerror or str(e)).lower()}; fix its permissions"
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
        if not directives:
            return []
        in_order = sorted(directives, key=lambda d: d.body.precedence)
        still_banned = set(in_order[-1].body.banned)
        kept: list[Signed[Directive]] = []
        epoch, banned, orders = 0, set[PeerKey](), ("running", 0, RoundChanges(), 0)
        for d in in_order:
            new = (d.body.run_status, d.body.since, d.body.changes, d.body.from_round)
            # The reason of a ban, a pause or an end is in the directive that gave it; a policy holds until the next.
            ordered = bool(still_banned & (set(d.body.banned) - banned)) or new != orders
            if d.body.epoch > epoch or ordered or d is in_order[-1]:
                kept.append(d)
            epoch, banned, orders = d.body.epoch, set(d.body.banned), new
        return [*map(_line, kept), *(_done_line(epoch, left) for epoch, left in done.items())]


def _line(directive: Signed[Directive]) -> bytes:
    return base64.b64encode(directive.encoded)


def _done_line(epoch: int, left: Digest | None) -> bytes:
    return b"done %d" % epoch + (b"" if left is None else b" %b" % left.hex().encode())
