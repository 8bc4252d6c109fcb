"""What a volunteer sees: log lines, and under them two live lines: how the node is doing, and what it has earned."""

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

from cairn.formatting import byte_size, count, credits
from protocol.ids import PeerKey

LINE_SECONDS = 30.0
"""Without a terminal: a progress line in the log every so often."""


_PAGE = re.compile(r"https?://[A-Za-z0-9._~:\[\]-]+(/[A-Za-z0-9._~/-]*)?")


def own_page(page: str, key: PeerKey) -> str:
    """Where a peer finds itself on the run's page; "" when what the coordinator calls its page is no address."""
    if not _PAGE.fullmatch(page):
        return ""
    return f"{page}{'' if page.endswith('/') else '/'}#peer/{key}"


@dataclass(frozen=True, slots=True)
class PeerEarnings:
    """What the coordinator says of this peer's account, and whether it answered when it was last asked."""

    micro_credits: int
    pending: int
    rounds: int
    fresh: bool = True


class PeerScreen:
    """`live`: lines that are redrawn in place; else the same as one line in the log now and then."""

    def __init__(self, *, live: bool):
        self._live = live
        self.earnings: PeerEarnings | None = None
        """Whoever asks the coordinator sets it."""

        self._console = Console(highlight=False, soft_wrap=True)
        self.handler: logging.Handler = _ConsoleHandler(self._console)

    @contextmanager
    def showing(self, look: Callable[[], Any]) -> Iterator[None]:
        """Show what `look` gives (a `peer.node.snapshot.Snapshot`) for as long as the block lasts."""
        if self._live:

            def draw() -> Text:
                now = look()
                return Text("\n").join((progress_line(now), Text(" " * 10) + account_line(now, self.earnings)))

            # Gone at the end: then the last words say how it went.
            with Live(console=self._console, get_renderable=draw, refresh_per_second=2, transient=True):
                yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._now_and_then, args=(look, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    def _now_and_then(self, look: Callable[[], Any], over: threading.Event) -> None:
        while not over.wait(LINE_SECONDS):
            now = look()
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
    """Where the round is, how fast, how well."""
    text = Text()
    style = {"training": "green", "exchanging": "cyan", "syncing": "yellow", "joining": "yellow"}.get(s.phase, "")
    text.append(f"{s.phase:<10}", style=style)
    text.append(f" round {s.round}")
    if s.target_tokens:
        share = min(1.0, s.round_tokens / s.target_tokens)
        text.append(f" {bar(share)} {share:4.0%}")
    if s.device:
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
    """What was given and what it earned."""
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
    """A bar of so many characters."""
    full = round(share * width)
    return "━" * full + "╌" * (width - full)
