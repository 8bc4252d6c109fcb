"""`cairn audit ...`: parses arguments and hands over to `cairn.ledger_audit`."""

from __future__ import annotations

import sys

import click

from cairn.commands.options import FILE, home_option, invite_argument, via_option

HOME = home_option("Where identity, and the newest head that was seen, are kept.")


@click.group()
def audit() -> None:
    """Check a run's credits yourself. The exit code is 0 when all is as it should be, 1 when it is not."""


@audit.command("ledger")
@invite_argument
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@HOME
@via_option
def ledger(invite, as_json, home, via) -> None:
    """Recompute every credit of the run from the peers' certificates, and say where the coordinator's log differs.

    The chain is read from members of the swarm. The newest signed head of the log is remembered under --home: the next
    audit sees whether the log has only grown since.
    """
    from cairn.ledger_audit import audit_ledger

    if not audit_ledger(invite, home, as_json=as_json, via=via):
        sys.exit(1)


@audit.command("receipt")
@invite_argument
@click.argument("files", nargs=-1, type=FILE)
@click.option("--peer", default="", metavar="KEY", help="The newest receipts of this peer.  [default: this machine's]")
@HOME
@via_option
def receipt(invite, files, peer, home, via) -> None:
    """Check receipts (FILES, or the newest of a peer) against the log: each is proved to be in it."""
    from cairn.ledger_audit import audit_receipts

    if not audit_receipts(invite, files, peer, home, via=via):
        sys.exit(1)
