"""`cairn run pause|resume|ban|unban|policy|end|rollback`: what a run's owner orders while the run is on.

Whoever has the owner's key may: each order is signed with the key in the run's folder and handed to the coordinator;
when that does not answer, it is left in the folder, where the next start finds it.
"""

from __future__ import annotations

from pathlib import Path

import click

from cairn.commands.options import home_option


def _options(f):
    reason = click.option("--reason", default="", help="Words that peers are shown.")
    home = home_option("Where the run's folder is, when a run.toml is named.")
    path = click.argument("run", type=click.Path(exists=True, path_type=Path), metavar="RUN_FILE_OR_FOLDER")
    return path(home(reason(f)))


@click.command()
@_options
def pause(run: Path, home: Path, reason: str) -> None:
    """Let all peers rest: who has announced its update ends the open round, then nothing is trained."""
    from cairn import owner_commands

    owner_commands.set_order(
        run, home, "paused", reason, "pausing at once, in round {round}: peers keep all that they have learnt"
    )


@click.command()
@_options
def resume(run: Path, home: Path, reason: str) -> None:
    """Go on after a pause, or after an end (peers that have left must be started again)."""
    from cairn import owner_commands

    owner_commands.set_order(run, home, "running", reason, "going on with round {round}")


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@_options
def end(run: Path, home: Path, reason: str, yes: bool) -> None:
    """End the run: all peers save what they have, and leave."""
    if not yes:
        click.confirm("End the run? All peers leave, and must be started again should it go on", abort=True)
    from cairn import owner_commands

    owner_commands.set_order(run, home, "ended", reason, "ending with round {round}: peers save, and leave")


@click.command()
@_options
@click.argument("keys", nargs=-1, required=True)
def ban(run: Path, keys: tuple[str, ...], home: Path, reason: str) -> None:
    """Ban the peers with these KEYS: they are not admitted, not heard, and no round lists their updates."""
    from cairn import owner_commands

    owner_commands.ban(run, keys, home, reason)


@click.command()
@_options
@click.argument("keys", nargs=-1, required=True)
def unban(run: Path, keys: tuple[str, ...], home: Path, reason: str) -> None:
    """Let the peers with these KEYS in again."""
    from cairn import owner_commands

    owner_commands.unban(run, keys, home, reason)


@click.command()
@click.option("--from-round", type=click.IntRange(0), default=0, help="Not before this round.  [default: the next]")
@_options
@click.argument("settings", nargs=-1, required=True, metavar="FIELD=VALUE...")
def policy(run: Path, settings: tuple[str, ...], from_round: int, home: Path, reason: str) -> None:
    """Change the round policy: FIELD=VALUE as in the spec's [round], FIELD=spec for what the spec says.

    \b
    Fields: target_tokens, max_seconds, exchange_seconds, propose_seconds, patience_seconds, member_seconds,
            max_update_tokens, max_members
    """
    from cairn import owner_commands

    owner_commands.policy(run, settings, from_round, home, reason)


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@_options
@click.argument("round_", metavar="ROUND", type=click.IntRange(1))
def rollback(run: Path, round_: int, home: Path, reason: str, yes: bool) -> None:
    """Go on from the archived state that ROUND began with: what was trained since counts no more.

    Credit for it stays. Peers load that state, and begin to learn anew from there.
    """
    from cairn import owner_commands

    owner_commands.rollback(run, round_, home, reason, yes)


COMMANDS = (pause, resume, ban, unban, policy, end, rollback)
