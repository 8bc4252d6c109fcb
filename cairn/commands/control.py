"""`cairn run pause|resume|ban|unban|pardon|policy|end|rollback`: the directives of a run's owner while the run is on.

The key in the run's folder signs each directive, and the coordinator publishes it. If the coordinator does not answer,
the directive stays in the folder, where the next start finds it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.commands.options import home_option
from cairn.number_format import parse_size
from protocol.errors import CairnError, MalformedError
from protocol.identity import Identity
from protocol.ids import PeerKey, Round
from protocol.invite import Invite
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import (
    MAX_BANNED,
    MAX_PARDONS,
    MAX_REASON,
    TRAINING_PHASES,
    Directive,
    Pardon,
    Rollback,
    RoundChanges,
)
from protocol.plain_text import is_plain

if TYPE_CHECKING:
    from coordinator.directive_file import DirectiveFile
    from peer.coordinator_client import CoordinatorClient, PeerStatus, SwarmStatus
    from protocol.spec import RunSpec
    from protocol.wire.coordinator_pb2 import DirectiveReply

LAST_STATE_SECONDS = 660.0
"""Maximum seconds to wait until the coordinator has the last state: peers stay for ten minutes."""

LOOK_SECONDS = 1.0

WAIT_SECONDS = 150.0
"""Maximum seconds to wait until the coordinator knows the swarm's newest directive."""

SPREAD_SECONDS = 10.0
"""Maximum seconds to wait until all peers have received a directive."""


@dataclass(frozen=True)
class OwnedRun:
    """A run as its owner has it: the folder, the key, the spec and the invite."""

    folder: Path
    owner: Identity
    spec: RunSpec
    invite: Invite

    @property
    def decoder(self) -> MessageDecoder:
        return MessageDecoder(self.spec.run_id, self.owner.key, remember=4)

    @property
    def directives(self) -> DirectiveFile:
        from coordinator.directive_file import DirectiveFile

        return DirectiveFile(self.folder, self.decoder)


@dataclass(frozen=True)
class RunStatus:
    """The owner's newest directive, and the open round (None if the coordinator does not answer)."""

    body: Directive
    round: int | None
    convicted: Mapping[PeerKey, Pardon] = field(default_factory=dict)
    """The peers that are barred, each with the pardon that would lift its bar."""

    base: bytes = b""
    """Digest of the directive, from which an order is made; b"" for none."""

    @property
    def next_round(self) -> int:
        """The first round that a change can hold in."""
        return 0 if self.round is None else self.round + 1


DirectiveChange = Callable[[RunStatus], Directive | None]
"""A function from the run's status to the new directive; None if there is nothing to order."""


def _options(f):
    reason = click.option("--reason", default="", help="A sentence that peers are shown.", callback=_reason)
    home = home_option("Where the run's folder is, when a run.toml is named.")
    path = click.argument("run", type=click.Path(exists=True, path_type=Path), metavar="RUN_FILE_OR_FOLDER")
    return path(home(reason(f)))


def _reason(_context: click.Context, _parameter: click.Parameter, reason: str) -> str:
    if not is_plain(reason) or len(reason.encode()) > MAX_REASON:
        raise click.BadParameter(f"at most {MAX_REASON} bytes on one line", param_hint="--reason")
    return reason


def _keys(_context: click.Context, _parameter: click.Parameter, keys: tuple[str, ...]) -> set[PeerKey]:
    try:
        return {PeerKey.parse(k) for k in keys}
    except MalformedError as e:
        raise click.BadParameter(
            f"{e}: the run's page and `cairn status INVITE --json` show the keys of peers"
        ) from None


KEYS = click.argument("keys", nargs=-1, required=True, callback=_keys)
YES = click.option("--yes", is_flag=True, help="Do not ask.")


@click.command()
@_options
def pause(run: Path, home: Path, reason: str) -> None:
    """Pause the run: peers that have announced an update finish the open round, then nobody trains."""
    _set_status(open_run(run, home), "paused", reason, "pausing at once, in round {round}: peers keep their progress")


@click.command()
@_options
def resume(run: Path, home: Path, reason: str) -> None:
    """Continue after a pause, or after an end (peers that have left must be started again)."""
    _set_status(open_run(run, home), "running", reason, "continuing with round {round}")


