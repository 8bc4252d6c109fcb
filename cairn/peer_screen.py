"""The terminal of a volunteer: log lines, and below them the live view; without a terminal lines, or JSON objects."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.live import Live
from rich.text import Text

from cairn.output import Output
from cairn.peer_view import DownloadLines, PeerEarnings, PeerView, download_lines, lines, one_line
from peer.node.downloads import Download
from peer.node.rate_meter import RateMeter
from protocol.ids import PeerKey

LINE_SECONDS = 30.0
"""Seconds between progress lines in the log, without a terminal."""

LOOK_SECONDS = 1.0
"""Seconds between two looks at the downloads, without a terminal."""

log = logging.getLogger("cairn.peer")

_PAGE = re.compile(r"https?://[A-Za-z0-9._~:\[\]-]+(/[A-Za-z0-9._~/-]*)?")


def page_address(page: str) -> str:
    """Return the address of the run's page with a slash at its end; "" when the coordinator's word is no address."""
    if not _PAGE.fullmatch(page):
        return ""
    return page if page.endswith("/") else f"{page}/"


def own_page(page: str, key: PeerKey) -> str:
    """Return the address of a peer on the run's page; "" when the coordinator's page is no valid address."""
    address = page_address(page)
    return f"{address}#peer/{key}" if address else ""


class PeerScreen:
    """The live lines, redrawn in place; if `plain`, or without a terminal, one line of a log each LINE_SECONDS.

    `as_json`: all output is JSON objects, one a line (docs/command_line.md).
    """

    def __init__(self, *, plain: bool = False, as_json: bool = False):
        self._console = Output(lasts=True, soft_wrap=True)
        self._as_json = as_json
        self._live = self._console.is_live and not (plain or as_json)
        self.earnings: PeerEarnings | None = None
        """Set by the task that asks the coordinator."""

        self.page = ""
        """The peer's own address on the run's page, set by the same task."""

        self.handler: logging.Handler = (_JsonHandler if as_json else _ConsoleHandler)(self._console)

    def view(self, snapshot: Any) -> PeerView:
        """Return what is shown with a `peer.node.snapshot.Snapshot`."""
        return PeerView(snapshot, self.earnings, self.page)

    def say(self, text: str) -> None:
        """Print a line that is no log line, such as the outcome."""
        if self._as_json:
            log.info("%s", text)
        else:
            self._console.print(Text(text))

    @contextmanager
    def showing(self, snapshot: Callable[[], Any]) -> Iterator[None]:
        """Show the snapshot that `snapshot` returns, as long as the block lasts."""
        if self._live:
            with self._redrawing(lambda: lines(self.view(snapshot()), self._console.width)):
                yield
            return
        downloads, due = DownloadLines(), time.monotonic() + LINE_SECONDS

        def look() -> None:
            nonlocal due
            view, now = self.view(snapshot()), time.monotonic()
            _log_downloads(downloads, view.node.downloads, now)
            if now >= due:
                due = now + LINE_SECONDS
                log.info("%s", one_line(view), extra={"fields": status_fields(view)})

        with _looking(look):
            yield

    @contextmanager
    def downloading(self, what: str, size: int) -> Iterator[Callable[[int], None]]:
        """Show a download that is not the node's, as long as the block lasts; the caller notes the bytes that come."""
        held, meter, said = 0, RateMeter(), DownloadLines()

        def note(more: int) -> None:
            nonlocal held
            held = min(size, held + more)

        def now() -> list[Download]:
            return [Download(what, what, held, size, meter.note(held, time.monotonic()))]

        if self._live:
            with self._redrawing(lambda: download_lines(now(), self._console.width)):
                yield note
            return
        with _looking(lambda: _log_downloads(said, now(), time.monotonic())):
            yield note

    @contextmanager
    def _redrawing(self, draw: Callable[[], list[Text]]) -> Iterator[None]:
        def joined() -> Text:
            return Text("\n").join(draw())

        # Transient: the command's last line states the outcome.
        with Live(console=self._console, get_renderable=joined, refresh_per_second=2, transient=True):
            yield


@contextmanager
def _looking(look: Callable[[], None]) -> Iterator[None]:
    """Call `look` every LOOK_SECONDS, in a thread, as long as the block lasts."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(LOOK_SECONDS):
            look()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _log_downloads(lines: DownloadLines, downloads: Sequence[Download], now: float) -> None:
    for line, download in lines.due(downloads, now):
        log.info("%s", line, extra={"fields": {"download": asdict(download)}})


def status_fields(view: PeerView) -> dict[str, Any]:
    """Return a view as the keys that a JSON line has beside those of all lines. JSON has no number like a lost loss."""
    earnings = view.earnings
    node = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(view.node).items()}
    return {"status": node, "credits": asdict(earnings) if earnings else None, "page": view.page}


class _Handler(logging.Handler):
    def __init__(self, console: Output):
        super().__init__()
        self._console = console


class _ConsoleHandler(_Handler):
    """Log lines above the live lines; problems and milestones in colour."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        self._console.print(Text(self.format(record), style=getattr(record, "style", style)))


_LEVELS = ((logging.ERROR, "error"), (logging.WARNING, "warning"), (0, "info"))
"""Not the names that logging has for them: libraries change these."""


class _JsonHandler(_Handler):
    """Log lines as JSON objects on stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": next(name for number, name in _LEVELS if record.levelno >= number),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_text:
            line["traceback"] = record.exc_text
        self._console.out(json.dumps(line | getattr(record, "fields", {}), allow_nan=False))
