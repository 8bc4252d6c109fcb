"""What an observer heard announced: the updates that a round may leave out, for the receipts of their authors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from coordinator.swarm import AnnouncedUpdate
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey
from protocol.messages import Signed, UpdateHeader
from protocol.rounds.ballot import Ballot
from protocol.rounds.policy import Policy

PER_AUTHOR = 8
"""Rounds of an author that are remembered: one that announces nonsense pushes out its own headers only."""

AUTHORS = 8192


class Announcements:
    """The newest headers of each author, the first for each parent, and whether each came in time."""

    def __init__(self, chain: Chain, policy: Policy, size_ok: Callable[[int], bool]):
        """`size_ok`: whether an update of the run's codec may measure so many bytes."""
        self._chain = chain
        self._policy = policy
        self._size_ok = size_ok
        self._heard: OrderedDict[PeerKey, OrderedDict[Digest, tuple[Signed[UpdateHeader], bool]]] = OrderedDict()

    def hear(self, message: Signed) -> None:
        """Any message that the node has verified; all but headers are let pass."""
        if not isinstance(message.body, UpdateHeader):
            return
        mine = self._heard.pop(message.author, OrderedDict())
        self._heard[message.author] = mine
        if len(self._heard) > AUTHORS:
            self._heard.popitem(last=False)
        parent = message.body.parent
        if parent not in mine:
            mine[parent] = (message, self._is_decided(parent))
            if len(mine) > PER_AUTHOR:
                mine.popitem(last=False)

    def announced(self, parent: Digest) -> Sequence[AnnouncedUpdate]:
        """The updates of the round after a record, by ascending key of their authors."""
        heard = [mine[parent] for mine in self._heard.values() if parent in mine]
        if not heard or parent not in self._chain:
            return ()
        policy = self._policy.under(self._chain.standing(parent).changes)
        ballot = Ballot(policy, self._chain, parent, None, 0.0)
        found = [AnnouncedUpdate(header, late, ballot.flaw(header, self._size_ok) or "") for header, late in heard]
        return sorted(found, key=lambda a: a.header.author)

    def _is_decided(self, parent: Digest) -> bool:
        """Whether a record with this parent is on the chain already."""
        chain = self._chain
        if parent not in chain:
            return False
        height = chain.height(parent)
        return chain.on_main(height) == parent and chain.on_main(height + 1) is not None
