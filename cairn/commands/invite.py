"""`cairn peer invite`: a current invite from any member, also while the coordinator is away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from cairn.commands.options import home_option, invite_argument
from cairn.connection import parse_invite
from cairn.visibility import anonymous_hint
from protocol.errors import CairnError, os_reason


@click.command()
@invite_argument
@home_option("Where identity, runs and logs are kept.")
def invite(invite: str, home: Path) -> None:
    """Print INVITE with the coordinator's present address and the addresses of members that this peer knows.

    For a newcomer whose invite is old, or whose coordinator is away. The peer may be running.
    """
    click.echo(renewed_invite(invite, home))


def renewed_invite(text: str, home: Path) -> str:
    """Return the invite with the addresses that this peer knows: the coordinator's, its own, then other members'.

    Only the run's folder is read, so the peer may be running. Raises CairnError.
    """
    from peer.node.coordinator_discovery import COORDINATOR_ADDRESS, SPEC
    from peer.node.enrollment import ADDRESSES, OWN_ADDRESSES, run_folder
    from protocol.coordinator_address import open_coordinator_address
    from protocol.invite import MAX_SWARM_ADDRESSES, one_per_peer_first
    from protocol.spec import open_spec

    invite = parse_invite(text)
    values = run_folder(home, invite.run) / "store" / "values"

    def value(name: str) -> bytes:
        try:
            return (values / name).read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as e:
            raise CairnError(f"{values / name} cannot be read: {os_reason(e)}") from None

    if not (signed_spec := value(SPEC)):
        raise CairnError(
            f"this peer has never been in run {invite.run.short}: join it first, or give --home as you did for "
            f"`cairn peer join`{anonymous_hint(home, invite.run)}"
        )
    spec = open_spec(signed_spec, invite.run)
    if encoded := value(COORDINATOR_ADDRESS):
        address = open_coordinator_address(encoded, invite.run, spec.owner_key).body
        invite = replace(invite, coordinators=address.coordinators, fingerprint=address.fingerprint)
    lines = b"\n".join([value(OWN_ADDRESSES), value(ADDRESSES)]).decode(errors="replace").splitlines()
    addresses = one_per_peer_first([*(line for line in lines if line.startswith("/")), *invite.addresses])
    return str(replace(invite, addresses=addresses[:MAX_SWARM_ADDRESSES]))
