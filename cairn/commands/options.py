"""Options that many commands share."""

from __future__ import annotations

from pathlib import Path

import click

DEFAULT_HOME = "~/.cairn"


def home_option(keeps: str):
    """--home, with what the command finds there: "Where ..."."""
    return click.option(
        "--home",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULT_HOME,
        envvar="CAIRN_HOME",
        show_default=True,
        help=keeps,
        callback=lambda _c, _p, value: value.expanduser(),
    )


via_option = click.option(
    "--via",
    multiple=True,
    metavar="MULTIADDR",
    help="A member to ask where the coordinator is, should it have moved; may be repeated.",
)
