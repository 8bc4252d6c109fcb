"""What `cairn watch` does: asks again and again, and shows what it was told, also while nobody answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cairn.joining import check_via
from cairn.status_view import ago, fitted
from protocol.errors import CairnError, MalformedError
from protocol.invite import Invite

LOOK_SECONDS = 2.0
SAY_SECONDS = 60.0
"""Without a terminal: a line whenever something changes, and every so often."""

MOVED_SECONDS = 20.0
"""Away for so long, it may have moved: members are asked, and again after a minute."""


def watch_run(invite: str, *, plain: bool, via: Sequence[str]) -> None:
    """Until Ctrl-C. Raises CairnError."""
    try:
        parsed = Invite.parse(invite)
    except MalformedError as e:
        raise CairnError(str(e)) from None
    check_via(via)
    console = Console(highlight=False)
    screen = Screen(console, live=console.is_terminal and not console.is_dumb_terminal and not plain)
    try:
        asyncio.run(_watch(parsed, via, screen))
    except KeyboardInterrupt:
        pass  # how one stops to watch


class Screen:
    """What is known, and how it is shown: `live` redraws it, else lines come as things change."""

    def __init__(self, console: Console, *, live: bool, now: Callable[[], float] = time.time):
        self.live = live
        self.console = console
        self._now = now
        self._status: Any = None
        self._at = 0.0
        self._gone: tuple[float, str] | None = None
        self._said: tuple[Any, ...] = ()
        self._told: frozenset[str] = frozenset()
        self._said_at = 0.0

    def seen(self, status: Any) -> None:
        """The coordinator answered."""
        back = self._gone
        self._status, self._at, self._gone = status, self._now(), None
        if self.live:
            return
        if back is not None:
            self._line(f"the coordinator answers again, after {ago(self._at - back[0])}")
        for a in status.alerts:
            if a.name not in self._told:
                self._line(f"ALERT {a.name}: {a.message}")
        for name in self._told - {a.name for a in status.alerts}:
            self._line(f"over: {name}")
        self._told = frozenset(a.name for a in status.alerts)
        what = (status.health, status.round, self._told)
        if what != self._said or self._at - self._said_at >= SAY_SECONDS:
            self._line(f"{status.health}: {status.message}")
            self._said, self._said_at = what, self._at

    def missed(self, why: str) -> None:
        """It did not."""
        if self._gone is None:
            self._gone = (self._now(), why)
            if not self.live:
                self._line(f"the coordinator does not answer: {why}")
        else:
            self._gone = (self._gone[0], why)

    @property
    def gone_for(self) -> float:
        """Seconds since it was found silent; 0 while it answers."""
        return 0.0 if self._gone is None else self._now() - self._gone[0]

    def draw(self) -> RenderableType:
        """The live view, within the terminal's size."""
        now, (width, height) = self._now(), self.console.size
        if self._gone is not None:
            since = time.strftime("%H:%M:%S", time.localtime(self._gone[0]))
            note = Text(f"no answer since {since} ({ago(now - self._gone[0])}), trying again", style="bold yellow")
        else:
            note = Text(f"page {self._status.page}" if self._status else "asking the coordinator", style="dim")
        if self._status is None:
            why = Text(self._gone[1], style="dim") if self._gone else Text("")
            return Group(note, why)
        note.append("   Ctrl-C ends", style="dim not bold")
        note.truncate(width)
        return fitted(self._status, width, height, now, note)

    def _line(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(self._now()))
        self.console.print(Text(f"{stamp}  {text}"), soft_wrap=True)


async def _watch(invite: Invite, via: Sequence[str], screen: Screen) -> None:
    if not screen.live:
        await _look_on(invite, via, screen)
        return
    logging.getLogger().addHandler(logging.NullHandler())  # a library's warning would tear the screen
    with Live(get_renderable=screen.draw, console=screen.console, screen=True, refresh_per_second=2):
        await _look_on(invite, via, screen)


async def _look_on(invite: Invite, via: Sequence[str], screen: Screen) -> None:
    """For ever. Raises CairnError when the coordinator says no: asking again would not help."""
    from peer.coordinator_client import CoordinatorClient, CoordinatorRefused

    async with CoordinatorClient(invite, timeout=5.0, attempts=1) as client:
        ask_members_at = MOVED_SECONDS
        while True:
            try:
                screen.seen(await client.status())
                ask_members_at = MOVED_SECONDS
            except CoordinatorRefused:
                raise
            except CairnError as e:
                screen.missed(str(e))
            if screen.gone_for >= ask_members_at:
                ask_members_at = screen.gone_for + 60
                await _ask_members(client, invite, via)
            await asyncio.sleep(LOOK_SECONDS)


async def _ask_members(client: Any, invite: Invite, via: Sequence[str]) -> None:
    from peer.node.finding import find

    if not [*via, *invite.addresses]:
        return
    try:
        found = await find(invite.run, [*via, *invite.addresses])
    except CairnError as e:
        logging.getLogger(__name__).debug("members were asked in vain: %s", e)
        return
    if found is not None and found.coordinator_address is not None:
        client.moved(found.coordinator_address.body)
