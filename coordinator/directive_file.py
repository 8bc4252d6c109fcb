"""The owner's directives in the run's folder: a file of lines, shortened to those that still count."""

from __future__ import annotations

import base64
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.durable import LineFile
from coordinator.errors import CoordinatorError
from protocol.errors import MalformedError, ProtocolError, os_reason
from protocol.ids import Digest, PeerKey
from protocol.message_codec import MessageDecoder
from protocol.messages import Directive, RoundChanges, Signed

log = logging.getLogger(__name__)

FILE = "directives"
"""In the run's folder:

one line for each directive, base64 of its envelope, and "done N RECORD" once the ledger has followed the N-th
rollback. RECORD (hexadecimal) is the newest final record that it left, if it left any.

"left BASE ENVELOPE" is an order that the coordinator did not answer to, and the digest of the directive that it was
made from ("none": of none). It counts once its envelope has a line of its own, and never after "refused DIGEST".
"""

MAX_LINE = 128 * 1024
MAX_FILE = 256 * 1024 * 1024
FULL = 4 * 1024 * 1024
"""Bytes from which only the newest directive is kept, those that changed rollback, ban, pause or policy, and "done"."""


@dataclass(frozen=True, slots=True)
class LeftOrder:
    """An order that waits in the folder, and the digest of the directive that it was made from; b"" for none."""

    directive: Signed[Directive]
    base: bytes


class DirectiveFile:
    """The directives of one run, in the order in which they were stored. Blocking; raises CoordinatorError."""

    def __init__(self, folder: Path, decoder: MessageDecoder):
        self._file = LineFile(folder / FILE, mode=0o600)
        self._decoder = decoder
        self._left: tuple[tuple[int, int] | None, list[LeftOrder]] = (None, [])
        """The orders that wait, with time and size of the file that had them."""

    def read(self) -> tuple[list[Signed[Directive]], dict[int, Digest | None]]:
        """Return the directives, oldest first, and the newest final record that each rollback has left.

        The second has the epochs of all rollbacks that the ledger has followed; None if one left no final record.
        A line that a kill has torn is skipped: its directive was not acknowledged.
        """
        directives: list[Signed[Directive]] = []
        done: dict[int, Digest | None] = {}
        for line in self._lines():
            if line.startswith(b"done "):
                with suppress(ValueError, MalformedError):
                    _, epoch, *left = line.split()
                    done[int(epoch)] = Digest(bytes.fromhex(left[0].decode())) if left else None
                continue
            if line.strip() and not line.startswith((b"left ", b"refused ")):
                directives += self._decoded(line)
        return directives, done

    def _lines(self) -> list[bytes]:
        try:
            return [line for line in self._file.read(MAX_FILE) if len(line) <= MAX_LINE]
        except OSError as e:
            raise CoordinatorError(f"{self._file.path} cannot be read: {os_reason(e)}; fix its permissions") from None

    def _decoded(self, line: bytes) -> list[Signed[Directive]]:
        """Return the directive of a line; none if it is torn, or another's."""
        try:
            return [self._decoder.decode(base64.b64decode(line, validate=True), Directive)]
        except (ValueError, MalformedError, ProtocolError) as e:
            log.warning("%s: a line is skipped: %s", self._file.path, e)
            return []

    def left(self) -> list[LeftOrder]:
        """Return the orders that wait here, oldest first. Nothing is read again while the file stays as it was."""
        try:
            found = self._file.path.stat()
            version = (found.st_mtime_ns, found.st_size)
        except OSError:
            version = None  # there is none, or `_lines` says why it cannot be read
        if version is None or version != self._left[0]:
            lines = self._lines()
            decided = {*lines}
            waiting = [line.split() for line in lines if line.startswith(b"left ")]
            orders = [
                LeftOrder(directive, _base(words[1]))
                for words in waiting
                if len(words) == 3 and words[2] not in decided
                for directive in self._decoded(words[2])
                if _refused_line(directive) not in decided
            ]
            self._left = (version, sorted(orders, key=lambda o: o.directive.body.precedence))
        return list(self._left[1])

    def leave(self, order: LeftOrder) -> None:
        """Store an order for the coordinator, which does not answer now."""
        self._append(_left_line(order))

    def mark_refused(self, directive: Signed[Directive]) -> None:
        """Store that an order that was left here is not given."""
        self._append(_refused_line(directive))

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
            why = os_reason(e)
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
            return [*map(_left_line, self.left())]
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
        waiting = map(_left_line, self.left())
        return [*map(_line, kept), *waiting, *(_done_line(epoch, left) for epoch, left in done.items())]


def _line(directive: Signed[Directive]) -> bytes:
    return base64.b64encode(directive.encoded)


def _left_line(order: LeftOrder) -> bytes:
    return b"left %b %b" % (order.base.hex().encode() or b"none", _line(order.directive))


def _base(word: bytes) -> bytes:
    """Return the digest in a line; that of no directive if it is none, so that the order is refused."""
    with suppress(ValueError):
        return b"" if word == b"none" else bytes.fromhex(word.decode())
    return word


def _refused_line(directive: Signed[Directive]) -> bytes:
    return b"refused %b" % directive.digest.hex().encode()


def _done_line(epoch: int, left: Digest | None) -> bytes:
    return b"done %d" % epoch + (b"" if left is None else b" %b" % left.hex().encode())
