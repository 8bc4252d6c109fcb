"""`cairn status`: the swarm as its coordinator sees it, as tables or as JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence

import click

from cairn.commands.options import invite_argument, via_option
from cairn.connection import follow, parse_invite
from protocol.invite import Invite


@click.command()
@invite_argument
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@via_option
def status(invite: str, as_json: bool, via: tuple[str, ...]) -> None:
    """Show the swarm of the run that INVITE names."""
    from cairn.output import Output
    from cairn.status_view import whole

    parsed = parse_invite(invite)
    found = asyncio.run(fetch_status(parsed, via))
    if as_json:
        print(json.dumps(dataclasses.asdict(found), default=bytes.hex, indent=1))
        return
    console = Output()
    console.print(whole(found, console.width, time.time()))


async def fetch_status(invite: Invite, via: Sequence[str]):
    """Return the coordinator's `SwarmStatus`. Raises CairnError."""
    from peer.coordinator_client import CoordinatorClient
    from peer.node.enrollment import COORDINATOR_ABSENT

    async with CoordinatorClient(invite) as client:
        try:
            return await client.status()
        except COORDINATOR_ABSENT as e:
            await follow(client, invite, via, e)
        return await client.status()
