"""`cairn auditor`: a peer that checks others' updates for the run's owner, and trains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cairn.commands.join import JoinOptions, join_run, member_options
from cairn.commands.options import FILE, device_option
from peer.keyfile import load
from protocol.errors import CairnError, IdentityError
from protocol.identity import Identity


def _owner(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Identity:
    """Return the identity in a file of --owner-key. Raises CairnError."""
    if path is None:
        raise CairnError(
            "--owner-key is missing: a key without accepted work has no say in audits. To use a spare GPU for them, "
            "let a peer train and audit: cairn peer join INVITE --audit-device cuda:1"
        )
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
    help="The key of the run's owner, which signs the reports: owner.key in the run's folder.  [required]",
)
def auditor(**options: Any) -> None:
    """Check others' updates for the owner of the run that INVITE names, without training, until Ctrl-C.

    It makes all checks that are due. A volunteer's peer makes those that it is drawn for while it trains.

    \b
    Example, on the coordinator's machine:
      cairn auditor INVITE --home ~/auditor --device cuda:1 \\
          --owner-key ~/.cairn/coordinated/my-run/owner.key
    """
    join_run(JoinOptions(**options))
