"""The blobs that a member keeps: enough for itself and for others, and no more."""

from __future__ import annotations

from dataclasses import replace

from protocol.chain import Chain
from protocol.ids import Digest
from protocol.message_codec import KeySigner
from protocol.messages import Certificate, Finalization
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import RoundPolicy
from protocol.rounds.retention import retained
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.specs import OWNER

SPEC = make_spec(genesis={"digest": state(0).hex(), "size": 524_288})  # a checkpoint every 5 rounds
POLICY = RoundPolicy.of(SPEC)
KEEP = SPEC.checkpoint.keep


def made(rounds: int) -> tuple[list[Certificate], Chain]:
    maker, chain = ChainMaker(SPEC), Chain(SPEC.run_id, SPEC.genesis.name, POLICY.chain_limits)
    maker.weighs = True
    for _ in range(rounds):
        maker.add({1: 2, 2: 3})
    for c in maker.certificates:
        chain.add(c)
    return maker.certificates, chain


def blobs(certificate: Certificate) -> set[Digest]:
    return {u.body.blob for u in certificate.record.body.updates}


def test_kept_are_the_last_checkpoints_and_every_update_since_the_oldest_of_them():
    certificates, chain = made(5 * (KEEP + 3) + 2)
    keep = retained(POLICY, chain)
    marks = [c for c in certificates if c.record.body.round % 5 == 0][-(KEEP + 1) :]
    assert {c.record.body.base_state for c in marks} <= keep
    oldest = marks[0].record.body.round
    assert all((blobs(c) <= keep) == (c.record.body.round >= oldest) for c in certificates)
    assert state(oldest - 5) not in keep


def test_of_a_young_run_nothing_is_dropped():
    certificates, chain = made(7)
    assert set.union(*map(blobs, certificates)) <= retained(POLICY, chain)


def test_own_updates_stay_until_they_are_finalized_after_a_restart_too():
    certificates, chain = made(5 * (KEEP + 4))
    old, me = certificates[1].record, peer(1)
    mine = next(u.body.blob for u in old.body.updates if u.author == me.key)
    theirs = next(u.body.blob for u in old.body.updates if u.author != me.key)
    machine = RoundMachine(POLICY, SPEC.run_id, KeySigner(me), chain, now=0.0)
    machine.start(0.0)
    assert mine in machine.retained_blobs() and theirs not in machine.retained_blobs()
    chain.add_finalization(KeySigner(OWNER).sign(Finalization(SPEC.run_id, old.body.round, old.digest)))
    assert mine not in machine.retained_blobs()


def test_a_peer_starts_though_its_tree_has_dropped_the_newest_finalized_record():
    certificates, _ = made(8)
    limits = replace(POLICY.chain_limits, min_main_records=1, max_records=2)
    chain = Chain(SPEC.run_id, SPEC.genesis.name, limits)
    first = certificates[0].record
    for c in certificates:
        chain.add(c)
        if c is certificates[0]:
            chain.add_finalization(KeySigner(OWNER).sign(Finalization(SPEC.run_id, first.body.round, first.digest)))
    assert chain.required_ancestor == first.digest and first.digest not in chain
    machine = RoundMachine(POLICY, SPEC.run_id, KeySigner(peer(1)), chain, now=0.0)
    assert machine.start(0.0, alone=True)
    assert chain.head == certificates[-1].record.digest
