"""`cairn account`: a key of one's own to which several peers are bound, and what it has earned."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.figures import count, credits
from cairn.reaching import Reached, parsed, reached
from protocol.errors import CairnError, MalformedError
from protocol.identity import Identity
from protocol.ids import PeerKey, b64url, from_b64url
from protocol.ledger.statements import BindAccount, BindPeer, open_bind_peer, sign

if TYPE_CHECKING:
    from peer.log_client import CreditTotals, Receipted

KEY_FILE = "account.key"
SHOWN = 20


def new_account(home: Path) -> str:
    """Make the account's key file, if there is none; what to tell."""
    from peer.keyfile import load_or_make

    path = home / KEY_FILE
    made = not path.exists()
    account = load_or_make(path)
    what = "a new account" if made else "this account is there already"
    return (
        f"account  {account.key}\nfile     {path}  ({what}; keep a copy: who has it has the account)\n"
        f"next     cairn account bind INVITE --name NAME, on the machine of each peer of yours"
    )


def peer_word(text: str, account: str, home: Path) -> str:
    """This machine's peer's word that it belongs to an account whose key is elsewhere. Raises CairnError."""
    body = BindPeer(parsed(text).run, _key(account, "ACCOUNT"), int(time.time()))
    word = sign(_identity(home), body)
    return b64url(word.sent)


def bind_peers(
    text: str, home: Path, *, name: str, team: str, words: Sequence[str], key_file: Path | None, via: Sequence[str]
) -> list[str]:
    """Bind this machine's peer, or those whose words are given, to the account. Raises CairnError."""
    run = parsed(text).run
    account = _account(key_file or home / KEY_FILE)
    now = int(time.time())
    if words:
        inner = [_word(w) for w in words]
    else:
        inner = [sign(_identity(home), BindPeer(run, account.key, now)).sent]
    try:
        peers = [open_bind_peer(sent, run) for sent in inner]
        for word in peers:
            if word.body.account != account.key:
                raise CairnError(
                    f"the word of peer {word.author.short} is for account {word.body.account.short}, and this key is "
                    f"{account.key.short}: ask for `cairn account word INVITE {account.key}`"
                )
        bindings = [sign(account, BindAccount(run, sent, now, name.strip(), team.strip())).sent for sent in inner]
    except MalformedError as e:
        raise CairnError(f"{e}; --name and --team take at most 40 bytes of printable text") from None

    async def ask() -> list[str]:
        async with reached(text, via) as r:
            told = []
            for word, binding in zip(peers, bindings, strict=True):
                bound = await r.client.bind(binding)
                told.append(f"bound  {word.author}  to account {account.key.short}, which has {count(bound)} peers now")
            return told

    return asyncio.run(ask())


def show(text: str, home: Path, *, peer: str, account: str, as_json: bool, via: Sequence[str]) -> None:
    """Print totals and, of a peer, its newest receipts. Raises CairnError."""
    if peer and account:
        raise CairnError("--peer or --account, not both")
    if peer or account:
        key = _key(peer or account, "--peer" if peer else "--account")
    elif (home / KEY_FILE).exists():
        key = _account(home / KEY_FILE).key
    else:
        key = _identity(home).key

    async def ask() -> tuple[CreditTotals, list[Receipted]]:
        async with reached(text, via) as r:
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
        + f"; {credits(s.recent)} a day of late; {count(s.tokens)} tokens in {s.rounds} rounds",
        soft_wrap=True,
    )
    if s.account is not None:
        console.print(f"bound to account {s.account}", soft_wrap=True)
    for peer in s.peers:
        console.print(f"peer {peer}", soft_wrap=True)
    if not receipts:
        console.print("no receipts yet: the first come when a round with this peer's update is final")
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
    """What has become of an update, and until when it is pending."""
    b = r.word.body
    if not b.accepted:
        return f"not accepted: {b.reason}"
    if r.status == "pending":
        left = max(1, b.pending_until + 1 - rounds)
        return f"pending: settles {'with the next round' if left == 1 else f'in {left} rounds'} that become final"
    return r.status


def export_credits(text: str, out: Path, *, via: Sequence[str], force: bool) -> None:
    """Write all credits of the run as OUT.csv or OUT.parquet, whole or not at all. Raises CairnError."""
    form = out.suffix.removeprefix(".")
    if form not in ("csv", "parquet"):
        raise CairnError(f"{out} must end with .csv or .parquet")
    if out.exists() and not force:
        raise CairnError(f"{out} is there already: name another file, or give --force")
    draft = out.with_name(f".{out.name}.{os.getpid()}")

    async def pieces(r: Reached) -> AsyncIterator[bytes]:
        from coordinator.credits.export import exported

        async for piece in exported(r.log, form):
            yield piece

    async def write() -> int:
        size = 0
        async with reached(text, via) as r:
            with draft.open("wb") as file:
                async for piece in pieces(r):
                    size += file.write(piece)
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
    """This machine's peer. Raises CairnError when it has never been one."""
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


def _word(text: str) -> bytes:
    try:
        return from_b64url(text.strip())
    except MalformedError:
        raise CairnError("--word: not what `cairn account word` prints") from None
