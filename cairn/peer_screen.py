"""The terminal of a volunteer: log lines, and below them two live lines with the node's progress and its earnings."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cairn.number_format import byte_size, count, credits
from protocol.ids import PeerKey

LINE_SECONDS = 30.0
"""Seconds between progress lines in the log, without a terminal."""


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


@dataclass(frozen=True, slots=True)
class PeerEarnings:
    """The peer's account at the coordinator. `fresh`: the coordinator answered the last request."""

    micro_credits: int
    pending: int
    rounds: int
    fresh: bool = True


class PeerScreen:
    """The live lines, redrawn in place if `live`; else the same as a log line each LINE_SECONDS."""

    def __init__(self, *, live: bool):
        self._live = live
        self.earnings: PeerEarnings | None = None
        """Set by the task that asks the coordinator."""

        self._console = Console(highlight=False, soft_wrap=True)
        self.handler: logging.Handler = _ConsoleHandler(self._console)

    @contextmanager
    def showing(self, snapshot: Callable[[], Any]) -> Iterator[None]:
        """Show the `peer.node.snapshot.Snapshot` that `snapshot` returns, as long as the block lasts."""
        if self._live:

            def draw() -> Text:
                now = snapshot()
                return Text("\n").join((progress_line(now), Text(" " * 10) + account_line(now, self.earnings)))

            # Transient: the command's last line states the outcome.
            with Live(console=self._console, get_renderable=draw, refresh_per_second=2, transient=True):
                yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._log_progress, args=(snapshot, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    def _log_progress(self, snapshot: Callable[[], Any], over: threading.Event) -> None:
        while not over.wait(LINE_SECONDS):
            now = snapshot()
            line = progress_line(now) + Text(" ") + account_line(now, self.earnings)
            logging.getLogger("cairn.peer").info("%s", line.plain)


class _ConsoleHandler(logging.Handler):
    """Log lines above the live line; problems in colour."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        self._console.print(Text(self.format(record), style=style))


def progress_line(s: Any) -> Text:
    """Return phase, round, loss and speed as one line."""
    text = Text()
    style = {"training": "green", "exchanging": "cyan", "syncing": "yellow", "joining": "yellow"}.get(s.phase, "")
    text.append(f"{s.phase:<10}", style=style)
    text.append(f" round {s.round}")
    if s.target_tokens:
        share = min(1.0, s.round_tokens / s.target_tokens)
        text.append(f" {bar(share)} {share:4.0%}")
    if s.rest:
        text.append(f"  {s.rest}" + ("" if s.devices_free else "; its devices are being freed"), style="yellow")
    elif s.phase == "observing":
        text.append("  {made} checks made, {failed} failed, {waiting} wait".format_map(s.audits))
    elif s.device:
        text.append(f"  loss {s.loss:.3f}" if s.loss else "  loss -")
        text.append(f"  {count(s.tokens_per_second)} tokens/s")
        if s.mfu is not None:
            text.append(f"  MFU {s.mfu:.0%}")
    else:
        text.append("  the trainer is starting", style="yellow")
    peers = s.members + 1
    text.append(f"  {peers} peer{'s' * (peers != 1)}")
    if s.total_tokens:
        text.append(f"  run {min(1.0, s.accepted_tokens / s.total_tokens):.0%}")
    if s.orders:
        text.append(f"  {s.orders}", style="yellow")
    return text


def account_line(s: Any, earnings: PeerEarnings | None) -> Text:
    """Return credits and traffic as one line."""
    text = Text(style="dim")
    if earnings is not None:
        total = earnings.micro_credits + earnings.pending
        if total:
            text.append(f" accepted in {earnings.rounds} round{'s' * (earnings.rounds != 1)}  ")
            text.append(f"credits {credits(total)}", style="bold")
        else:
            text.append(" nothing credited yet")
        if earnings.pending:
            text.append(f" ({credits(earnings.pending)} not final yet)")
        if not earnings.fresh:
            text.append("  the coordinator is silent", style="yellow")
        text.append(" ")
    text.append(f" up {byte_size(s.bytes_up)} down {byte_size(s.bytes_down)}")
    return text


def bar(share: float, width: int = 12) -> str:
    """Return a bar of `width` characters."""
    full = round(share * width)
    return "━" * full + "╌" * (width - full)
