"""`cairn checkpoint`: checks of a checkpoint that need no trust in its source."""

from __future__ import annotations

import click

from cairn.commands.group import CommandGroup
from cairn.commands.options import invite_or_stdin


@click.group(cls=CommandGroup)
def checkpoint() -> None:
    """Check checkpoints that a run's owner published."""


@checkpoint.command()
@click.argument("checkpoint")
@click.argument("trusted", metavar="INVITE_OR_OWNER_KEY", callback=invite_or_stdin)
def verify(checkpoint, trusted) -> None:
    """Verify that CHECKPOINT is a state that the run's owner finalized.

    CHECKPOINT is a folder, or any fsspec address of one, as a coordinator archives it. You trust the run's invite, or
    its owner's key (64 hexadecimal digits: the spec's `owner`). Everything is read once, the model too.
    """
    from cairn.checkpoints import verify_checkpoint

    proved = verify_checkpoint(checkpoint, trusted, report=click.echo)
    click.echo(f"verified: the state of round {proved.archived.round} of run {proved.spec.name}")
