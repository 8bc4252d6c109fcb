"""What a volunteer sees: log lines, and under them one live line of how the node is doing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cairn.figures import byte_size, count

LINE_SECONDS = 30.0
"""Without a terminal: a progress line in the log every so often."""


class PeerView:
    """`live`: a line that is redrawn in place; else the same line in the log now and then."""

    def __init__(self, *, live: bool):
        self._live = live
        self._console = Console(highlight=False, soft_wrap=True)
        self.handler: logging.Handler = _ConsoleHandler(self._console)

    @contextmanager
    def showing(self, look: Callable[[], Any]) -> Iterator[None]:
        """Show what `look` gives (a `peer.node.snapshot.Snapshot`) for as long as the block lasts."""
        if self._live:
            with Live(console=self._console, get_renderable=lambda: progress_line(look()), refresh_per_second=2):
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
            logging.getLogger("cairn.peer").info("%s", progress_line(look()).plain)


class _ConsoleHandler(logging.Handler):
    """Log lines above the live line; problems in colour."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        self._console.print(Text(self.format(record), style=style))


def progress_line(s: Any) -> Text:
    """One line: where the round is, how fast, how well."""
    text = Text()
    style = {"training": "green", "exchanging": "cyan", "syncing": "yellow", "joining": "yellow"}.get(s.phase, "")
    text.append(f"{s.phase:<10}", style=style)
    text.append(f" round {s.round}")
    if s.target_tokens:
        share = min(1.0, s.round_tokens / s.target_tokens)
        text.append(f" {bar(share)} {share:4.0%}")
    text.append(f"  loss {s.loss:.3f}" if s.loss else "  loss -")
    text.append(f"  {count(s.tokens_per_second)} tokens/s")
    text.append(f"  {s.members + 1} peers")
    text.append(f"  up {byte_size(s.bytes_up)} down {byte_size(s.bytes_down)}")
    if s.total_tokens:
        text.append(f"  run {min(1.0, s.accepted_tokens / s.total_tokens):.0%}")
    return text


def bar(share: float, width: int = 12) -> str:
    """A bar of so many characters."""
    full = round(share * width)
    return "━" * full + "╌" * (width - full)
