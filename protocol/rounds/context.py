"""The things that the parts of the machine share: policy, tables, the time of the step, and its actions so far.

Each part writes its own fields only. The tables in here (members, blobs, own updates, the chain) are services: a part
changes them through their methods.
"""

from __future__ import annotations

from collections.abc import Callable

from protocol.bounded import BoundedDict
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, RunId
from protocol.message_codec import Signer
from protocol.messages import Directive
from protocol.rounds.actions import Action, Notice
from protocol.rounds.blobs import BlobTracker
from protocol.rounds.deadlines import Deadlines
from protocol.rounds.members import Members
from protocol.rounds.own_updates import OwnUpdates
from protocol.rounds.policy import RoundPolicy
from protocol.rounds.report_pool import ReportPool

MAX_STANDINGS = 4096
"""Peers whose stake and work at the head are remembered."""

MAX_SYNC_PATH = 64
"""Rounds of which blobs are held before a move to another branch. If checkpoints are further apart, the driver fetches
the rest during the move."""


MAX_REPORTED = 1024
"""Maximum number of reports about peers in one round."""


class Context:
    """The things that the parts of one machine share. `deadlines` and `actions` belong to the step under way."""

    def __init__(
        self,
        policy: RoundPolicy,
        run: RunId,
        signer: Signer,
        chain: Chain,
        observer: bool,
        is_peer: bool,
        accepts_size: Callable[[int], bool],
        now: float,
        reporter: PeerKey,
    ):
        """Begin with no blob and no member. `reporter`: the key that signs this machine's work reports."""
        self.spec_policy = policy
        """The policy of the spec."""

        self.policy = policy
        """The policy of the open round: with the owner's changes."""

        self.run = run
        self.signer = signer
        self.me: PeerKey = signer.key
        self.chain = chain
        self.observer = observer
        """It follows the chain, and trains nothing. A peer that rests is one after its last update."""

        self.is_resting = False
        """The user wants the devices for a while."""

        self.is_peer = is_peer
        """It is admitted, serves blobs by commit-reveal, and ends with the run.

        The coordinator's observer is no peer. It holds blobs of decided rounds only, and serves them to all.
        """

        self.accepts_size = accepts_size
        self._standings: BoundedDict[PeerKey, tuple[int, bool]] = BoundedDict(MAX_STANDINGS)
        self._standings_at: Digest | None = None
        self.members = Members(policy, self.me, self._standing)
        self.blobs = BlobTracker(_blob_bound(policy), policy.heartbeat_seconds / 4)
        self.own = OwnUpdates(self.me)
        self.reports = ReportPool(reporter, chain)
        self.deadlines = Deadlines(now)
        self.actions: list[Action] = []
        self._neutral = Directive(run, 0)
        self._reported: set[tuple[PeerKey, str]] = set()
        """The reports about peers, by peer and kind, while the head of the chain has the height `_reported_at`."""
        self._reported_at = -1

    @property
    def now(self) -> float:
        """The time of the step, in seconds of a monotonic clock."""
        return self.deadlines.now

    def begin_step(self, now: float) -> None:
        """Start a step: no action yet, no deadline registered."""
        self.deadlines.begin(now)
        self.actions = []

    def begin_rest(self) -> None:
        """Note that the user wants the devices for a while."""
        self.is_resting = True

    def observe(self) -> None:
        """Note that the rest of this peer leaves nothing to decide: from now on it only follows."""
        self.observer = True

    def end_rest(self) -> None:
        """Note that the user gives the devices back: this peer trains again."""
        self.is_resting = self.observer = False

    def adopt_policy(self, parent: Digest) -> None:
        """Adopt the policy of the round after this record."""
        self.policy = self.spec_policy.under(self.chain.directives(parent).changes)
        self.members.adopt_policy(self.policy)
        self.blobs.grow(_blob_bound(self.policy))

    @property
    def directive(self) -> Directive:
        """The owner's newest directive, carried by a record or not; a neutral one while none is known."""
        newest = self.chain.newest_directive
        return self._neutral if newest is None else newest.body

    def is_excluded(self, key: PeerKey) -> bool:
        """Return whether a peer takes no part: it is banned, or barred after a conviction on the head's branch."""
        return self.chain.is_banned(key) or self.chain.is_barred(key, self.chain.head)

    def _standing(self, key: PeerKey) -> tuple[int, bool]:
        """Return a peer's stake at the head, and whether the chain has work of it: see `Members`."""
        chain = self.chain
        if self._standings_at != chain.head:
            self._standings_at = chain.head
            self._standings.clear()
        found = self._standings.get(key)
        if found is None:  # to find it takes many times as long as to look it up, and full tables ask for all
            found = chain.stakes(chain.head).get(key, 0), chain.next_window(key, chain.head) > 0
            self._standings[key] = found
        return found

    @property
    def is_paused(self) -> bool:
        """True when the owner wants no update of ours: the run is paused or ended, or we are banned or barred."""
        return self.directive.run_status != "running" or self.is_excluded(self.me)

    @property
    def is_run_stopped(self) -> bool:
        """True when the owner has paused or ended the run: perhaps no record follows the newest."""
        return self.directive.run_status != "running"

    def emit(self, action: Action) -> None:
        self.actions.append(action)

    def notify_copied_key(self) -> None:
        """Report a message by our own key that is not ours."""
        text = (
            "another machine uses a copy of this one's key: the two contradict each other, and the work of neither "
            "counts. Stop one of them, or start it with another home folder"
        )
        self.notify("error", "copied-key", text, self.me)

    def notify(self, level: str, kind: str, text: str, about: PeerKey | None = None) -> None:
        """Report something to a person; about one peer, only the first of each kind in a round.

        A peer could repeat a fault any number of times.
        """
        if about is not None:
            height = self.chain.height(self.chain.head)
            if height != self._reported_at:
                self._reported_at, self._reported = height, set()
            if (about, kind) in self._reported or len(self._reported) >= MAX_REPORTED:
                return
            self._reported.add((about, kind))
        self.actions.append(Notice(level, kind, text, about))


def _blob_bound(policy: RoundPolicy) -> int:
    """Return the number of blobs to remember: a path from a checkpoint to the head of another branch, and a margin."""
    return (min(policy.checkpoint_every, MAX_SYNC_PATH) + 4) * policy.max_members + 64
