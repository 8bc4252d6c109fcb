"""`cairn peer invite`: any member can hand on a current invite, also while the coordinator is away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from protocol.coordinator_address import open_coordinator_address
from protocol.errors import CairnError, MalformedError
from protocol.invite import MAX_SWARM_ADDRESSES, Invite, one_of_each
from protocol.spec import open_spec


def renewed_invite(text: str, home: Path) -> str:
    """The invite with what this peer knows: where the coordinator is now, and members to enter by, this one first.

    Reads the run's folder only, which the peer may be using. Raises CairnError.
    """
    from peer.node.coordinator_discovery import COORDINATOR_ADDRESS, SPEC
    from peer.node.membership import ADDRESSES, OWN_ADDRESSES, run_folder

    try:
        invite = Invite.parse(text)
    except MalformedError as e:
        raise CairnError(str(e)) from None
    values = run_folder(home, invite.run) / "store" / "values"

    def value(name: str) -> bytes:
        try:
            return (values / name).read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as e:
            raise CairnError(f"{values / name} cannot be read: {(e.strerror or str(e)).lower()}") from None

    if not (spec_sent := value(SPEC)):
        raise CairnError(
            f"this peer has never been in run {invite.run.short}: join it first, or give --home as you did for "
            "`cairn peer join`"
        )
    spec = open_spec(spec_sent, invite.run)
    if sent := value(COORDINATOR_ADDRESS):
        word = open_coordinator_address(sent, invite.run, spec.owner_key).body
        invite = replace(invite, coordinators=word.coordinators, fingerprint=word.fingerprint)
    lines = b"\n".join([value(OWN_ADDRESSES), value(ADDRESSES)]).decode(errors="replace").splitlines()
    known = one_of_each([*(line for line in lines if line.startswith("/")), *invite.addresses])
    return str(replace(invite, addresses=known[:MAX_SWARM_ADDRESSES]))
