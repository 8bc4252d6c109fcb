"""`cairn run pause|resume|ban|unban|policy|end|rollback`: the directives of a run's owner while the run is on.

The key in the run's folder signs each directive, and the coordinator publishes it. If the coordinator does not answer,
the directive stays in the folder, where the next start finds it.
"""

from __future__ import annotations

from pathlib import Path

import click

from cairn.commands.options import home_option


def _options(f):
    reason = click.option("--reason", default="", help="A sentence that peers are shown.")
    home = home_option("Where the run's folder is, when a run.toml is named.")
    path = click.argument("run", type=click.Path(exists=True, path_type=Path), metavar="RUN_FILE_OR_FOLDER")
    return path(home(reason(f)))


@click.command()
@_options
def pause(run: Path, home: Path, reason: str) -> None:
    """Pause the run: peers that have announced an update finish the open round, then nobody trains."""
    from cairn import owner_commands

    owner_commands.set_order(
        run, home, "paused", reason, "pausing at once, in round {round}: peers keep their progress"
    )


@click.command()
@_options
def resume(run: Path, home: Path, reason: str) -> None:
    """Continue after a pause, or after an end (peers that have left must be started again)."""
    from cairn import owner_commands

    owner_commands.set_order(run, home, "running", reason, "continuing with round {round}")


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@_options
def end(run: Path, home: Path, reason: str, yes: bool) -> None:
    """End the run: all peers save their work, and leave."""
    if not yes:
        click.confirm("End the run? All peers leave, and must be started again to continue", abort=True)
    from cairn import owner_commands

    owner_commands.set_order(run, home, "ended", reason, "ending with round {round}: peers save, and leave")


@click.command()
@_options
@click.argument("keys", nargs=-1, required=True)
def ban(run: Path, keys: tuple[str, ...], home: Path, reason: str) -> None:
    """Ban the peers with these KEYS: they are not admitted, their messages are ignored, and no round lists them."""
    from cairn import owner_commands

    owner_commands.ban(run, keys, home, reason)


@click.command()
@_options
@click.argument("keys", nargs=-1, required=True)
def unban(run: Path, keys: tuple[str, ...], home: Path, reason: str) -> None:
    """Admit the peers with these KEYS again."""
    from cairn import owner_commands

    owner_commands.unban(run, keys, home, reason)


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
    from cairn import owner_commands

    owner_commands.policy(run, settings, from_round, home, reason)


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@_options
@click.argument("round_", metavar="ROUND", type=click.IntRange(1))
def rollback(run: Path, round_: int, home: Path, reason: str, yes: bool) -> None:
    """Continue from the archived state that ROUND began with, and discard the training since.

    Credit for it stays. Peers load that state, and train from there.
    """
    from cairn import owner_commands

    owner_commands.rollback(run, round_, home, reason, yes)


COMMANDS = (pause, resume, ban, unban, policy, end, rollback)
