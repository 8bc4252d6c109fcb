"""Announced updates that an observer received, for the receipts of authors whose update a round left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.swarm import AnnouncedUpdate
from protocol.bounded import BoundedDict
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey
from protocol.messages import Signed, UpdateHeader
from protocol.rounds.policy import RoundPolicy
from protocol.rounds.round_state import RoundState

PER_AUTHOR = 8
"""Rounds remembered for each author; an author that floods pushes out its own headers only."""

AUTHORS = 8192
"""Authors remembered."""


class Announcements:
    """The newest update headers of each author: the first for each parent, and whether it came in time."""

    def __init__(self, chain: Chain, policy: RoundPolicy, accepts_size: Callable[[int], bool]):
        """`accepts_size` says if a number of bytes is a possible size of an update of the run's codec."""
        self._chain = chain
        self._policy = policy
        self._size_ok = accepts_size
        self._headers: BoundedDict[PeerKey, BoundedDict[Digest, tuple[Signed[UpdateHeader], bool]]] = BoundedDict(
            AUTHORS
        )

    def receive(self, message: Signed) -> None:
        """Remember a verified message if it is an update header, and ignore any other."""
        if not isinstance(message.body, UpdateHeader):
            return
        mine = self._headers.get(message.author, BoundedDict(PER_AUTHOR))
        self._headers.renew(message.author, mine)
        parent = message.body.parent
        if parent not in mine:
            mine[parent] = (message, self._is_decided(parent))

    def announced(self, parent: Digest) -> Sequence[AnnouncedUpdate]:
        """Return the announced updates of the round after a record, by ascending key of their authors."""
        received = [mine[parent] for mine in self._headers.values() if parent in mine]
        if not received or parent not in self._chain:
            return ()
        policy = self._policy.under(self._chain.directives(parent).changes)
        state = RoundState(policy, self._chain, parent, None, 0.0)
        found = [
            AnnouncedUpdate(header, late, state.header_refusal(header, self._size_ok) or "")
            for header, late in received
        ]
        return sorted(found, key=lambda a: a.header.author)

    def _is_decided(self, parent: Digest) -> bool:
        """Return whether a record with this parent is on the chain already."""
        chain = self._chain
        if parent not in chain:
            return False
        height = chain.height(parent)
        return chain.main_chain_at(height) == parent and chain.main_chain_at(height + 1) is not None
