"""`cairn account`: a key to which one person binds several peers, and the credits of both."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.connection import connect, parse_invite
from cairn.number_format import count, credits
from protocol.errors import CairnError, MalformedError
from protocol.identity import Identity
from protocol.ids import PeerKey, b64url, from_b64url
from protocol.ledger.statements import BindAccount, BindPeer, open_bind_peer, sign

if TYPE_CHECKING:
    from peer.log_client import CreditTotals, Receipted

KEY_FILE = "account.key"
SHOWN = 20
"""Receipts shown, and peers of an account whose receipts are read."""


def new_account(home: Path) -> str:
    """Make the account's key file if there is none; return the message for the user."""
    from peer.keyfile import load_or_make

    path = home / KEY_FILE
    made = not path.exists()
    account = load_or_make(path)
    what = "a new account" if made else "this account is there already"
    return (
        f"account  {account.key}\nfile     {path}  ({what}; keep a copy: it is the account)\n"
        f"next     cairn account bind INVITE --name NAME, on the machine of each peer of yours"
    )


def peer_consent(text: str, account: str, home: Path) -> str:
    """Return the signed consent of this machine's peer to be bound to an account. Raises CairnError."""
    body = BindPeer(parse_invite(text).run, _key(account, "ACCOUNT"), int(time.time()))
    return b64url(sign(_identity(home), body).sent)


def bind_peers(
    text: str, home: Path, *, name: str, team: str, consents: Sequence[str], key_file: Path | None, via: Sequence[str]
) -> list[str]:
    """Bind this machine's peer, or the peers that consented, to the account. Raises CairnError.

    Return a line for each.
    """
    run = parse_invite(text).run
    account = _account(key_file or home / KEY_FILE)
    now = int(time.time())
    if consents:
        inner = [_consent(c) for c in consents]
    else:
        inner = [sign(_identity(home), BindPeer(run, account.key, now)).sent]
    try:
        peers = [open_bind_peer(sent, run) for sent in inner]
        for consent in peers:
            if consent.body.account != account.key:
                raise CairnError(
                    f"the consent of peer {consent.author.short} is for account {consent.body.account.short}, and this "
                    f"key is {account.key.short}: run `cairn account consent INVITE {account.key}` there"
                )
        bindings = [sign(account, BindAccount(run, sent, now, name.strip(), team.strip())).sent for sent in inner]
    except MalformedError as e:
        raise CairnError(f"{e}; --name and --team take at most 40 bytes of printable text") from None

    async def ask() -> list[str]:
        async with connect(text, via) as r:
            lines = []
            for peer, binding in zip(peers, bindings, strict=True):
                bound = await r.client.bind(binding)
                to = f"to account {account.key.short}, which has {count(bound)} peers now"
                lines.append(f"bound  {peer.author}  {to}")
            return lines

    return asyncio.run(ask())


def show(text: str, home: Path, *, peer: str, account: str, as_json: bool, via: Sequence[str]) -> None:
    """Print the totals and the newest receipts of a peer, or of an account's peers. Raises CairnError."""
    if peer and account:
        raise CairnError("--peer or --account, not both")
    if peer or account:
        key = _key(peer or account, "--peer" if peer else "--account")
    elif (home / KEY_FILE).exists():
        key = _account(home / KEY_FILE).key
    else:
        key = _identity(home).key

    async def ask() -> tuple[CreditTotals, list[Receipted]]:
        async with connect(text, via) as r:
            totals = await r.log.totals(key)
            receipts: list[Receipted] = []
            for one in totals.peers[:SHOWN] if totals.kind == "account" else (key,):
                receipts += (await r.log.receipts(one, limit=SHOWN))[0]
            receipts.sort(key=lambda x: (-x.word.body.entry, x.word.body.peer))
            return totals, receipts[:SHOWN]

    totals, receipts = asyncio.run(ask())
    if as_json:
        print(json.dumps(_plain(totals, receipts), indent=1))
    else:
        _print(totals, receipts)


def _plain(totals: CreditTotals, receipts: Sequence[Receipted]) -> dict[str, Any]:
    def text(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        return [text(v) for v in value] if isinstance(value, (list, tuple)) else value

    def fields(value: Any) -> dict[str, Any]:
        return {f.name: text(getattr(value, f.name)) for f in dataclasses.fields(value)}

    found = [fields(r.word.body) | {"status": r.status, "bytes": b64url(r.word.sent)} for r in receipts]
    return fields(totals) | {"receipts": found}


def _print(totals: CreditTotals, receipts: Sequence[Receipted]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    s = totals
    title = f"{s.kind} {escape(s.name)}" + (f", team {escape(s.team)}" if s.team else "")
    console.print(f"[bold]{title}[/bold]  {s.key}", soft_wrap=True)
    console.print(
        f"{credits(s.settled)} credits settled, {credits(s.pending)} pending"
        + (f", {credits(s.voided)} voided" if s.voided else "")
        + f"; {credits(s.recent)} a day recently; {count(s.tokens)} tokens in {s.rounds} rounds",
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
    for name, right in (
        ("round", True), ("peer", False), ("update", False), ("tokens", True), ("credits", True), ("status", False),
    ):  # fmt: skip
        table.add_column(name, justify="right" if right else "left")
    for r in receipts:
        b = r.word.body
        table.add_row(
            str(b.round), b.peer.short, b.update.short, count(b.tokens) if b.accepted else "-",
            credits(b.micro_credits) if b.accepted else "-", escape(_status(r, s.rounds_total)),
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
    return r.status


def export_credits(text: str, out: Path, *, via: Sequence[str], force: bool) -> None:
    """Write all credits of the run as OUT.csv or OUT.parquet, whole or not at all. Raises CairnError."""
    form = out.suffix.removeprefix(".")
    if form not in ("csv", "parquet"):
        raise CairnError(f"{out} must end with .csv or .parquet")
    if out.exists() and not force:
        raise CairnError(f"{out} is there already: name another file, or give --force")
    draft = out.with_name(f".{out.name}.{os.getpid()}")

    async def write() -> int:
        from coordinator.credits.export import exported

        size = 0
        async with connect(text, via) as r:
            with draft.open("wb") as file:
                async for block in exported(r.log, form):
                    size += file.write(block)
        return size

    try:
        size = asyncio.run(write())
        os.replace(draft, out)
    except OSError as e:
        raise CairnError(f"{out} cannot be written: {(e.strerror or str(e)).lower()}") from None
    finally:
        draft.unlink(missing_ok=True)
    click.echo(f"{out}: {size:,} bytes")


def _identity(home: Path) -> Identity:
    """Return the key of this machine's peer. Raises CairnError if there is none."""
    return _read(home / "identity.key", "this machine has no peer yet: join the run first, or give --home")


def _account(path: Path) -> Identity:
    return _read(path, "make an account with `cairn account new`, or name its file with --key")


def _read(path: Path, remedy: str) -> Identity:
    from peer.keyfile import load_or_make

    if not path.exists():
        raise CairnError(f"there is no {path}: {remedy}")
    return load_or_make(path)


def _key(text: str, option: str) -> PeerKey:
    try:
        return PeerKey.parse(text)
    except MalformedError as e:
        raise CairnError(f"{option}: {e}") from None


def _consent(text: str) -> bytes:
    try:
        return from_b64url(text.strip())
    except MalformedError:
        raise CairnError("--consent: not a line that `cairn account consent` printed") from None
