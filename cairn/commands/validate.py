"""`cairn run validate`: checks a run.toml before the run begins."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def validate(file: Path) -> None:
    """Check a run.toml, and print its cost for a peer."""
    from coordinator.authoring import validate

    for line in validate(file):
        click.echo(line)
