"""Own updates: which the chain has, and which must go back into the error feedback.

The rule that keeps work from being lost or counted twice: the trainer's error feedback holds what an own update
carried exactly when that update is neither on the chain of the trainer's state nor still undecided on it.
"""

from __future__ import annotations

from collections import OrderedDict

from protocol.chain import Chain
from protocol.ids import Digest, PeerKey

REMEMBERED = 256


class OwnUpdates:
    """The newest own updates, on whatever branch. Older ones are settled for good."""

    def __init__(self, me: PeerKey):
        self._me = me
        self._updates: OrderedDict[Digest, list] = OrderedDict()
        """blob -> [parent, height of the parent, whether the feedback holds what it carried]"""

        self._moving: dict[Digest, bool] = {}

    def made(self, blob: Digest, parent: Digest, height: int) -> None:
        """The trainer took this much out of its feedback for the round after `parent`."""
        if blob not in self._updates:
            self._updates[blob] = [parent, height, False]
            while len(self._updates) > REMEMBERED:
                self._updates.popitem(last=False)

    def forget_all(self) -> None:
        """The trainer begins anew: nothing of its updates is in its feedback, and nothing goes back into it."""
        self._updates.clear()
        self._moving = {}

    def __contains__(self, blob: object) -> bool:
        return blob in self._updates

    def recall(self, chain: Chain) -> None:
        """After a restart: own updates that the chain has accepted lately."""
        height = chain.height(chain.head)
        for h in range(max(chain.height(chain.root), height - REMEMBERED) + 1, height + 1):
            record = chain.on_main(h)
            if record is not None:
                self._seen_in(chain, record)

    def _seen_in(self, chain: Chain, record: Digest) -> Digest | None:
        """The own blob in a record, if one."""
        for u in chain.certificate(record).record.body.updates:
            if u.author == self._me:
                self.made(u.body.blob, u.body.parent, u.body.round)
                return u.body.blob
        return None

    def settle(self, chain: Chain, after: Digest, to: Digest) -> tuple[tuple[Digest, ...], tuple[Digest, ...]]:
        """For a move of the trainer to the state after `to`, by the records after `after`: what it must put back into
        its feedback (`missed`), and what it must take out again because this chain has it after all (`regained`).

        The move counts when `moved` is called; until then the same is found again.
        """
        for certificate in chain.path(after, to):
            self._seen_in(chain, certificate.digest)
        missed: list[Digest] = []
        regained: list[Digest] = []
        self._moving = {}
        for blob, (parent, height, back) in self._updates.items():
            if parent == to or height < chain.height(chain.root):
                continue
            record = chain.ancestor_at(to, height + 1)
            accepted = (
                record is not None
                and record != chain.root
                and any(u.body.blob == blob for u in chain.certificate(record).record.body.updates)
            )
            if accepted and back:
                regained.append(blob)
            elif not accepted and not back:
                missed.append(blob)
            self._moving[blob] = not accepted
        return tuple(missed), tuple(regained)

    def moved(self) -> None:
        """The trainer did what `settle` said."""
        for blob, back in self._moving.items():
            if blob in self._updates:
                self._updates[blob][2] = back
        self._moving = {}

    def sizes(self) -> dict[str, tuple[int, int]]:
        """What is held, and its bound."""
        return {"own updates": (len(self._updates), REMEMBERED)}
