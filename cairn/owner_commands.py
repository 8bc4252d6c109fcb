"""Directives of a run's owner: `cairn run pause` and its siblings sign one, send it, and count its receivers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from protocol.errors import CairnError, MalformedError
from protocol.identity import Identity, from_key_file
from protocol.ids import PeerKey, Round
from protocol.invite import Invite
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import MAX_BANNED, MAX_REASON, Directive, Rollback, RoundChanges, Signed
from protocol.spec import RunSpec, explain, open_spec

SPREAD_SECONDS = 10.0
"""Maximum seconds to wait until all peers have received a directive."""


@dataclass(frozen=True)
class OwnedRun:
    """A run as its owner has it: the folder, the key, the spec and the invite."""

    folder: Path
    owner: Identity
    spec: RunSpec
    invite: Invite


@dataclass(frozen=True)
class RunStatus:
    """The owner's newest directive, and the open round (None if the coordinator does not answer)."""

    body: Directive
    round: int | None


DirectiveChange = Callable[[RunStatus], Directive | None]
"""A function from the run's status to the new directive; None if there is nothing to order."""


def open_run(path: Path, home: Path) -> OwnedRun:
    """Return the run of a folder, or of a run.toml. Raises CairnError."""
    from cairn.commands.serve import coordinator_folder
    from coordinator.authoring import load_run
    from coordinator.authoring.resolve import SPEC

    folder = path if path.is_dir() else coordinator_folder(home, load_run(path).run.name)
    try:
        owner = from_key_file((folder / "owner.key").read_text())
        invite = Invite.parse((folder / "invite").read_text().strip())
        spec = open_spec((folder / "run" / SPEC).read_bytes(), invite.run)
    except OSError as e:
        missing = Path(e.filename or folder).name
        raise CairnError(
            f"{folder} is not the folder of a run that was served from here: {missing} is not there. Name the run's "
            "folder (`cairn coordinator serve` prints it), or its run.toml, with --home where that is not the usual one"
        ) from None
    if spec.owner_key != owner.key:
        raise CairnError(f"the key {folder / 'owner.key'} is not the key of this run's owner")
    return OwnedRun(folder, owner, spec, invite)


def check_changes(spec: RunSpec, changes: RoundChanges) -> None:
    """Raise CairnError unless the spec stays valid with these changes of its round policy."""
    changed = {f.name: v for f in fields(changes) if (v := getattr(changes, f.name)) is not None}
    try:
        type(spec).model_validate(spec.model_dump() | {"round": spec.round.model_dump() | changed})
    except ValidationError as e:
        raise CairnError(explain(e, "round policy")) from None


def send_directive(run: OwnedRun, change: DirectiveChange) -> None:
    """Sign and send a directive, and print the result. Raises CairnError."""
    asyncio.run(_send(run, change))


async def _send(run: OwnedRun, change: DirectiveChange) -> None:
    from coordinator.directive_file import DirectiveFile
    from peer.coordinator_client import CoordinatorClient, CoordinatorUnreachable

    decoder = MessageDecoder(run.spec.run_id, run.owner.key, remember=4)
    file = DirectiveFile(run.folder, decoder)
    directives, _ = file.read()
    async with CoordinatorClient(run.invite, timeout=8.0, attempts=1) as client:
        number: int | None = None
        try:
            reply = await client.publish_directive()
            number = reply.round
            if reply.directive:
                directives.append(decoder.decode(reply.directive, Directive))
        except CoordinatorUnreachable as e:
            click.echo(f"the coordinator does not answer ({e})", err=True)
        newest = _newest(directives, run)
        body = change(RunStatus(newest, number))
        if body is None:
            return
        body = replace(body, sequence=max(newest.sequence + 1, int(time.time() * 1000)))
        directive = KeySigner(run.owner).sign(body)
        if number is None:
            file.append(directive)
            click.echo(f"the order is left in {run.folder}: the coordinator publishes it when it is started again")
            return
        await client.publish_directive(directive.encoded)
        await _wait_until_spread(client)


async def _wait_until_spread(client: Any) -> None:
    end_at = time.monotonic() + SPREAD_SECONDS
    while True:
        reply = await client.publish_directive()
        if reply.informed >= reply.peers or time.monotonic() > end_at:
            break
        await asyncio.sleep(0.3)
    many = "peer has" if reply.informed == 1 else "peers have"
    rest = "" if reply.informed >= reply.peers else f"; the other {reply.peers - reply.informed} get it from them"
    click.echo(f"ordered: {reply.informed} {many} received it{rest}")


def _newest(directives: Sequence[Signed[Directive]], run: OwnedRun) -> Directive:
    """Return the newest directive; if there is none yet, one that changes nothing."""
    return max((d.body for d in directives), key=lambda b: b.precedence, default=Directive(run.spec.run_id, 0))


