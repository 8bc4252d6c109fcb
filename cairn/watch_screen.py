"""The view of `cairn watch`: live in a terminal, else log lines; it also shows how long the coordinator is silent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from cairn.status_view import fitted
from protocol.units import duration

REPEAT_SECONDS = 60.0
"""Without a terminal: seconds after which the state is logged again although it has not changed."""


class WatchScreen:
    """The last status and how it is shown: redrawn if `live`, else one line for each change."""

    def __init__(self, console: Console, *, live: bool, now: Callable[[], float] = time.time):
        self.live = live
        self.console = console
        self._now = now
        self._status: Any = None
        self._at = 0.0
        self._silence: tuple[float, str] | None = None
        self._logged: tuple[Any, ...] = ()
        self._alerts: frozenset[str] = frozenset()
        self._logged_at = 0.0

    def show(self, status: Any) -> None:
        """Show a status that the coordinator sent."""
        back = self._silence
        self._status, self._at, self._silence = status, self._now(), None
        if self.live:
            return
        if back is not None:
            self._line(f"the coordinator answers again, after {duration(self._at - back[0])}")
        for a in status.alerts:
            if a.name not in self._alerts:
                self._line(f"ALERT {a.name}: {a.message}")
        for name in self._alerts - {a.name for a in status.alerts}:
            self._line(f"over: {name}")
        self._alerts = frozenset(a.name for a in status.alerts)
        what = (status.health, status.round, self._alerts)
        if what != self._logged or self._at - self._logged_at >= REPEAT_SECONDS:
            self._line(f"{status.health}: {status.message}")
            self._logged, self._logged_at = what, self._at

    def show_silence(self, why: str) -> None:
        """Show that the coordinator did not answer, and the reason."""
        if self._silence is None:
            self._silence = (self._now(), why)
            if not self.live:
                self._line(f"the coordinator does not answer: {why}")
        else:
            self._silence = (self._silence[0], why)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the coordinator fell silent; 0 while it answers."""
        return 0.0 if self._silence is None else self._now() - self._silence[0]

    def draw(self) -> RenderableType:
        """Return the live view, within the terminal's size."""
        now, (width, height) = self._now(), self.console.size
        if self._silence is not None:
            since = time.strftime("%H:%M:%S", time.localtime(self._silence[0]))
            note = Text(
                f"no answer since {since} ({duration(now - self._silence[0])}), trying again", style="bold yellow"
            )
        else:
            note = Text(f"page {self._status.page}" if self._status else "asking the coordinator", style="dim")
        if self._status is None:
            why = Text(self._silence[1], style="dim") if self._silence else Text("")
            return Group(note, why)
        note.append("   Ctrl-C ends", style="dim not bold")
        note.truncate(width)
        return fitted(self._status, width, height, now, note)

    def _line(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(self._now()))
        self.console.print(Text(f"{stamp}  {text}"), soft_wrap=True)
