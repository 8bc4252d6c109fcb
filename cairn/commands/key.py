"""`cairn peer key`: this machine's public key, for a run that admits only the keys in its run file."""

from __future__ import annotations

from pathlib import Path

import click

from cairn.commands.options import home_option


@click.command()
@home_option("Where the identity is kept.")
def key(home: Path) -> None:
    """Print the public key of this machine's peer, for `admission.allow` and `admission.founders` in a run file.

    If the machine has no identity yet, one is made. Its peer joins under it, unless it is anonymous. The private key
    stays in identity.key.
    """
    from peer.keyfile import load_or_make

    click.echo(load_or_make(home / "identity.key").key.hex())
