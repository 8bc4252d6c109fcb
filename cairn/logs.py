"""Logging to a rotating file and to the terminal, with a bound on the lines that anybody can cause."""

from __future__ import annotations

import logging
import logging.handlers
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protocol.bounded import BoundedDict
from protocol.errors import CairnError, os_reason
from protocol.token_bucket import TokenBucket

QUIET = ("hivemind", "transformers", "urllib3", "asyncio", "grpc", "uvicorn.access", "uvicorn.error", "httpx", "fsspec")
OWN = ("cairn", "coordinator", "peer", "protocol")
"""The packages whose statements are written to be read. Libraries log what strangers do, such as invalid HTTP."""

BURST, LIBRARY_BURST = 1000, 20
"""Lines that one statement may log at once, of our own code and of a library."""

LINES_PER_SECOND = 0.1
"""Lines that one statement may log in the long run."""

REPEAT_SECONDS = 60.0
"""Seconds in which a statement does not log the same text again. Longer, and a state that changed back is not seen."""

MAX_STATEMENTS = 4096
"""Statements that are remembered: more than the program has."""

MAX_TEXTS = 4096
"""Texts that are remembered."""

MAX_CHARACTERS = 2000
"""Length of a message. Some quote what a stranger sent."""

MAX_TRACEBACK = 8000
"""Length of a traceback. A longer one is cut in the middle: it begins with the place and ends with the error."""


@dataclass(slots=True)
class _Statement:
    lines: TokenBucket
    left_out: int = 0


@dataclass(slots=True)
class _Text:
    again_at: float
    left_out: int = 0


class LineLimit(logging.Filter):
    """Limits the lines of each logging statement, their length, and how often a text is repeated.

    A statement is a place in the code, with the `kind` of a report of the round machine. A stranger chooses neither.
    The next line that passes says how many were left out. One filter serves several handlers: a record counts once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()  # handlers filter before they take theirs
        self._statements: BoundedDict[tuple[str, str, int, str], _Statement] = BoundedDict(MAX_STATEMENTS)
        self._texts: BoundedDict[tuple[tuple[str, str, int, str], int], _Text] = BoundedDict(MAX_TEXTS)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether this line is logged."""
        passes = getattr(record, "passes_limit", None)
        if passes is None:
            passes = record.passes_limit = self._passes(record)
        return passes

    def _passes(self, record: logging.LogRecord) -> bool:
        """Return whether this line is logged, and make it ready: of bounded length, whatever its arguments are."""
        try:
            message = record.getMessage()
        except Exception as e:  # noqa: BLE001 - a mistake of the caller, whom a line of the log must not stop
            message = f"a line that cannot be formatted, of {record.pathname}:{record.lineno}: {type(e).__name__}"
        with self._lock:
            left_out = self._count(record, hash((message, str(record.exc_info[1]) if record.exc_info else "")))
        if left_out is None:
            return False
        if len(message) > MAX_CHARACTERS:
            message = message[:MAX_CHARACTERS] + "..."
        if left_out:
            message += f" ({left_out:,} such lines before it were left out)"
        record.msg, record.args = message, ()
        if record.exc_info and not record.exc_text:
            text = logging.Formatter().formatException(record.exc_info)
            half = MAX_TRACEBACK // 2
            record.exc_text = text if len(text) <= MAX_TRACEBACK else f"{text[:half]}\n...\n{text[-half:]}"
        return True

    def _count(self, record: logging.LogRecord, text: int) -> int | None:
        """Count a line of its statement; return how many before it were left out, or None for one that is.

        `text`: the hash of the line, with its exception.
        """
        key = (record.name, record.pathname, record.lineno, getattr(record, "kind", ""))
        now = self._clock()
        statement = self._statements.get(key)
        if statement is None:
            burst = BURST if record.name.partition(".")[0] in OWN else LIBRARY_BURST
            statement = _Statement(TokenBucket(LINES_PER_SECOND, burst, now))
        self._statements.renew(key, statement)
        said = self._texts.get((key, text))
        if said is not None and now < said.again_at:
            said.left_out += 1
            return None
        statement.lines.refill(now)
        if statement.lines.tokens < 1:
            statement.left_out += 1
            return None
        statement.lines.charge(1)
        left_out, statement.left_out = statement.left_out, 0
        if said is not None:
            left_out += said.left_out
        self._texts.renew((key, text), _Text(now + REPEAT_SECONDS))
        return left_out


def set_up_logging(file: Path, *, terminal: logging.Handler | None = None) -> None:
    """Log to `file` (10 MB, three kept) and to the terminal, within the limits of `LineLimit`.

    Lines with `extra={"file_only": True}` stay off the terminal: they help to find a fault, and ask nothing of people.

    Cairn's own loggers log from INFO, libraries from WARNING. Raises CairnError if the folder cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        to_file = logging.handlers.RotatingFileHandler(file, maxBytes=10**7, backupCount=3)
    except OSError as e:
        raise CairnError(
            f"{file.parent} cannot be written to ({os_reason(e)}): name another folder with --home, or fix this one"
        ) from None
    # On a full disk logging would print a traceback for each line; the line itself still shows in the terminal.
    logging.raiseExceptions = False
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    shown = terminal or logging.StreamHandler()
    shown.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    limit = LineLimit()
    shown.addFilter(lambda record: not getattr(record, "file_only", False))
    for handler in (to_file, shown):
        handler.addFilter(limit)
    logging.getLogger().handlers.clear()
    logging.basicConfig(level=logging.INFO, handlers=[to_file, shown])
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