@click.command()
@YES
@_options
def end(run: Path, home: Path, reason: str, yes: bool) -> None:
    """End the run: all peers save their work, and leave once the coordinator has the last state."""
    opened = open_run(run, home)
    if not yes:
        what = asyncio.run(_what_ends(opened))
        click.confirm(f"End the run? {what} All peers leave, and must be started again to continue", abort=True)
    if _set_status(opened, "ended", reason, "ending with round {round}: peers save, and leave"):
        asyncio.run(_wait_for_last_state(opened))


async def _what_ends(run: OwnedRun) -> str:
    """Return what becomes of the training since the newest archived state. Raises CairnError."""
    from coordinator.checkpoints.archive import Archive
    from peer.coordinator_client import CoordinatorUnreachable

    newest = max((a.round for a in Archive(run.folder / "checkpoints", run.spec).all()), default=0)
    archived = f"The newest archived state is that of round {newest}."
    async with _client(run) as client:
        try:
            status = await client.status()
        except CoordinatorUnreachable:
            return (
                f"The coordinator does not answer: it ends the run at its next start. {archived} What was trained "
                "since is lost if no peer has stayed until then."
            )
    if newest >= status.round:
        return archived
    here = len(_present(status))
    if not here:
        return f"{archived} Nobody is here: what was trained since is lost, unless peers that took part join again."
    return f"{archived} The coordinator gets the last one from the {here} peer{'' if here == 1 else 's'} here first."


def _present(status: SwarmStatus) -> list[PeerStatus]:
    """Return the peers that train, or would if the run went on."""
    return [p for p in status.peers if p.phase in (*TRAINING_PHASES, "paused")]


async def _wait_for_last_state(run: OwnedRun) -> None:
    """Wait until the coordinator has the state that the run ends with, while somebody is there who may give it."""
    from peer.coordinator_client import CoordinatorClient

    began = time.monotonic()
    click.echo("waiting until the coordinator has the last state; Ctrl-C ends only this wait")
    async with CoordinatorClient(run.invite, timeout=8.0) as client:
        while True:
            info, status = await client.get_run_again(), await client.status()
            here = _present(status)
            last, is_over = info.last, bool(info.over) and all(p.phase == "paused" for p in here)
            if is_over and last is None:
                click.echo("the run ends before its first round")
                return
            if is_over and last is not None and last.state is not None:
                click.echo(f"the last state, of round {last.round}, is archived in {run.folder / 'checkpoints'}")
                return
            waited = time.monotonic() - began
            # The status may be of a moment before the order.
            if waited > LAST_STATE_SECONDS or (not here and (info.over or waited > SPREAD_SECONDS)):
                click.echo(f"{status.health}: {status.message}", err=True)
                return
            await asyncio.sleep(LOOK_SECONDS)


def _set_status(run: OwnedRun, run_status: str, reason: str, message: str) -> bool:
    """Order a status. Return whether the coordinator has published the order, now."""

    def change(status: RunStatus) -> Directive | None:
        if status.body.run_status == run_status:
            click.echo(f"the run is {run_status} already")
            return None
        click.echo(message.format(round=status.round if status.round is not None else "that is open then"))
        return replace(status.body, run_status=run_status, since=int(time.time()), reason=reason)

    return _order(run, change)


@click.command()
@_options
@KEYS
def ban(run: Path, keys: set[PeerKey], home: Path, reason: str) -> None:
    """Ban the peers with these KEYS: they are not admitted, their messages are ignored, and no round lists them."""

    def change(status: RunStatus) -> Directive:
        banned = tuple(sorted({*status.body.banned, *keys}))
        if len(banned) > MAX_BANNED:
            raise CairnError(f"at most {MAX_BANNED} peers can be banned: let the run admit by invite, or by list")
        click.echo(f"banning {', '.join(k.short for k in sorted(keys))} at once; {_in_force(status)}")
        return replace(status.body, banned=banned, reason=reason or _kept_reason(status))

    opened = open_run(run, home)
    if unknown := asyncio.run(_unknown(opened, keys)):
        named = ", ".join(k.short for k in unknown)
        click.echo(f"note: the coordinator shows no peer {named}: compare the key with the run's page", err=True)
    _order(opened, change)


