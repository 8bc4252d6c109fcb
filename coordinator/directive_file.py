"""The owner's directives in the run's folder: a file of lines that only grows."""

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
        self._append(base64.b64encode(directive.encoded))

    def mark_done(self, epoch: int, left: Digest | None) -> None:
        """Store that the ledger has followed this rollback, and the newest final record that it left."""
        self._append(b"done %d" % epoch + (b"" if left is None else b" %b" % left.hex().encode()))

    def _append(self, line: bytes) -> None:
        try:
            self._file.append([line])
        except OSError as e:
            why = (e.strerror or str(e)).lower()
            raise CoordinatorError(f"{self._file.path} cannot be written: {why}; the directive was not given") from None
