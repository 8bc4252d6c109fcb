"""Finds the way into a run whose coordinator does not answer: by any member whose address is known."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from peer.coordinator_client import usable_addresses
from protocol.coordinator_address import newest_of, open_coordinator_address
from protocol.errors import CairnError
from protocol.ids import PeerKey, RunId
from protocol.messages import Signed
from protocol.spec import RunSpec, open_spec
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("peer.finding")


@dataclass(frozen=True, slots=True)
class Found:
    """What members said, verified: the signed spec, the owner's newest word on where the coordinator is (None: they
    know of none), and where the swarm is entered. `members`: how many answered."""

    sent: bytes
    coordinator_address: Signed[Any] | None
    addresses: tuple[str, ...]
    members: int


async def find(run: RunId, addresses: Iterable[str]) -> Found | None:
    """Ask the members at these addresses. None when nobody there gives the run's spec. Raises SwarmStartError."""
    from peer.swarm.anonymous import ask_for_coordinator  # it loads hivemind and torch, which most do not need

    answers = _Answers(run)
    members = await ask_for_coordinator(run, addresses, answers.take)
    if answers.spec is None:
        return None
    return Found(answers.sent, newest_of(answers.words), tuple(answers.addresses), members)


class _Answers:
    def __init__(self, run: RunId):
        self._run = run
        self.sent = b""
        self.spec: RunSpec | None = None
        self.words: list[Signed[Any]] = []
        self.addresses: list[str] = []

    def take(self, member: PeerKey, reply: wire.CoordinatorAddressReply) -> bool:
        """Whether this is what an honest member answers: the spec is the run's, and all else is checked by it."""
        try:
            if self.spec is None or reply.spec != self.sent:
                spec = open_spec(reply.spec, self._run)
                self.sent, self.spec = self.sent or reply.spec, self.spec or spec
            if reply.coordinator_address:
                self.words.append(open_coordinator_address(reply.coordinator_address, self._run, self.spec.owner_key))
        except CairnError as e:
            log.warning("what %s says of the coordinator is refused: %s", member.short, e)
            return False
        self.addresses += [a for a in usable_addresses(reply.addresses) if a not in self.addresses]
        return True
