"""`cairn watch`: the swarm of an invite, live in the terminal, for as long as one likes."""

from __future__ import annotations

import click

from cairn.commands.options import via_option


@click.command()
@click.argument("invite")
@click.option("--plain", is_flag=True, help="Lines instead of a live view (the default without a terminal).")
@via_option
def watch(invite: str, plain: bool, via: tuple[str, ...]) -> None:
    """Watch the swarm of the run that INVITE names, until Ctrl-C. The coordinator may be restarted meanwhile."""
    from cairn.watching import watch_run

    watch_run(invite, plain=plain, via=via)
