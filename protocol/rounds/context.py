"""What the parts of the machine share: the run's policy, the tables, the time of the step, and the actions so far."""

from __future__ import annotations

from collections.abc import Callable

from protocol.chain import Chain
from protocol.ids import PeerKey, RunId
from protocol.messages import Signer
from protocol.rounds.actions import Action, Report
from protocol.rounds.blobs import Blobs
from protocol.rounds.members import Members
from protocol.rounds.own import OwnUpdates
from protocol.rounds.policy import Policy


class Context:
    """One per machine. `now` and `out` belong to the step that is under way."""

    def __init__(
        self, policy: Policy, run: RunId, signer: Signer, chain: Chain, observer: bool, size_ok: Callable[[int], bool]
    ):
        self.policy = policy
        self.run = run
        self.signer = signer
        self.me: PeerKey = signer.key
        self.chain = chain
        self.observer = observer
        self.size_ok = size_ok
        self.members = Members(policy, self.me)
        self.blobs = Blobs(4 * policy.max_members + 64, policy.heartbeat_seconds / 4)
        self.own = OwnUpdates(self.me)
        self.now = 0.0
        self.out: list[Action] = []

    def emit(self, action: Action) -> None:
        self.out.append(action)

    def report(self, level: str, kind: str, text: str, about: PeerKey | None = None) -> None:
        self.out.append(Report(level, kind, text, about))
