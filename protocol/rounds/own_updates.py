"""Own updates: those that the chain has, and those that must return to the error feedback.

One rule keeps work from being lost or counted twice. The error feedback holds an update's content if and only if the
chain of the trainer's state has not accepted it and its round there is decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from protocol.bounded import BoundedDict
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey

MAX_OWN_UPDATES = 256
"""Own updates to remember. Older ones are decided for good."""


@dataclass(slots=True)
class _OwnUpdate:
    parent: Digest
    height: int
    """Height of the parent."""

    in_feedback: bool
    """The error feedback holds its content."""


class OwnUpdates:
    """The newest updates of this peer, on any branch, and whether its error feedback holds their content."""

    def __init__(self, me: PeerKey):
        self._me = me
        self._updates: BoundedDict[Digest, _OwnUpdate] = BoundedDict(MAX_OWN_UPDATES)
        self._moving: dict[Digest, bool] = {}
        """Of the move under way: whether the feedback holds each update's content afterwards."""

    def made(self, blob: Digest, parent: Digest, height: int) -> None:
        """Note that the trainer took an update's content out of its feedback for the round after `parent`."""
        if blob not in self._updates:
            self._updates[blob] = _OwnUpdate(parent, height, False)

    def forget_all(self) -> None:
        """Forget all updates: the trainer starts from scratch, so nothing of them returns to its feedback."""
        self._updates.clear()
        self._moving = {}

    def __contains__(self, blob: object) -> bool:
        return blob in self._updates

    def since(self, height: int) -> Iterator[Digest]:
        """Yield the blobs of updates for rounds at this height or later."""
        return (blob for blob, update in self._updates.items() if update.height >= height)

    def recall(self, chain: Chain) -> None:
        """Note, after a restart, the own updates that the chain has accepted lately."""
        height = chain.height(chain.head)
        for h in range(max(chain.height(chain.root), height - MAX_OWN_UPDATES) + 1, height + 1):
            record = chain.main_chain_at(h)
            if record is not None:
                self._note_in(chain, record)

    def _note_in(self, chain: Chain, record: Digest) -> None:
        for u in chain.certificate(record).record.body.updates:
            if u.author == self._me:
                self.made(u.body.blob, u.body.parent, u.body.round)
                return

    def plan_move(self, chain: Chain, after: Digest, to: Digest) -> tuple[tuple[Digest, ...], tuple[Digest, ...]]:
        """Return the blobs that a move of the trainer to the state after `to` must put back, and those to take out.

        `missed` returns to the feedback; `regained` is taken out again, because this chain has it after all. `after` is
        the record where the move starts. The move counts when `moved` is called; until then the result is the same.
        """
        for certificate in chain.path(after, to):
            self._note_in(chain, certificate.digest)
        missed: list[Digest] = []
        regained: list[Digest] = []
        self._moving = {}
        for blob, update in self._updates.items():
            if update.parent == to or update.height < chain.height(chain.root):
                continue
            record = chain.ancestor_at(to, update.height + 1)
            accepted = (
                record is not None
                and record != chain.root
                and any(
                    (u.author, u.body.blob) == (self._me, blob) for u in chain.certificate(record).record.body.updates
                )
            )
            if accepted and update.in_feedback:
                regained.append(blob)
            elif not accepted and not update.in_feedback:
                missed.append(blob)
            self._moving[blob] = not accepted
        return tuple(missed), tuple(regained)

    def moved(self) -> None:
        """Note that the trainer did what the last result of `plan_move` says."""
        for blob, in_feedback in self._moving.items():
            if blob in self._updates:
                self._updates[blob].in_feedback = in_feedback
        self._moving = {}

    def sizes(self) -> dict[str, tuple[int, int]]:
        return {"own updates": (len(self._updates), MAX_OWN_UPDATES)}
