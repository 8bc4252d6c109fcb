"""What a node does by the owner's word: its trainer rests, what it learnt on rounds that are gone goes too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from peer.channel import Orders
from peer.channel.messages import from_line, to_line
from peer.node.chainlog import ChainLog
from peer.node.obeying import Obeying, saved_epoch, words_of
from peer.store import Store
from protocol.chain import ChainLimits
from protocol.ids import Round
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import Directive, Rollback, RoundChanges
from protocol.rounds import events
from protocol.rounds.policy import RoundPolicy
from tests.support import coordinator_fakes
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.node_world import TIMERS, NodeWorld
from tests.support.specs import OWNER

SPEC = make_spec()


def machine(epoch: int = 0, **orders) -> Any:
    back = Rollback(epoch, SPEC.run_id, Round(3), state(3)) if epoch else None
    word = KeySigner(OWNER).sign(Directive(SPEC.run_id, 9, rollback=back))
    held = SimpleNamespace(
        rests=False, afresh=False, policy=RoundPolicy(8, 16), word=word.body, is_banned=lambda key: False
    )
    vars(held).update(orders)
    return cast(Any, SimpleNamespace(orders=held, chain=SimpleNamespace(newest=word)))


def test_the_trainer_is_told_what_changes_once(tmp_path):
    told: list[Orders] = []
    with Store(tmp_path, 10**9) as store:
        m = machine()
        obeying = Obeying(m, store, 32, told.append)
        obeying.follow()
        obeying.follow()
        m.orders.rests = True
        obeying.follow()
    assert told == [Orders(False, 16, 256), Orders(True, 16, 256)]
    assert from_line(to_line(told[1])) == told[1]


def test_what_was_learnt_goes_once_when_the_run_was_rolled_back_while_the_peer_was_away(tmp_path):
    folder = tmp_path / "trainer"
    (folder / "compiled").mkdir(parents=True)
    learnt = ["trainer-3.safetensors", "trainer.json", "update.json", "update-ab.blob", "dropped-ab.bits"]
    with Store(tmp_path / "store", 10**9) as store:

        def left(epoch: int) -> int:
            for name in learnt:
                (folder / name).write_text("x")
            Obeying(machine(epoch), store, 32, lambda orders: None).prepare(folder)
            return sum((folder / name).exists() for name in learnt)

        assert left(0) == len(learnt) and left(1) == 0 and left(1) == 0  # nothing was reached in between
        Obeying(machine(1, afresh=True), store, 32, lambda orders: None).reached()
        assert saved_epoch(store) == 0  # the state that it reached is of before
        Obeying(machine(1), store, 32, lambda orders: None).reached()
        assert saved_epoch(store) == 1 and left(1) == len(learnt) and left(2) == 0
        assert (folder / "compiled").exists()


def test_people_are_told_in_words():
    word = Directive(SPEC.run_id, 1, "paused", 1_700_000_000, "moving", (peer(1).key,))
    assert words_of(word, peer(1).key) == "banned by the run's owner (moving)"
    assert words_of(word, peer(2).key) == "paused by the run's owner since 2023-11-14 22:13 UTC (moving)"
    assert words_of(Directive(SPEC.run_id, 1), peer(2).key) == ""


def test_a_restart_leaves_out_the_rounds_that_were_rolled_back(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator_fakes, "state", lambda number: SPEC.genesis.name)
    chain = ChainMaker(SPEC)
    for _ in range(6):
        chain.add({1: 1})
    decoder = MessageDecoder(SPEC.run_id, SPEC.owner_key)
    limits = ChainLimits(1000, 16)
    with Store(tmp_path, 10**9) as store:
        log = ChainLog(store, decoder, SPEC)
        log.load(limits)
        for certificate in chain.certificates:
            log.keep(certificate)
        back = Rollback(1, chain.certificates[2].digest, Round(3), SPEC.genesis.name)
        word = KeySigner(OWNER).sign(Directive(SPEC.run_id, 1, rollback=back))
        log.keep_directive(word)
        loaded = ChainLog(store, decoder, SPEC).load(limits)
        assert loaded.head == back.record and loaded.newest_directive == word and len(loaded) == 3


async def test_what_a_node_fetches_and_whom_it_knows_goes_by_the_policy_of_the_open_round(tmp_path, monkeypatch):
    w = NodeWorld(tmp_path, monkeypatch, round={"target_tokens": 256, "max_update_tokens": 8192, **TIMERS})
    try:
        node = w.start("ada")
        await w.rounds(["ada"], 1)
        assert node._updates.deadline_seconds == TIMERS["exchange_seconds"]
        changes = RoundChanges(exchange_seconds=9.0, max_members=700, target_tokens=512)
        node.post(events.MessageReceived(KeySigner(OWNER).sign(Directive(w.spec.run_id, 1, changes=changes))))
        await w.until("it is in force", lambda: node.machine.orders.policy.max_members == 700)
        await w.rounds(["ada"], 1)
        assert node._updates.deadline_seconds == node._reducing.exchange_seconds == 9.0
        assert node.network.directory.limit == 700 and node.snapshot().target_tokens == 512
    finally:
        await w.close()
