"""Connections to the coordinator that an invite names, at its new address if it has moved."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.errors import CairnError, MalformedError
from protocol.invite import Invite

if TYPE_CHECKING:
    from peer.coordinator_client import CoordinatorClient
    from peer.log_client import LogClient
    from protocol.coordinator_address import CoordinatorAddress
    from protocol.spec import RunSpec


@dataclass(frozen=True)
class CoordinatorConnection:
    """A coordinator that answers.

    `members` are multiaddresses of its swarm. `own` are those of the coordinator's observer, which is no independent
    source when the coordinator itself is audited.
    """

    invite: Invite
    client: CoordinatorClient
    log: LogClient
    spec: RunSpec
    members: tuple[str, ...]
    own: tuple[str, ...]


def parse_invite(text: str) -> Invite:
    """Return the invite in a text. Raises CairnError."""
    try:
        return Invite.parse(text)
    except MalformedError as e:
        raise CairnError(str(e)) from None


@asynccontextmanager
async def connect(text: str, via: Sequence[str] = ()) -> AsyncIterator[CoordinatorConnection]:
    """Connect at the invite's addresses, else at the address that members know. Raises CairnError."""
    from peer.coordinator_client import CoordinatorClient
    from peer.log_client import LogClient
    from peer.node.enrollment import COORDINATOR_ABSENT

    invite = parse_invite(text)
    own: list[str] = []
    async with CoordinatorClient(invite) as client:
        try:
            info = await client.get_run(attempts=1)
        except COORDINATOR_ABSENT as e:
            own = list((await follow(client, invite, via, e)).addresses)
            info = await client.get_run()
        members = tuple(dict.fromkeys([*via, *info.addresses, *invite.addresses]))
        log = LogClient(info.page, info.spec.run_id, info.spec.owner_key)
        yield CoordinatorConnection(invite, client, log, info.spec, members, (*own, *info.addresses[:1]))


async def follow(client: CoordinatorClient, invite: Invite, via: Sequence[str], why: Exception) -> CoordinatorAddress:
    """Point a client whose calls failed with `why` at the coordinator's new address, and return it.

    Members of the swarm know the address. Raises `why` if none answers, and CairnError if they know no other address.
    """
    from peer.node.coordinator_discovery import discover_run

    found = await discover_run(invite.run, [*via, *invite.addresses])
    if found is None:
        raise why
    if found.coordinator_address is None:
        raise CairnError(f"{why} ({found.members} members answer, and know of no other address)") from None
    client.moved(found.coordinator_address.body)
    return found.coordinator_address.body
