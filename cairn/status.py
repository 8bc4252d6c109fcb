"""`cairn status`: the swarm as its coordinator sees it, as a table or as JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from cairn.figures import byte_size, count, credits
from cairn.joining import check_via
from protocol.errors import CairnError, MalformedError
from protocol.invite import Invite


def show_status(text: str, *, as_json: bool, via: Sequence[str] = ()) -> None:
    """Ask once and print. Raises CairnError."""
    from rich.console import Console
    from rich.markup import escape

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
    console.print(f"[bold]{escape(status.name)}[/bold]  {escape(status.words)}", soft_wrap=True)
    progress = f"{count(status.tokens)} tokens accepted"
    if status.total_tokens:
        progress += f" of {count(status.total_tokens)} ({status.tokens / status.total_tokens:.0%})"
    final = "none yet" if status.final_round is None else str(status.final_round)
    console.print(
        f"{progress}; final up to round {final}; head {status.head.short}; page {escape(status.page)}", soft_wrap=True
    )
    console.print(peer_table(status))


async def _ask(invite: Invite, via: Sequence[str]):
    from peer.coordinator_client import CoordinatorClient
    from peer.node.finding import find
    from peer.node.membership import ABSENT

    async with CoordinatorClient(invite) as client:
        try:
            return await client.status()
        except ABSENT as e:
            found = await find(invite.run, [*via, *invite.addresses])
            if found is None:
                raise
            if found.whereabouts is None:
                raise CairnError(f"{e} ({found.members} members answer, and know of no other address)") from None
            client.moved(found.whereabouts.body)
        return await client.status()


def peer_table(status: Any):
    """The peers of a status as a table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("peer", "name", "state"):
        table.add_column(name)
    for name in ("round", "loss", "tokens/s", "up", "down", "credits"):
        table.add_column(name, justify="right")
    table.add_column("device")
    for p in status.peers:
        table.add_row(
            p.peer.short, escape(p.name), escape(p.phase), str(p.round), f"{p.loss:.3f}" if p.loss else "-",
            count(p.tokens_per_second), byte_size(p.bytes_up), byte_size(p.bytes_down),
            credits(p.micro_credits_settled + p.micro_credits_pending), escape(p.device),
        )  # fmt: skip
    return table


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")
