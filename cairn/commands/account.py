"""`cairn account ...`: a key to which one person binds several peers, and the credits of both."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cairn.commands.group import CommandGroup
from cairn.commands.options import FILE, home_option, invite_argument, peer_key, via_option
from cairn.connection import connect, parse_invite
from cairn.visibility import anonymous_hint
from peer.keyfile import load, load_or_make
from protocol.errors import CairnError, MalformedError, os_reason
from protocol.identity import Identity
from protocol.ids import RunId, b64url, from_b64url
from protocol.ledger.credit_text import credit_text
from protocol.ledger.statements import BindAccount, BindPeer, open_bind_peer, sign
from protocol.units import count

if TYPE_CHECKING:
    from peer.log_client import CreditTotals, Receipted

KEY_FILE, IDENTITY = "account.key", "identity.key"
SHOWN = 20
"""Receipts shown, and peers of an account whose receipts are read."""

HOME = home_option("Where identity, account and runs are kept.")


@click.group(cls=CommandGroup)
def account() -> None:
    """Credits: what peers have earned, and one account for several of them."""


@account.command()
@HOME
def new(home: Path) -> None:
    """Make an account: a key file, to which peers are bound."""
    path = home / KEY_FILE
    made = not path.exists()
    key = load_or_make(path).key
    what = "a new account" if made else "this account is there already"
    click.echo(f"account  {key}\nfile     {path}  ({what}; keep a copy: it is the account)")
    click.echo("next     cairn account bind INVITE --name NAME, on the machine of each peer of yours")


@account.command()
@invite_argument
@click.option("--name", required=True, help="What the account is called on the run's page (at most 40 bytes).")
@click.option("--team", default="", help="Its team, if any (at most 40 bytes).")
@click.option("--consent", "consents", multiple=True, help="The line that `cairn account consent` printed for a peer.")
@click.option("--key", "key_file", type=FILE, help="The account's key file.  [default: account.key in --home]")
@HOME
@via_option
def bind(
    invite: str, name: str, team: str, consents: tuple[str, ...], key_file: Path | None, home: Path,
    via: tuple[str, ...],
) -> None:  # fmt: skip
    """Let the credits of this machine's peer in a run count for the account."""
    run = parse_invite(invite).run
    account = _account(key_file or home / KEY_FILE)
    now = int(time.time())
    if consents:
        inner = [_consent(c) for c in consents]
    else:
        inner = [sign(_identity(home, run), BindPeer(run, account.key, now)).encoded]
    try:
        peers = [open_bind_peer(sent, run) for sent in inner]
        for consent in peers:
            if consent.body.account != account.key:
                raise CairnError(
                    f"the consent of peer {consent.author.short} is for account {consent.body.account.short}, and this "
                    f"key is {account.key.short}: run `cairn account consent INVITE {account.key}` there"
                )
        bindings = [sign(account, BindAccount(run, sent, now, name.strip(), team.strip())).encoded for sent in inner]
    except MalformedError as e:
        raise CairnError(f"{e}; --name and --team take at most 40 bytes of printable text") from None

    async def send() -> None:
        async with connect(invite, via) as r:
            for peer, binding in zip(peers, bindings, strict=True):
                bound = await r.client.bind(binding)
                to = f"to account {account.key.short}, which has {count(bound)} peers now"
                click.echo(f"bound  {peer.author}  {to}")

    asyncio.run(send())


@account.command()
@invite_argument
@click.argument("account_key", metavar="ACCOUNT")
@HOME
def consent(invite: str, account_key: str, home: Path) -> None:
    """Print this peer's signed consent to be bound to ACCOUNT, for `cairn account bind --consent` on another machine.

    So the account's key need not be on rented machines.
    """
    run = parse_invite(invite).run
    body = BindPeer(run, peer_key(account_key, "ACCOUNT"), int(time.time()))
    click.echo(b64url(sign(_identity(home, run), body).encoded))


