"""`cairn audit ...`: parses arguments and hands over to `cairn.ledger_audit` and `cairn.update_audit`."""

from __future__ import annotations

import sys

import click

from cairn.commands.group import CommandGroup
from cairn.commands.options import FILE, FOLDER, device_option, home_option, invite_argument, peer_key, via_option
from cairn.stop_signals import sigterm_as_ctrl_c
from protocol.errors import CairnError, os_reason

HOME = home_option("Where this machine's peer has its identity.")


@click.group(cls=CommandGroup)
def audit() -> None:
    """Check a run's credits and updates yourself. The exit code is 0 when all is as it should be, 1 when it is not."""


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

    if files and peer:
        raise click.UsageError("FILES or --peer, not both: a file names its peer")
    if not audit_receipts(invite, files, peer_key(peer, "--peer") if peer else None, home, via=via):
        sys.exit(1)


@audit.command("update")
@invite_argument
@click.option(
    "--round", "round_", type=click.IntRange(0, 2**53), required=True, help="The round that lists the update."
)
@click.option("--peer", required=True, metavar="KEY", help="Its author: the key, or how the key or the name begins.")
@click.option(
    "--check",
    type=click.Choice(["replay", "loss"]),
    help="Which check.  [default: replay if the run has it, else loss]",
)
@device_option()
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads.  [default: all]")
@click.option("--folder", type=FOLDER, help="Keep here what is fetched, for more checks.  [default: a temporary one]")
@home_option("Where this machine's peer, if there is one, has files that the check needs.")
@via_option
def update(invite, round_, peer, check, device, threads, folder, home, via) -> None:
    """Repeat the check of one update on this machine, and compare with what the chain's reports say.

    All is read from members of the swarm, or from the disk of this machine's peer. The exit code is 0 when the update
    passed, 1 when it failed, and 3 when the check could not be made.
    """
    from cairn.update_audit import RepeatOptions, repeat_check

    try:
        with sigterm_as_ctrl_c():  # else what was fetched stays in /tmp
            passed = repeat_check(RepeatOptions(invite, round_, peer, check, device, threads, folder, home, via))
    except CairnError as e:
        click.echo(f"error: {e}", err=True)
        sys.exit(3)
    except OSError as e:
        click.echo(f"error: {e.filename or 'a file'}: {os_reason(e)}: name other folders (--home, --folder)", err=True)
        sys.exit(3)
    if not passed:
        sys.exit(1)
