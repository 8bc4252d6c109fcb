"""A machine of three members at the start of its second round, after a first round that took long."""

from __future__ import annotations

from protocol.ids import Digest, Round, sha256
from protocol.messages import RoundRecord
from protocol.rounds import events as ev
from protocol.rounds.policy import RoundPolicy
from tests.simulation.signer import FakeSigner, certificate
from tests.support.rounds_bench import ME, OTHERS, POLICY, RUN, Bench, blob_of

NEXT = Digest(sha256(b"next"))


LASTED = 6.0
"""Seconds that the first round takes."""


BUSY, SLOW = OTHERS[:2]


class Second(Bench):
    """The first round, of three, took `lasted` seconds; the second begins."""

    def __init__(self, lasted: float = LASTED, policy: RoundPolicy = POLICY):
        super().__init__(policy=policy)
        self.beats = 1
        for key in (BUSY, SLOW):
            self.beat(key)
        self.announce()
        headers = [self.header(BUSY), self.header(SLOW)]
        self.hold(*headers)
        first = certificate(self.record(BUSY, [self.mine, *headers]), [BUSY, SLOW, ME])
        self.step(ev.CertificateReceived(first, BUSY), lasted)
        self.first = self.chain.head
        self.step(ev.StateReached(self.first, NEXT))

    def say(self, key, head, windows=5):
        self.beats += 1
        self.beat(key, windows=windows, sequence=self.beats, head=head, weight=45)

    def announced(self):
        """We, and the busy one, whose update is here."""
        self.hold(self.header(BUSY, label=b"2", **self.work(10)))
        self.step(ev.TrainingProgress(25, 1.0, 1.0))
        self.step(ev.UpdateReady(self.first, 25, 25, 50, 5, blob_of(ME, b"2"), 9, 1.0))

    def work(self, first_window):
        """Return the fields of a header of the second round with ten windows."""
        return dict(
            round=Round(1), parent=self.first, base_state=NEXT, first_window=first_window, end_window=first_window + 10
        )

    def next_record(self, by, headers):
        """Receive the certificate of a second record, and all its blobs; return its digest."""
        updates = tuple(sorted(headers, key=lambda h: h.author))
        weights = self.chain.weights(self.first, updates)
        record = FakeSigner(by).sign(RoundRecord(RUN, Round(1), self.first, NEXT, 0, updates, weights=weights))
        self.step(ev.CertificateReceived(certificate(record, [h.author for h in updates]), by))
        for h in updates:
            self.step(ev.BlobHeld(h.body.blob, h.author))
        return self.chain.head

    def waits_until(self, last=30.0):
        """Return the time from which nobody is waited for; both others keep sending the same heartbeats."""
        for tenth in range(int(10 * self.now) + 1, int(10 * last)):
            if tenth % 10 == 0:
                self.say(BUSY, self.first)
                self.say(SLOW, *self.slow)
            self.step(ev.Tick(), tenth / 10)
            if not self.machine.summary(self.now).awaited:
                return self.now
        return None