def _key(text: str) -> PeerKey:
    try:
        return PeerKey.parse(text)
    except MalformedError as e:
        raise CairnError(f"{e}: the run's page and `cairn status INVITE --json` show the keys of peers") from None


def _checked(reason: str) -> str:
    if len(reason.encode()) > MAX_REASON or not reason.isprintable():
        raise CairnError(f"--reason: at most {MAX_REASON} bytes on one line")
    return reason


def set_order(path: Path, home: Path, order: str, reason: str, message: str) -> None:
    """Run `cairn run pause`, `resume` or `end`: set the order, and print `message`. Raises CairnError."""

    def change(status: RunStatus) -> Directive | None:
        if status.body.run_status == order:
            click.echo(f"the run is {order} already")
            return None
        click.echo(message.format(round=status.round if status.round is not None else "that is open then"))
        return replace(status.body, run_status=order, since=int(time.time()), reason=_checked(reason))

    send_directive(open_run(path, home), change)


def ban(run: Path, keys: Sequence[str], home: Path, reason: str) -> None:
    """Run `cairn run ban`. Raises CairnError."""
    named = {_key(k) for k in keys}

    def change(status: RunStatus) -> Directive:
        banned = tuple(sorted({*status.body.banned, *named}))
        if len(banned) > MAX_BANNED:
            raise CairnError(f"at most {MAX_BANNED} peers can be banned: let the run admit by invite, or by list")
        click.echo(f"banning {', '.join(k.short for k in sorted(named))} at once; {_in_force(status)}")
        return replace(status.body, banned=banned, reason=_checked(reason) or status.body.reason)

    send_directive(open_run(run, home), change)


def unban(run: Path, keys: Sequence[str], home: Path, reason: str) -> None:
    """Run `cairn run unban`. Raises CairnError."""
    named = {_key(k) for k in keys}

    def change(status: RunStatus) -> Directive:
        if missing := sorted(named - set(status.body.banned)):
            raise CairnError(f"{', '.join(k.short for k in missing)} is not banned")
        click.echo(f"letting in {', '.join(k.short for k in sorted(named))}; {_in_force(status)}")
        return replace(
            status.body, banned=tuple(k for k in status.body.banned if k not in named), reason=_checked(reason)
        )

    send_directive(open_run(run, home), change)


def _in_force(status: RunStatus) -> str:
    if status.round is None:
        return "it is in force for all from the round after the first that carries it"
    return f"it is in force for all from round {status.round + 1} on"


def policy(run: Path, settings: Sequence[str], from_round: int, home: Path, reason: str) -> None:
    """Run `cairn run policy`. Raises CairnError."""
    opened = open_run(run, home)

    def change(status: RunStatus) -> Directive:
        changes = replace(status.body.changes, **dict(map(_setting, settings)))
        check_changes(opened.spec, changes)
        first = max(from_round, 0 if status.round is None else status.round + 1)
        click.echo(f"changing {', '.join(settings)} from round {first} on")
        return replace(status.body, changes=changes, from_round=Round(first), reason=_checked(reason))

    send_directive(opened, change)


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    kinds = {f.name: int if "int" in str(f.type) else float for f in fields(RoundChanges)}
    if name not in kinds or not value:
        raise CairnError(f"{text[:60]!r}: write FIELD=VALUE, FIELD one of {', '.join(kinds)}")
    if value == "spec":
        return name, None
    try:
        return name, kinds[name](value.replace("_", ""))
    except ValueError:
        raise CairnError(f"{text[:60]!r}: {value[:30]!r} is not a number") from None


def rollback(run: Path, round_: int, home: Path, reason: str, yes: bool) -> None:
    """Run `cairn run rollback`. Raises CairnError."""
    from coordinator.checkpoints.archive import Archive

    opened = open_run(run, home)
    archived = {a.round: a for a in Archive(opened.folder / "checkpoints", opened.spec).all() if a.round}
    found = archived.get(round_)
    if found is None:
        there = ", ".join(map(str, archived)) or "none yet"
        raise CairnError(f"the state of round {round_} is not archived; choose one of these rounds: {there}")

    def change(status: RunStatus) -> Directive | None:
        if status.round is None:
            raise CairnError("the coordinator must run: peers get the state from it. Start it, then try again")
        gone = max(0, status.round - round_)
        if not yes:
            many = f"{gone} round{'' if gone == 1 else 's'}"
            click.confirm(f"Go back from round {status.round} to round {round_}? {many} no longer count", abort=True)
        click.echo(f"rolling back from round {status.round} to round {round_}, state {found.state.short}")
        back = Rollback(status.body.epoch + 1, found.record, Round(round_), found.state)
        return replace(status.body, rollback=back, reason=_checked(reason) or status.body.reason)

    send_directive(opened, change)
