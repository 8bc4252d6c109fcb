"""A round machine past joining, with short forms for what it receives."""

from __future__ import annotations

from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, Round, RunId, sha256
from protocol.messages import Heartbeat, RoundRecord, UpdateHeader
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import LocalStatus, RoundPolicy
from tests.simulation.signer import FakeSigner

RUN = RunId(sha256(b"run"))


STATE = Digest(sha256(b"state"))


ME = PeerKey(sha256(b"me"))


OTHERS = [PeerKey(sha256(b"other", bytes([i]))) for i in range(40)]


POLICY = RoundPolicy(
    target_windows=20, max_update_windows=50, max_seconds=100, exchange_seconds=10, propose_seconds=3,
    patience_seconds=30, heartbeat_seconds=1, member_seconds=5, max_members=8, checkpoint_every=5,
)  # fmt: skip


def blob_of(key: PeerKey, label: bytes = b"") -> Digest:
    return Digest(sha256(b"blob", key, label))


class Bench:
    """A machine at the genesis, past joining, with shorthands."""

    def __init__(self, *, observer=False, policy=POLICY, ready=True, alone=True, reporter=None):
        self.now = 0.0
        self.chain = Chain(RUN, STATE, policy.chain_limits)
        status = LocalStatus(admission=b"me")
        self.machine = RoundMachine(
            policy, RUN, FakeSigner(ME), self.chain, now=0.0, observer=observer, blob_size=9, status=status,
            report_signer=reporter,
        )  # fmt: skip
        self.actions = self.machine.start(0.0, alone=alone)
        self.note_directives()
        if ready and alone and not observer:
            self.step(ev.StateReached(self.chain.genesis, STATE))

    def step(self, event, now=None):
        self.now = self.now if now is None else now
        self.actions = self.machine.step(event, self.now)
        self.note_directives()
        return self.actions

    def note_directives(self):
        """Keep the newest of what the owner's directives mean."""
        for action in self.of(do.DirectivesChanged):
            self.directives = action

    def of(self, kind):
        return [a for a in self.actions if isinstance(a, kind)]

    def said(self, body):
        """Bodies of a type that were broadcast in the last step."""
        return [a.message.body for a in self.of(do.Broadcast) if isinstance(a.message.body, body)]

    def header(self, key, windows=10, label=b"", **changes):
        values = dict(
            run=RUN, round=Round(0), parent=self.chain.genesis, base_state=STATE, first_window=0, end_window=windows,
            inner_steps=1, blob=blob_of(key, label), blob_size=9, loss=1.0, admission=b"a",
        )  # fmt: skip
        values |= changes
        return FakeSigner(key).sign(UpdateHeader(**{"rebase_window": values["first_window"], **values}))

    def beat(self, key, *, windows=5, sequence=1, head=None, weight=0, phase="training", admission=b"a"):
        head = head or self.chain.genesis
        body = Heartbeat(RUN, sequence, Round(0), head, weight, windows, phase, 1.0, 1.0, 0, 0, (), (), admission, "")
        return self.step(ev.MessageReceived(FakeSigner(key).sign(body)))

    def announce(self, windows=25):
        """Train and announce."""
        self.step(ev.TrainingProgress(windows, 1.0, 1.0))
        assert self.of(do.RequestUpdate)
        self.step(ev.UpdateReady(self.chain.genesis, 0, 0, windows, 5, blob_of(ME), 9, 1.0))

    def hold(self, *headers):
        """Headers arrive, and their blobs are fetched."""
        for h in headers:
            self.step(ev.MessageReceived(h))
        for h in headers:
            self.step(ev.BlobHeld(h.body.blob, h.author))

    def record(self, by, headers, attempt=0):
        updates = tuple(sorted(headers, key=lambda h: h.author))
        weights = self.chain.weights(self.chain.genesis, updates)
        body = RoundRecord(RUN, Round(0), self.chain.genesis, STATE, attempt, updates, weights=weights)
        return FakeSigner(by).sign(body)

    @property
    def mine(self):
        return next(h for h in self.machine.summary(self.now).headers if h.author == ME)
