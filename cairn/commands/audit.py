"""`cairn audit ...`: parses arguments and hands over to `cairn.ledger_audit`."""

from __future__ import annotations

import sys

import click

from cairn.commands.options import FILE, home_option, invite_argument, via_option

HOME = home_option("Where this machine's peer has its identity.")


@click.group()
def audit() -> None:
    """Check a run's credits yourself. The exit code is 0 when all is as it should be, 1 when it is not."""


@audit.command("ledger")
@invite_argument
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@via_option
def ledger(invite, as_json, via) -> None:
    """Recompute every credit of the run from the peers' certificates, and say where the coordinator differs.

    The chain is read from members of the swarm.
    """
    from cairn.ledger_audit import audit_ledger

    if not audit_ledger(invite, as_json=as_json, via=via):
        sys.exit(1)


@audit.command("receipt")
@invite_argument
@click.argument("files", nargs=-1, type=FILE)
@click.option("--peer", default="", metavar="KEY", help="The newest receipts of this peer.  [default: this machine's]")
@HOME
@via_option
def receipt(invite, files, peer, home, via) -> None:
    """Check receipts (FILES, or the newest of a peer) against the certificates of their records."""
    from cairn.ledger_audit import audit_receipts

    if not audit_receipts(invite, files, peer, home, via=via):
        sys.exit(1)