async def _unknown(run: OwnedRun, keys: set[PeerKey]) -> list[PeerKey]:
    """Return those keys with which the coordinator shows no peer; none if it does not answer, or shows only some."""
    from coordinator.rpc import MAX_STATUS_PEERS

    async with _client(run) as client:
        try:
            shown = {p.peer for p in (await client.status()).peers}
        except CairnError:
            return []  # this is only a note: the order that follows says what is wrong
    return sorted(keys - shown) if len(shown) < MAX_STATUS_PEERS else []


@click.command()
@_options
@KEYS
def unban(run: Path, keys: set[PeerKey], home: Path, reason: str) -> None:
    """Admit the peers with these KEYS again."""

    def change(status: RunStatus) -> Directive:
        if missing := sorted(keys - set(status.body.banned)):
            raise CairnError(f"{', '.join(k.short for k in missing)} is not banned")
        click.echo(f"letting in {', '.join(k.short for k in sorted(keys))}; {_in_force(status)}")
        banned = tuple(k for k in status.body.banned if k not in keys)
        return replace(status.body, banned=banned, reason=reason or _kept_reason(status))

    _order(open_run(run, home), change)


@click.command()
@_options
@KEYS
def pardon(run: Path, keys: set[PeerKey], home: Path, reason: str) -> None:
    """End the bar of the convicted peers with these KEYS: they may train again, as newcomers.

    The stake and the pending credit that their conviction took stay lost.
    """

    def change(status: RunStatus) -> Directive:
        pardons = pardons_with(status, keys)
        click.echo(f"pardoning {', '.join(k.short for k in sorted(keys))}; {_in_force(status)}")
        return replace(status.body, pardons=pardons, reason=reason or _kept_reason(status))

    _order(open_run(run, home), change)


def pardons_with(status: RunStatus, keys: set[PeerKey]) -> tuple[Pardon, ...]:
    """Return the pardons of a directive that pardons these keys, too. Raises CairnError."""
    if status.round is None:
        raise CairnError("the coordinator must run: it knows the conviction. Start it, then try again")
    if missing := sorted(keys - status.convicted.keys()):
        named = ", ".join(k.short for k in missing)
        raise CairnError(f"no conviction bars {named} now: the run's page shows the barred")
    waiting = {p for p in status.body.pardons if status.convicted.get(p.peer) == p}
    found = waiting | {status.convicted[key] for key in keys}
    if len(found) > MAX_PARDONS:
        raise CairnError(
            f"at most {MAX_PARDONS} pardons at once, and no record carries {len(waiting)} of those before yet: name "
            "fewer peers now, and the others when the run's page shows the first as pardoned"
        )
    # A record that carries one of the others may lose yet, so the newest are repeated. That changes nothing else.
    others = sorted(set(status.body.pardons) - found, key=lambda p: -p.round)[: MAX_PARDONS - len(found)]
    return tuple(sorted({*found, *others}, key=lambda p: (p.peer, p.round)))


def _kept_reason(status: RunStatus) -> str:
    """Return why the run is paused or ended, which an order without a reason of its own keeps; "" while it runs."""
    return "" if status.body.run_status == "running" else status.body.reason


def _in_force(status: RunStatus) -> str:
    if status.round is None:
        return "it is in force for all from the round after the first that carries it"
    return f"it is in force for all from round {status.round + 1} on"


@click.command()
@click.option("--from-round", type=click.IntRange(0), default=0, help="Not before this round.  [default: the next]")
@_options
@click.argument("settings", nargs=-1, required=True, metavar="FIELD=VALUE...")
def policy(run: Path, settings: tuple[str, ...], from_round: int, home: Path, reason: str) -> None:
    """Change the round policy: FIELD=VALUE as in the spec's [round], FIELD=spec for the spec's own value.

    \b
    Fields: target_tokens, max_seconds, exchange_seconds, propose_seconds, patience_seconds, member_seconds,
            max_update_tokens, max_members
    """
    opened = open_run(run, home)

    def change(status: RunStatus) -> Directive:
        changes = replace(status.body.changes, **dict(map(parse_setting, settings)))
        check_changes(opened.spec, changes)
        first = max(from_round, status.next_round)
        when = f"from round {first} on" if first else f"at the next start: {_in_force(status)}"
        click.echo(f"changing {', '.join(settings)} {when}")
        if moved := moved_changes(status, first):
            click.echo(moved, err=True)
        return replace(status.body, changes=changes, from_round=Round(first), reason=reason or _kept_reason(status))

    _order(opened, change)


