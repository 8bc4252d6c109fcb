"""The display of the running demo: the swarm's peers, progress and loss, and events as lines above them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.text import Text

from cairn.output import Output
from cairn.status_view import losses, peer_table, progress
from peer.coordinator_client import SwarmStatus

PLAIN_SECONDS = 10.0


class DemoScreen:
    """The display: redrawn in place if `live`, else printed each PLAIN_SECONDS."""

    def __init__(self, *, live: bool):
        self._live = live
        self._console = Output()
        self._began = time.monotonic()
        self._printed = 0.0
        self._status: SwarmStatus | None = None
        self._page = ""

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays."""
        elapsed = time.monotonic() - self._began
        self._console.print(Text(f"{elapsed:4.0f} s  ").append(text, style=style), soft_wrap=True)

    def print(self, thing: object) -> None:
        """Print a rich object, such as a table."""
        self._console.print(thing)

    @contextmanager
    def showing(self, page: str) -> Iterator[None]:
        """Show the newest status, and the page's address, as long as the block lasts."""
        self._page = page
        if not self._live:
            yield
            return
        with Live(console=self._console, get_renderable=self._draw, refresh_per_second=4, transient=True):
            yield

    def update(self, status: SwarmStatus) -> None:
        """Show a new status."""
        self._status = status
        if not self._live and time.monotonic() - self._printed > PLAIN_SECONDS:
            self._printed = time.monotonic()
            self._console.print(self._draw())

    def _draw(self) -> Group:
        if self._status is None:
            return Group(Text("waiting for peers"))
        width = self._console.width
        lines = [progress(self._status, width), losses(self._status, width), Text(f"page  {self._page}", style="dim")]
        return Group(peer_table(self._status, width), *(line for line in lines if line is not None), Text(""))
