"""`cairn status`: the swarm as its coordinator sees it, in words and tables or as JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence

from cairn.joining import check_via
from cairn.status_view import whole
from protocol.errors import CairnError, MalformedError
from protocol.invite import Invite

FILE_WIDTH = 160
"""Of what is written to a file or a pipe: nothing is cut there that a line can hold."""


def show_status(text: str, *, as_json: bool, via: Sequence[str] = ()) -> None:
    """Ask once and print. Raises CairnError."""
    from rich.console import Console

    try:
        invite = Invite.parse(text)
    except MalformedError as e:
        raise CairnError(str(e)) from None
    check_via(via)
    status = asyncio.run(_ask(invite, via))
    if as_json:
        print(json.dumps(dataclasses.asdict(status), default=_plain, indent=1))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, FILE_WIDTH))
    console.print(whole(status, console.width, time.time()))


async def _ask(invite: Invite, via: Sequence[str]):
    from peer.coordinator_client import CoordinatorClient
    from peer.node.coordinator_discovery import discover_run
    from peer.node.membership import ABSENT

    async with CoordinatorClient(invite) as client:
        try:
            return await client.status()
        except ABSENT as e:
            found = await discover_run(invite.run, [*via, *invite.addresses])
            if found is None:
                raise
            if found.coordinator_address is None:
                raise CairnError(f"{e} ({found.members} members answer, and know of no other address)") from None
            client.moved(found.coordinator_address.body)
        return await client.status()


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")
