"""The coordinator of an invite, wherever it has moved to: for commands that ask it once and leave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.joining import check_via
from protocol.errors import CairnError, MalformedError
from protocol.invite import Invite
from protocol.spec import RunSpec

if TYPE_CHECKING:
    from peer.coordinator_client import CoordinatorClient
    from peer.log_client import LogClient


@dataclass(frozen=True)
class Reached:
    """A coordinator that answers. `members`: multiaddresses of its swarm; `own`: those of the coordinator's observer in
    it, which is not to be asked when the coordinator itself is to be checked."""

    invite: Invite
    client: CoordinatorClient
    log: LogClient
    spec: RunSpec
    members: tuple[str, ...]
    own: tuple[str, ...]


def parsed(text: str) -> Invite:
    """Raises CairnError."""
    try:
        return Invite.parse(text)
    except MalformedError as e:
        raise CairnError(str(e)) from None


@asynccontextmanager
async def reached(text: str, via: Sequence[str] = ()) -> AsyncIterator[Reached]:
    """Asks at the invite's addresses, else members where it is now. Raises CairnError."""
    from peer.coordinator_client import CoordinatorClient
    from peer.log_client import LogClient
    from peer.node.finding import find
    from peer.node.membership import ABSENT

    invite = parsed(text)
    check_via(via)
    own: list[str] = []
    async with CoordinatorClient(invite) as client:
        try:
            info = await client.get_run(attempts=1)
        except ABSENT as e:
            found = await find(invite.run, [*via, *invite.addresses])
            if found is None:
                raise
            if found.coordinator_address is None:
                raise CairnError(f"{e} ({found.members} members answer, and know of no other address)") from None
            client.moved(found.coordinator_address.body)
            own = list(found.coordinator_address.body.addresses)
            info = await client.get_run()
        members = tuple(dict.fromkeys([*via, *info.addresses, *invite.addresses]))
        log = LogClient(info.page, info.spec.run_id, info.spec.owner_key)
        yield Reached(invite, client, log, info.spec, members, (*own, *info.addresses[:1]))
