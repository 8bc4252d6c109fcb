"""`cairn auditor`: a peer that checks others' updates, and trains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cairn.commands.join import JoinOptions, join_run, member_options
from cairn.commands.options import FILE, device_option
from peer.keyfile import load
from protocol.errors import CairnError, IdentityError
from protocol.identity import Identity


def _owner(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Identity | None:
    """Return the identity in a file of --owner-key. Raises CairnError."""
    if path is None:
        return None
    path = path.expanduser()
    try:
        return load(path)
    except FileNotFoundError:
        why = f"there is no file {path}"
    except IdentityError as e:
        why = str(e)
    raise CairnError(
        f"--owner-key: {why}. The key is owner.key in the run's folder, which `cairn coordinator serve` prints"
    )


@click.command()
@member_options
@device_option()
@click.option(
    "--owner-key",
    "owner",
    type=FILE,
    callback=_owner,
    metavar="FILE",
    help="Report as the run's owner: owner.key in the run's folder. It needs no stake, and checks all that is due.",
)
def auditor(**options: Any) -> None:
    """Check others' updates in the run that INVITE names, without training, until Ctrl-C.

    The peer of --home reports by its own key, which must have stake: it has trained in the last rounds, or is a
    founder. It checks what it is drawn for.

    \b
    Example, on the coordinator's machine:
      cairn auditor INVITE --home ~/auditor --device cuda:1 \\
          --owner-key ~/.cairn/coordinated/my-run/owner.key
    """
    join_run(JoinOptions(**options, auditor=True))