def moved_changes(status: RunStatus, first: int) -> str:
    """Return a sentence if earlier changes wait for another round than `first`: a directive has one round for all."""
    waiting = status.body.from_round
    if waiting == first or waiting <= status.next_round:
        return ""
    return f"the changes ordered for round {waiting} hold then, too"


def parse_setting(text: str) -> tuple[str, Any]:
    """Return field and value of FIELD=VALUE; None for the spec's own value. Raises CairnError."""
    name, _, value = text.partition("=")
    kinds = {f.name: int if "int" in str(f.type) else float for f in fields(RoundChanges)}
    if name not in kinds or not value:
        raise CairnError(f"{text[:60]!r}: write FIELD=VALUE, FIELD one of {', '.join(kinds)}")
    if value == "spec":
        return name, None
    has_unit = not value.replace("_", "").replace(".", "").isdigit()
    size = parse_size(value) if kinds[name] is int and has_unit else None
    try:
        return name, kinds[name](value.replace("_", "")) if size is None else size
    except ValueError:
        raise CairnError(f"{text[:60]!r}: {value[:30]!r} is not a number") from None


def check_changes(spec: RunSpec, changes: RoundChanges) -> None:
    """Raise CairnError unless the spec stays valid with these changes of its round policy."""
    from pydantic import ValidationError

    from protocol.spec import explain

    changed = {f.name: v for f in fields(changes) if (v := getattr(changes, f.name)) is not None}
    try:
        type(spec).model_validate(spec.model_dump() | {"round": spec.round.model_dump() | changed})
    except ValidationError as e:
        raise CairnError(explain(e, "round policy")) from None


@click.command()
@YES
@_options
@click.argument("round_", metavar="ROUND", type=click.IntRange(1))
def rollback(run: Path, round_: int, home: Path, reason: str, yes: bool) -> None:
    """Continue from the archived state that ROUND began with, and discard the training since.

    Credit for it stays. Peers load that state, and train from there.
    """
    from coordinator.checkpoints.archive import Archive

    opened = open_run(run, home)
    archived = {a.round: a for a in Archive(opened.folder / "checkpoints", opened.spec).all() if a.round}
    found = archived.get(round_)
    if found is None:
        there = ", ".join(map(str, archived))
        which = f"choose one of these rounds: {there}" if there else "no state is yet: there is nothing to go back to"
        raise CairnError(f"the state of round {round_} is not archived; {which}")

    if not yes:
        now = _round_to_leave(asyncio.run(_look(opened)))
        gone = max(0, now - round_)
        many = f"{gone} round{'' if gone == 1 else 's'}"
        click.confirm(f"Go back from round {now} to round {round_}? {many} no longer count", abort=True)

    def change(status: RunStatus) -> Directive:
        click.echo(f"rolling back from round {_round_to_leave(status)} to round {round_}, state {found.state.short}")
        back = Rollback(status.body.epoch + 1, found.record, Round(round_), found.state)
        # On the new branch these rounds come again: whoever is convicted there is not pardoned yet.
        pardons = tuple(p for p in status.body.pardons if p.round < round_)
        return replace(status.body, rollback=back, pardons=pardons, reason=reason or status.body.reason)

    _order(opened, change)


def _round_to_leave(status: RunStatus) -> int:
    if status.round is None:
        raise CairnError("the coordinator must run: peers get the state from it. Start it, then try again")
    return status.round


COMMANDS = (pause, resume, ban, unban, pardon, policy, end, rollback)


