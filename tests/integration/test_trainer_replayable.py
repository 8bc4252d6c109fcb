"""Replayable runs with both threads of a real trainer process, and with several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from peer.channel import (
    Applied,
    Apply,
    MakeUpdate,
    NothingDone,
    Orders,
    Progress,
    Ready,
    Stop,
    Stopped,
    TrainerLink,
    UpdateMade,
)
from peer.training.trainer import Trainer
from protocol.spec import Schedule
from tests.support.local_trainer import Heard, train, update
from tests.support.replayed_update import Claim, Replay
from tests.support.trainer_process import Node
from tests.support.trainer_world import BATCH, GENESIS, WINDOW, World, accepted_round, apply, peer_key, record_digest
from tests.support.waiting import ended

SCHEDULE = Schedule(kind="cosine", warmup_tokens=20 * BATCH * WINDOW, total_tokens=400 * BATCH * WINDOW)


@pytest.fixture
def world(tmp_path) -> World:
    torch.set_num_threads(1)  # as the trainer: sums over more threads have other bits
    return World.make(tmp_path, replayable=True, schedule=SCHEDULE)


@pytest.mark.long
async def test_updates_made_while_steps_go_on_are_those_of_a_replay_to_the_bit(world):
    rounds, accepted, rebased = [], 0, 0
    load = world.load()
    for life in range(2):
        link = await TrainerLink.start(threads=1)
        try:
            node = Node(link)
            await node.ask(world.start(1), Ready)
            await node.ask(load, Applied)
            parent = record_digest(len(rounds) - 1) if rounds else GENESIS
            for r in range(len(rounds), len(rounds) + 3):
                await node.trained(BATCH)
                made = await node.update(r, parent, world.folder / f"u{r}")
                blob = Replay(world, rounds).update(peer_key(1), Claim.of(made))
                assert blob == made.blob_path.read_bytes(), (life, r)
                rebased += made.rebase_window > made.first_window
                await node.until(Progress, lambda p, end=made.end_window: p.next_window > end)
                if r == 1:  # missed, and nothing is left of it
                    record, left_out = accepted_round(r), (made.blob_path,)
                else:
                    record, left_out = accepted_round(r, (1, made)), ()
                    accepted += made.end_window - made.first_window
                rounds.append(record)
                parent = record.record
                next_window = made.first_window if left_out else made.end_window
                await node.ask(Apply(record, left_out, next_window, accepted), Applied)
            await node.trained(BATCH)
            assert (await node.ask(Stop(), Stopped)).saved
            assert (await ended(link.wait())).code == 0
        finally:
            link.kill()
            await link.stop()
        load = replace(world.load(*rounds, next_window=next_window), accepted_windows=accepted)
    assert rebased >= 3


@pytest.mark.long
async def test_an_update_after_the_limit_was_lowered_is_made_of_what_is_trained_again(world):
    link = await TrainerLink.start(threads=1)
    try:
        node = Node(link)
        await node.ask(world.start(1), Ready)
        await node.ask(world.load(), Applied)
        await node.trained(6 * BATCH)
        await node.link.send(Orders(False, 4 * BATCH, world.spec.round.target_tokens))
        assert await node.ask(MakeUpdate(0, GENESIS, world.folder / "u"), NothingDone) == NothingDone(GENESIS)
        await node.until(Progress, lambda p: p.waiting and p.next_window == 4 * BATCH)
        made = await node.ask(MakeUpdate(0, GENESIS, world.folder / "u"), UpdateMade)
        assert made.end_window == 4 * BATCH
        assert Replay(world, []).update(peer_key(1), Claim.of(made)) == made.blob_path.read_bytes()
    finally:
        link.kill()
        await link.stop()


@pytest.mark.long
def test_updates_of_two_ranks_agree_with_a_replay_by_one_process(world):
    heard = Heard()
    ranks = Trainer(replace(world.start(1), parallel="fsdp=2"), heard)
    rounds, accepted = [], 0
    try:
        ranks.load(world.load())
        for r in range(3):
            train(ranks, 3)
            made = update(ranks, world.folder / f"u{r}")
            blob, replay = made.blob_path.read_bytes(), Replay(world, rounds)
            assert replay.agreement(blob, replay.update(peer_key(1), Claim.of(made))) >= 0.97
            train(ranks, 1)
            rounds.append(accepted_round(r, (1, made)))
            accepted += made.end_window - made.first_window
            apply(ranks, Apply(rounds[-1], (), made.end_window, accepted))
        train(ranks, 1)
        ranks.checkpointer.save_now()
        windows = ranks.windows
    finally:
        ranks.close(in_order=True)
    # The next one has one process, and takes it up.
    one = Trainer(replace(world.start(1), parallel="dp=1"), heard)
    try:
        one.load(replace(world.load(*rounds, next_window=made.end_window), accepted_windows=accepted))
        assert one.windows == windows
        train(one, 1)
        last = update(one, world.folder / "last")
        blob, replay = last.blob_path.read_bytes(), Replay(world, rounds)
        assert last.rebase_window > last.first_window
        assert replay.agreement(blob, replay.update(peer_key(1), Claim.of(last))) >= 0.97
    finally:
        one.close()
