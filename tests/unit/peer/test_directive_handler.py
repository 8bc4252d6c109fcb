"""A node follows the owner's directives: its trainer rests, and what it learnt on rounds that are gone goes too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from peer.channel import Orders
from peer.channel.messages import from_line, to_line
from peer.node.chain_store import ChainStore
from peer.node.directive_handler import DirectiveHandler, describe
from peer.node.trainer_files import remove_outdated_state, saved_epoch, store_epoch
from peer.store import Store
from protocol.chain import ChainLimits
from protocol.ids import Round
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import Directive, Rollback, RoundChanges
from protocol.rounds import events
from protocol.rounds.actions import DirectivesChanged
from protocol.rounds.policy import RoundPolicy
from tests.support import coordinator_fakes
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.node_world import TIMERS, NodeWorld
from tests.support.specs import OWNER

SPEC = make_spec()


class Trainer:
    def __init__(self):
        self.told: list[Orders] = []

    def order(self, orders: Orders) -> None:
        self.told.append(orders)


class User:
    def __init__(self):
        self.policies: list[RoundPolicy] = []

    def apply_policy(self, policy: RoundPolicy) -> None:
        self.policies.append(policy)


def test_the_trainer_and_the_users_of_the_policy_are_told_what_changes_once():
    trainer, user, policy = Trainer(), User(), RoundPolicy(8, 16)
    handler = DirectiveHandler(peer(1).key, 32, trainer, [user])
    running = Directive(SPEC.run_id, 1)
    handler.handle(DirectivesChanged(running, False, policy))
    handler.handle(DirectivesChanged(running, False, policy))
    handler.handle(DirectivesChanged(Directive(SPEC.run_id, 2, "paused"), True, policy))
    assert trainer.told == [Orders(False, 16, 256), Orders(True, 16, 256)] and user.policies == [policy]
    assert from_line(to_line(trainer.told[1])) == trainer.told[1]
    assert handler.description == "paused by the run's owner" and handler.target_tokens == 256


def test_a_barred_peer_says_so_and_until_when():
    handler = DirectiveHandler(peer(1).key, 32, trainer := Trainer(), [])
    running = Directive(SPEC.run_id, 1)
    handler.handle(DirectivesChanged(running, True, RoundPolicy(8, 16), Round(71)))
    assert trainer.told == [Orders(True, 16, 256)]
    assert "convicted by an audit, barred until round 71" in handler.description
    handler.handle(DirectivesChanged(running, False, RoundPolicy(8, 16)))
    assert handler.description == ""


def test_what_was_learnt_goes_once_when_the_run_was_rolled_back_while_the_peer_was_away(tmp_path):
    folder = tmp_path / "trainer"
    (folder / "compiled").mkdir(parents=True)
    learnt = ["trainer-3.safetensors", "trainer.json", "update.json", "update-ab.blob", "dropped-ab.bits"]
    with Store(tmp_path / "store", 10**9) as store:

        def left(epoch: int) -> int:
            for name in learnt:
                (folder / name).write_text("x")
            back = Rollback(epoch, SPEC.run_id, Round(3), state(3)) if epoch else None
            newest = KeySigner(OWNER).sign(Directive(SPEC.run_id, 9, rollback=back))
            remove_outdated_state(store, cast(Any, SimpleNamespace(newest_directive=newest)), folder)
            return sum((folder / name).exists() for name in learnt)

        assert left(0) == len(learnt) and left(1) == 0 and left(1) == 0  # nothing was reached in between
        store_epoch(store, 1)
        assert saved_epoch(store) == 1 and left(1) == len(learnt) and left(2) == 0
        assert (folder / "compiled").exists()


def test_people_are_told_in_words():
    word = Directive(SPEC.run_id, 1, "paused", 1_700_000_000, "moving", (peer(1).key,))
    assert describe(word, peer(1).key) == "banned by the run's owner (moving)"
    assert describe(word, peer(2).key) == "paused by the run's owner since 2023-11-14 22:13 UTC (moving)"
    assert describe(Directive(SPEC.run_id, 1), peer(2).key) == ""


def test_a_restart_leaves_out_the_rounds_that_were_rolled_back(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator_fakes, "state", lambda number: SPEC.genesis.name)
    chain = ChainMaker(SPEC)
    for _ in range(6):
        chain.add({1: 1})
    decoder = MessageDecoder(SPEC.run_id, SPEC.owner_key)
    limits = ChainLimits(1000, 16)
    with Store(tmp_path, 10**9) as store:
        log = ChainStore(store, decoder, SPEC, limits)
        for certificate in chain.certificates:
            log.store(certificate)
        back = Rollback(1, chain.certificates[2].digest, Round(3), SPEC.genesis.name)
        word = KeySigner(OWNER).sign(Directive(SPEC.run_id, 1, rollback=back))
        log.store_directive(word)
        loaded = ChainStore(store, decoder, SPEC, limits).chain
        assert loaded.head == back.record and loaded.newest_directive == word and len(loaded) == 3


async def test_the_policy_of_the_open_round_reaches_the_node(tmp_path):
    w = NodeWorld(tmp_path, round={"target_tokens": 256, "max_update_tokens": 8192, **TIMERS})
    try:
        node = w.start("ada")
        await w.rounds(["ada"], 1)
        assert node.network.peers.limit == w.spec.round.max_members
        changes = RoundChanges(exchange_seconds=9.0, max_members=700, target_tokens=512)
        node.post(events.MessageReceived(KeySigner(OWNER).sign(Directive(w.spec.run_id, 1, changes=changes))))
        await w.until("it is in force", lambda: node.network.peers.limit == 700)
        assert node.snapshot().target_tokens == 512
    finally:
        await w.close()