@account.command()
@invite_argument
@click.option("--peer", default="", metavar="KEY", help="Of this peer.")
@click.option("--account", "account_key", default="", metavar="KEY", help="Of this account.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@HOME
@via_option
def show(invite: str, peer: str, account_key: str, as_json: bool, home: Path, via: tuple[str, ...]) -> None:
    """Show totals, the recent average, and the newest receipts; of your own account or peer by default."""
    if peer and account_key:
        raise click.UsageError("--peer or --account, not both")
    run = parse_invite(invite).run
    if peer or account_key:
        keys = [peer_key(peer or account_key, "--peer" if peer else "--account")]
    else:
        keys = [_read(file, "").key for name in (KEY_FILE, IDENTITY) if (file := home / name).exists()]
        keys = keys or [_identity(home, run).key]

    async def fetch() -> tuple[CreditTotals, list[Receipted]]:
        async with connect(invite, via) as r:
            totals = await r.log.totals(keys[0])
            if totals.kind != "account" and len(keys) > 1:  # no peer of this run is bound to the account
                totals = await r.log.totals(keys[1])
            receipts: list[Receipted] = []
            for one in totals.peers[:SHOWN] if totals.kind == "account" else (totals.key,):
                receipts += await r.log.receipts(one, limit=SHOWN)
            receipts.sort(key=lambda x: (-x.word.body.number, x.word.body.peer))
            return totals, receipts[:SHOWN]

    totals, receipts = asyncio.run(fetch())
    if as_json:
        found = [
            dataclasses.asdict(r.word.body)
            | {"status": r.status, "void_reason": r.void_reason, "bytes": b64url(r.word.encoded)}
            for r in receipts
        ]
        print(json.dumps(dataclasses.asdict(totals) | {"receipts": found}, default=bytes.hex, indent=1))
    else:
        _print(totals, receipts)


def _print(s: CreditTotals, receipts: Sequence[Receipted]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from cairn.output import Output

    console = Output()
    title = f"{s.kind} {escape(s.name)}" + (f", team {escape(s.team)}" if s.team else "")
    console.print(f"[bold]{title}[/bold]  {s.key}", soft_wrap=True)
    console.print(
        f"{credit_text(s.settled)} credits settled, {credit_text(s.pending)} pending"
        + (f", {credit_text(s.voided)} voided" if s.voided else "")
        + f"; {credit_text(s.recent)} a day (mean over weeks); {count(s.tokens)} tokens in {s.rounds} rounds",
        soft_wrap=True,
    )
    if s.account is not None:
        console.print(f"bound to account {s.account}", soft_wrap=True)
    for peer in s.peers:
        console.print(f"peer {peer}", soft_wrap=True)
    if not receipts:
        console.print("no receipts yet: the first come when a round with this peer's update is finalized")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("round", "peer", "update", "tokens", "credits", "status"):
        table.add_column(name, justify="right" if name in ("round", "tokens", "credits") else "left")
    for r in receipts:
        b = r.word.body
        table.add_row(
            str(b.round), b.peer.short, b.update.short, count(b.tokens) if b.accepted else "-",
            credit_text(b.micro_credits) if b.accepted else "-", escape(_status(r, s.rounds_total)),
        )  # fmt: skip
    console.print(table)


def _status(r: Receipted, rounds: int) -> str:
    """Return the fate of an update, and the rounds until it settles."""
    b = r.word.body
    if not b.accepted:
        return f"not accepted: {b.reason}"
    if r.status == "pending":
        left = max(1, b.pending_until + 1 - rounds)
        return f"pending: settles {'with the next finalized round' if left == 1 else f'in {left} finalized rounds'}"
    return f"{r.status} {r.void_reason}".rstrip()


@account.command()
@invite_argument
@click.argument("out", type=FILE)
@click.option("--force", is_flag=True, help="Write over what is there.")
@via_option
def export(invite: str, out: Path, force: bool, via: tuple[str, ...]) -> None:
    """Write every credit of the run to OUT, a .csv or .parquet file."""
    form = out.suffix.removeprefix(".")
    if form not in ("csv", "parquet"):
        raise click.BadParameter(f"{out} must end with .csv or .parquet", param_hint="OUT")
    if out.exists() and not force:
        raise CairnError(f"{out} is there already: name another file, or give --force")
    draft = out.with_name(f".{out.name}.{os.getpid()}")

    async def write() -> int:
        from coordinator.credits.export import exported

        size = 0
        with draft.open("wb") as file:  # first: a place that cannot be written to shows at once
            async with connect(invite, via) as r:
                async for block in exported(r.log, form):
                    size += file.write(block)
        return size

    try:
        size = asyncio.run(write())
        os.replace(draft, out)
    except OSError as e:
        raise CairnError(f"{out} cannot be written: {os_reason(e)}") from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    click.echo(f"{out}: {size:,} bytes")


def _identity(home: Path, run: RunId) -> Identity:
    """Return the key of this machine's peer. Raises CairnError if there is none."""
    remedy = f"this machine has no peer yet: join the run first, or give --home{anonymous_hint(home, run)}"
    return _read(home / IDENTITY, remedy)


def _account(path: Path) -> Identity:
    return _read(path, "make an account with `cairn account new`, or name its file with --key")


def _read(path: Path, remedy: str) -> Identity:
    try:
        return load(path)
    except FileNotFoundError:
        raise CairnError(f"there is no {path}: {remedy}") from None


def _consent(text: str) -> bytes:
    try:
        return from_b64url(text.strip())
    except MalformedError:
        raise click.BadParameter("not a line that `cairn account consent` printed", param_hint="--consent") from None