def open_run(path: Path, home: Path) -> OwnedRun:
    """Return the run of a folder, or of a run.toml. Raises CairnError."""
    from cairn.commands.serve import RESTORE_OWNER, coordinator_folder
    from coordinator.authoring.resolve import SPEC
    from coordinator.authoring.runfile import load_run
    from peer.keyfile import load
    from protocol.spec import open_spec

    name = None if path.is_dir() else load_run(path).run.name
    folder = path if name is None else coordinator_folder(home, name)
    try:
        owner = load(folder / "owner.key", RESTORE_OWNER)
        invite = Invite.parse((folder / "invite").read_text().strip())
        spec = open_spec((folder / "run" / SPEC).read_bytes(), invite.run)
    except OSError as e:
        missing = Path(e.filename or folder).name
        raise CairnError(
            f"{folder} is not the folder of a run that was served from here: {missing} is not there. Name the run's "
            "folder (`cairn coordinator serve` prints it), or its run.toml, with --home where that is not the usual one"
        ) from None
    if name not in (None, spec.name):
        raise CairnError(f"{folder} is of the run {spec.name!r}, not of {name!r} in {path}: name its own run.toml")
    if spec.owner_key != owner.key:
        raise CairnError(f"the key {folder / 'owner.key'} is not the key of this run's owner")
    return OwnedRun(folder, owner, spec, invite)


def _order(run: OwnedRun, change: DirectiveChange) -> bool:
    """Sign and send a directive, and print the result. Return whether it was published now. Raises CairnError."""
    return asyncio.run(_send(run, change))


def _client(run: OwnedRun) -> CoordinatorClient:
    from peer.coordinator_client import CoordinatorClient

    return CoordinatorClient(run.invite, timeout=8.0, attempts=1)


async def _look(run: OwnedRun) -> RunStatus:
    async with _client(run) as client:
        return await _status(run, client)


async def _status(run: OwnedRun, client: CoordinatorClient) -> RunStatus:
    from peer.coordinator_client import CoordinatorUnreachable

    number: int | None = None
    convicted: dict[PeerKey, Pardon] = {}
    try:
        reply = await _newest(client)
        number = reply.round
        convicted = {PeerKey(c.peer): Pardon(PeerKey(c.peer), Round(c.round)) for c in reply.convictions}
        directives = [run.decoder.decode(reply.directive, Directive)] if reply.directive else []
    except CoordinatorUnreachable as e:
        click.echo(f"the coordinator does not answer ({e})", err=True)
        directives, _ = run.directives.read()
        directives += [order.directive for order in run.directives.left()]
    newest = max(directives, key=lambda d: d.body.precedence, default=None)
    if newest is None:
        return RunStatus(Directive(run.spec.run_id, 0), number, convicted)  # it changes nothing
    return RunStatus(newest.body, number, convicted, newest.digest)


async def _newest(client: CoordinatorClient) -> DirectiveReply:
    """Return the coordinator's answer once it knows the newest directive: it may be without it after its start.

    Raises CairnError.
    """
    end_at, said = time.monotonic() + WAIT_SECONDS, ""
    while (reply := await client.publish_directive()).wait:
        if time.monotonic() > end_at:
            raise CairnError(f"{reply.wait}: look at the coordinator's log, and give the order again")
        if reply.wait != said:
            click.echo(f"waiting for up to two minutes: {reply.wait}", err=True)
        said = reply.wait
        await asyncio.sleep(LOOK_SECONDS)
    return reply


async def _send(run: OwnedRun, change: DirectiveChange) -> bool:
    from coordinator.directive_file import LeftOrder

    async with _client(run) as client:
        status = await _status(run, client)
        body = change(status)
        if body is None:
            return False
        body = replace(body, sequence=max(status.body.sequence + 1, int(time.time() * 1000)))
        directive = KeySigner(run.owner).sign(body)
        if status.round is None:
            run.directives.leave(LeftOrder(directive, status.base))
            click.echo(f"the order is left in {run.folder}: the coordinator publishes it when it is started again")
            return False
        await client.publish_directive(directive.encoded, status.base)
        await _wait_until_spread(client)
        return True


async def _wait_until_spread(client: Any) -> None:
    end_at = time.monotonic() + SPREAD_SECONDS
    while True:
        reply = await client.publish_directive()
        if reply.informed >= reply.peers or time.monotonic() > end_at:
            break
        await asyncio.sleep(0.3)
    many = "peer has" if reply.informed == 1 else "peers have"
    remaining = "" if reply.informed >= reply.peers else f"; the other {reply.peers - reply.informed} get it from them"
    click.echo(f"ordered: {reply.informed} {many} received it{remaining}")
