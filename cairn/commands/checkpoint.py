"""`cairn checkpoint`: what a stranger can check of a checkpoint."""

from __future__ import annotations

import click

from protocol.errors import CairnError


@click.group()
def checkpoint() -> None:
    """Check checkpoints that a run's owner published."""


@checkpoint.command()
@click.argument("checkpoint")
@click.argument("trusted", metavar="INVITE_OR_OWNER_KEY")
def verify(checkpoint, trusted) -> None:
    """Verify that CHECKPOINT is a state that the run's owner signed as final.

    CHECKPOINT is a folder, or any fsspec address of one, as a coordinator archives it. What you trust is the run's
    invite, or its owner's key (64 hexadecimal digits: the spec's `owner`). All is read once: the model too.
    """
    from cairn.checkpoints import verify_checkpoint

    proved = verify_checkpoint(checkpoint, trusted, report=click.echo)
    click.echo(f"verified: the state of round {proved.archived.round} of run {proved.spec.name}")


def archive_options(f):
    """The options of `cairn coordinator serve` about checkpoints; they go over what coordinator.toml says."""
    for option in reversed(
        [
            click.option("--settings", default=None, metavar="FILE", help="[default: coordinator.toml beside it]"),
            click.option("--archive", default=None, metavar="ADDRESS", help="Copy final checkpoints there (fsspec)."),
            click.option("--keep", default=None, metavar="POLICY", help="E.g. newest=5,every=100,best=3,bytes=200G."),
            click.option(
                "--evaluate-every",
                type=click.IntRange(0),
                default=None,
                metavar="N",
                help="Judge a checkpoint each N rounds; 0: never.  [default: each]",
            ),
        ]
    ):
        f = option(f)
    return f


def settings_of(run_file, settings, archive, keep, evaluate_every):
    """The settings that the options and the file name. Raises CairnError."""
    from pathlib import Path

    from coordinator.checkpoints.settings import FILE, load_settings

    file = run_file.with_name(FILE) if settings is None else Path(settings).expanduser()
    if settings is not None and not file.is_file():
        raise CairnError(f"--settings {file}: no such file")
    return load_settings(file if file.is_file() else None, address=archive, keep=keep, evaluate_every=evaluate_every)
