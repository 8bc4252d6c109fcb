"""The display of the running demo: a line for each peer and the swarm, the loss as a sparkline, and events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cairn.number_format import byte_size, count, credits, sparkline
from cairn.peer_screen import bar
from peer.coordinator_client import SwarmStatus

STATES = {"training": "green", "exchanging": "cyan", "syncing": "yellow", "joining": "yellow", "killed": "red"}
PLAIN_SECONDS = 10.0


class DemoScreen:
    """The display: redrawn in place if `live`, else printed each PLAIN_SECONDS."""

    def __init__(self, *, live: bool):
        self._live_wanted = live
        self._console = Console(highlight=False)
        self._live: Live | None = None
        self._began = time.monotonic()
        self._printed = 0.0
        self._status: SwarmStatus | None = None
        self._notes: dict[str, str] = {}
        self._losses: list[float] = []
        self._page = ""

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays."""
        self._console.print(Text(f"{self.elapsed:4.0f} s  ").append(text, style=style), soft_wrap=True)

    def print(self, thing: object) -> None:
        """Print a rich object, such as a table."""
        self._console.print(thing)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    @contextmanager
    def showing(self, page: str) -> Iterator[None]:
        self._page = page
        if not self._live_wanted:
            yield
            return
        with Live(console=self._console, get_renderable=self._draw, refresh_per_second=4, transient=True) as live:
            self._live = live
            yield
        self._live = None

    def update(self, status: SwarmStatus, notes: dict[str, str], losses: list[float]) -> None:
        """Show a new status; `notes` replace the state of peers by their names."""
        self._status, self._notes, self._losses = status, notes, losses
        if not self._live_wanted and time.monotonic() - self._printed > PLAIN_SECONDS:
            self._printed = time.monotonic()
            self._console.print(self._draw())

    def _draw(self) -> Group:
        status = self._status
        if status is None:
            return Group(Text("waiting for peers"))
        table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
        table.add_column("peer", no_wrap=True, min_width=8)
        table.add_column("state", no_wrap=True, min_width=10)
        for name, width in (("round", 5), ("loss", 6), ("tokens/s", 8), ("up", 8), ("down", 8), ("credits", 9)):
            table.add_column(name, justify="right", no_wrap=True, min_width=width)
        for p in sorted(status.peers, key=lambda p: p.name):
            state = self._notes.get(p.name, p.phase)
            quiet = state in ("killed", "gone", "silent")
            table.add_row(
                p.name or p.peer.short, Text(state, style=STATES.get(state, "dim")), str(p.round),
                f"{p.loss:.3f}" if p.loss else "-", "-" if quiet else count(p.tokens_per_second),
                byte_size(p.bytes_up), byte_size(p.bytes_down),
                credits(p.micro_credits_settled + p.micro_credits_pending),
            )  # fmt: skip
        share = min(1.0, status.tokens / status.total_tokens) if status.total_tokens else 0.0
        swarm = Text("swarm    ", style="bold")
        swarm.append(f"{bar(share, 20)} {share:4.0%}  round {status.round}")
        swarm.append(f"  loss {status.loss:.3f}" if status.loss else "  loss -")
        swarm.append(f"  {count(status.tokens_per_second)} tokens/s  {self.elapsed:.0f} s")
        loss = Text("loss     ", style="bold").append(sparkline(self._losses, 60), style="cyan")
        return Group(table, swarm, loss, Text(f"page     {self._page}", style="dim"), Text(""))
