"""`cairn watch`: the swarm of an invite, live in the terminal until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cairn.commands.options import invite_argument, via_option
from cairn.connection import follow, parse_invite
from cairn.stop_signals import sigterm_as_ctrl_c
from protocol.errors import CairnError
from protocol.invite import Invite

if TYPE_CHECKING:
    from cairn.watch_screen import WatchScreen

POLL_SECONDS = 2.0

MOVED_SECONDS = 20.0
"""Seconds of silence after which the coordinator may have moved, so that members are asked for its address."""

MOVED_AGAIN_SECONDS = 60.0
"""Seconds until members are asked again."""


@click.command()
@invite_argument
@click.option("--plain", is_flag=True, help="Lines instead of a live view (the default without a terminal).")
@via_option
def watch(invite: str, plain: bool, via: tuple[str, ...]) -> None:
    """Watch the swarm of the run that INVITE names, until Ctrl-C. The coordinator may be restarted meanwhile."""
    from cairn.output import Output
    from cairn.watch_screen import WatchScreen

    parsed = parse_invite(invite)
    console = Output()
    screen = WatchScreen(console, live=console.is_live and not plain)
    with contextlib.suppress(KeyboardInterrupt), sigterm_as_ctrl_c():  # the ordinary end of watching
        asyncio.run(_watch(parsed, via, screen))


async def _watch(invite: Invite, via: Sequence[str], screen: WatchScreen) -> None:
    from rich.live import Live

    if not screen.live:
        await poll(invite, via, screen)
        return
    logging.getLogger().addHandler(logging.NullHandler())  # a library's warning would tear the screen
    with Live(get_renderable=screen.draw, console=screen.console, screen=True, refresh_per_second=2):
        await poll(invite, via, screen)


async def poll(invite: Invite, via: Sequence[str], screen: WatchScreen) -> None:
    """Show the coordinator's status for ever. Raises CairnError when the coordinator refuses to give it."""
    from peer.coordinator_client import CoordinatorClient, CoordinatorRefused

    async with CoordinatorClient(invite, timeout=5.0, attempts=1) as client:
        ask_members_at = MOVED_SECONDS
        while True:
            try:
                screen.show(await client.status())
                ask_members_at = MOVED_SECONDS
            except CoordinatorRefused:
                raise
            except CairnError as e:
                screen.show_silence(str(e))
                if screen.silent_seconds >= ask_members_at and (via or invite.addresses):
                    ask_members_at = screen.silent_seconds + MOVED_AGAIN_SECONDS
                    with contextlib.suppress(CairnError):  # nobody knows another address: the same one is tried again
                        await follow(client, invite, via, e)
            await asyncio.sleep(POLL_SECONDS)
