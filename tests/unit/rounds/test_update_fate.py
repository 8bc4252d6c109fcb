"""A volunteer reads whether the last update was accepted, and if not, why."""

from __future__ import annotations

from protocol.ids import Digest, Round, sha256
from protocol.rounds import events as ev
from protocol.rounds.update_fate import UpdateFate
from tests.simulation.signer import certificate
from tests.support.rounds_bench import ME, OTHERS, POLICY, Bench, blob_of

NEXT = Digest(sha256(b"next"))


def without_us(b):
    return b.record(OTHERS[0], [b.header(OTHERS[0])])


def decided_without_us(b):
    """Certify the other peer's record, and apply it once our patience is over."""
    record = without_us(b)
    b.step(ev.CertificateReceived(certificate(record, OTHERS[:1]), OTHERS[0]))
    b.step(ev.BlobHeld(blob_of(OTHERS[0]), OTHERS[0]))
    b.step(ev.Tick(), b.now + 2 * POLICY.patience_seconds)
    b.step(ev.StateReached(record.digest, NEXT))
    assert b.machine.summary(b.now).round == 1


def fate(b: Bench) -> UpdateFate | None:
    return b.machine.summary(b.now).fate


def test_an_accepted_update_is_told_once_its_round_is_decided():
    b = Bench()
    assert fate(b) is None
    b.beat(OTHERS[0])
    b.announce()
    assert fate(b) == UpdateFate(Round(0))
    b = Bench()
    b.announce()
    b.step(ev.StateReached(b.chain.head, NEXT))
    assert fate(b) == UpdateFate(Round(0), True)


def test_an_update_announced_after_the_record_was_proposed_was_late():
    b = Bench()
    b.beat(OTHERS[0])
    b.step(ev.TrainingProgress(25, 1.0, 1.0))
    b.step(ev.MessageReceived(without_us(b)), 2)
    b.step(ev.UpdateReady(b.chain.genesis, 0, 0, 25, 5, blob_of(ME), 9, 1.0), 3.5)
    decided_without_us(b)
    assert fate(b) == UpdateFate(Round(0), False, "announced 1.5 s after the record was proposed")


def test_an_update_announced_in_time_was_not_fetched():
    b = Bench()
    b.beat(OTHERS[0])
    b.announce()
    b.step(ev.MessageReceived(without_us(b)), 2)
    decided_without_us(b)
    said = fate(b)
    assert said is not None and said.accepted is False
    assert said.reason == "too few had fetched it when the record was proposed, 2.0 s after it was announced"


def test_without_the_proposal_no_reason_is_invented():
    b = Bench()
    b.beat(OTHERS[0])
    b.announce()
    decided_without_us(b)
    assert fate(b) == UpdateFate(Round(0), False, "the others decided the round without it")


def test_the_time_limit_of_a_round_is_told_while_it_is_trained():
    b = Bench()
    b.step(ev.TrainingProgress(3, 1.0, 1.0), 10)
    assert b.machine.summary(40).seconds_left == 60
    b.beat(OTHERS[0])
    b.announce()
    assert b.machine.summary(40).seconds_left is None
