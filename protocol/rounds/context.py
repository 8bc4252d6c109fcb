"""What the parts of the machine share: the run's policy, the tables, the time of the step, and the actions so far."""

from __future__ import annotations

from collections.abc import Callable

from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, RunId
from protocol.message_codec import Signer
from protocol.messages import Directive, Signed
from protocol.rounds.actions import Action, Report
from protocol.rounds.blobs import Blobs
from protocol.rounds.members import Members
from protocol.rounds.own import OwnUpdates
from protocol.rounds.policy import Policy

MAX_WAY = 64
"""Rounds of whose blobs are held before a move to another branch: where checkpoints are further apart, the driver
fetches the others on the way."""


class Context:
    """One per machine. `now` and `out` belong to the step that is under way."""

    def __init__(
        self, policy: Policy, run: RunId, signer: Signer, chain: Chain, observer: bool, size_ok: Callable[[int], bool]
    ):
        self.base = policy
        """As in the spec."""
        self.policy = policy
        """As in the open round: with what the owner has changed."""
        self.run = run
        self.signer = signer
        self.me: PeerKey = signer.key
        self.chain = chain
        self.observer = observer
        self.size_ok = size_ok
        self.members = Members(policy, self.me)
        self.blobs = Blobs(_blobs_of(policy), policy.heartbeat_seconds / 4)
        self.own = OwnUpdates(self.me)
        self.now = 0.0
        self._banned: frozenset[PeerKey] = frozenset()
        self._banned_by: Signed[Directive] | None = None
        self.out: list[Action] = []

    def govern(self, parent: Digest) -> None:
        """From now on the policy of the round after this record holds."""
        self.policy = self.base.under(self.chain.standing(parent).changes)
        self.members.govern(self.policy)
        self.blobs.grow(_blobs_of(self.policy))

    @property
    def word(self) -> Directive:
        """The owner's newest, whether or not a record carries it; one that changes nothing while none is known."""
        newest = self.chain.newest
        return Directive(self.run, 0) if newest is None else newest.body

    def is_banned(self, key: PeerKey) -> bool:
        """By the owner's newest word: rounds whose records do not carry it yet may still list its updates."""
        newest = self.chain.newest
        if newest is not self._banned_by:
            self._banned_by, self._banned = newest, frozenset(() if newest is None else newest.body.banned)
        return key in self._banned

    @property
    def rests(self) -> bool:
        """Whether the owner wants no update of ours."""
        return self.word.order != "running" or self.is_banned(self.me)

    def emit(self, action: Action) -> None:
        self.out.append(action)

    def report(self, level: str, kind: str, text: str, about: PeerKey | None = None) -> None:
        self.out.append(Report(level, kind, text, about))


def _blobs_of(policy: Policy) -> int:
    """How many blobs there is room for: those of the way from a checkpoint to the head of another branch, and some."""
    return (min(policy.checkpoint_every, MAX_WAY) + 4) * policy.max_members + 64
