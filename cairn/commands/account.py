"""`cairn account ...`: the arguments of the commands in `cairn.accounts`."""

from __future__ import annotations

from pathlib import Path

import click

from cairn.commands.options import home_option, via_option

HOME = home_option("Where identity, account and runs are kept.")


@click.group()
def account() -> None:
    """Credits: what peers have earned, and one account for several of them."""


@account.command("new")
@HOME
def new(home) -> None:
    """Make an account: a key file, to which peers are bound."""
    from cairn.accounts import new_account

    click.echo(new_account(home))


@account.command("bind")
@click.argument("invite")
@click.option("--name", required=True, help="What the account is called on the run's page (at most 40 bytes).")
@click.option("--team", default="", help="Its team, if any (at most 40 bytes).")
@click.option("--consent", "consents", multiple=True, help="The line that `cairn account consent` printed for a peer.")
@click.option(
    "--key",
    "key_file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="The account's key file.  [default: account.key in --home]",
)
@HOME
@via_option
def bind(invite, name, team, consents, key_file, home, via) -> None:
    """Let the credits of this machine's peer in a run count for the account."""
    from cairn.accounts import bind_peers

    for line in bind_peers(invite, home, name=name, team=team, consents=consents, key_file=key_file, via=via):
        click.echo(line)


@account.command("consent")
@click.argument("invite")
@click.argument("account_key", metavar="ACCOUNT")
@HOME
def consent(invite, account_key, home) -> None:
    """Print this peer's signed consent to be bound to ACCOUNT, for `cairn account bind --consent` on another machine.

    So the account's key need not be on rented machines.
    """
    from cairn.accounts import peer_consent

    click.echo(peer_consent(invite, account_key, home))


@account.command("show")
@click.argument("invite")
@click.option("--peer", default="", metavar="KEY", help="Of this peer.")
@click.option("--account", "account_key", default="", metavar="KEY", help="Of this account.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@HOME
@via_option
def show(invite, peer, account_key, as_json, home, via) -> None:
    """Show totals, the recent average, and the newest receipts; of your own account or peer by default."""
    from cairn.accounts import show as show_account

    show_account(invite, home, peer=peer, account=account_key, as_json=as_json, via=via)


@account.command("export")
@click.argument("invite")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Write over what is there.")
@via_option
def export(invite, out, force, via) -> None:
    """Write every credit of the run to OUT, a .csv or .parquet file."""
    from cairn.accounts import export_credits

    export_credits(invite, out, via=via, force=force)
