"""A real trainer process, through its channel: a whole life, a death, a restart, and what cannot be done."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from peer.channel import (
    Applied,
    Apply,
    DataUnavailable,
    Failed,
    MakeUpdate,
    Note,
    NothingDone,
    Progress,
    Ready,
    Start,
    Stop,
    Stopped,
    TrainerLink,
    WriteCheckpoint,
)
from peer.training.saved_state import STATE_MANIFEST
from protocol.ids import Digest
from protocol.merkle import blob_digest
from tests.support.trainer_process import Node
from tests.support.trainer_world import BATCH, GENESIS, World, accepted_round, record_digest
from tests.support.waiting import LIMIT, ended


@asynccontextmanager
async def node(start: Start | None = None) -> AsyncIterator[Node]:
    link = await TrainerLink.start(threads=1)
    try:
        made = Node(link)
        if start is not None:
            await made.ask(start, Ready)
        yield made
    finally:
        link.kill()
        await link.stop()


def shares_of(progress: Progress) -> dict[str, float]:
    assert progress.spent is not None
    return asdict(progress.spent)


@pytest.fixture
def world(tmp_path) -> World:
    return World.make(tmp_path)


async def test_a_trainers_life_from_start_to_stop_and_a_second_one(world):
    async with node(world.start(1)) as n:
        ready = n.heard[-1]
        assert isinstance(ready, Ready) and ready.parameters == world.spec.model.layout.numel
        loaded = await n.ask(world.load(), Applied)
        assert (loaded.record, loaded.state_digest) == (GENESIS, world.spec.genesis.name)
        progress = await n.trained(5 * BATCH)
        assert progress.loss > 0 and progress.tokens_per_second > 0
        assert not progress.waiting or progress.windows == 40 * BATCH  # as many as an update may claim
        assert progress.mfu is None  # of a CPU
        assert progress.memory is None or 10**7 < progress.memory.used < progress.memory.whole
        assert progress.trained == progress.next_window == progress.windows
        shares = shares_of(progress)
        assert sum(shares.values()) == pytest.approx(1) and shares["training"] > 0 and shares["applying"] > 0
        for stray in (signal.SIGTERM, signal.SIGINT):
            os.kill(n.link.pid, stray)  # those are for the node

        out = world.folder / "u0"
        made = await n.update(0, GENESIS, out)
        assert made.blob_path == out and blob_digest(out.read_bytes()) == made.digest
        assert made.first_window == 0 and made.end_window >= 5 * BATCH and made.inner_steps == made.end_window // BATCH
        await n.trained(2 * BATCH)  # goes on while the update travels
        checkpoint = world.folder / "state-1"
        apply = Apply(accepted_round(0, (1, made)), (), made.end_window, made.end_window, checkpoint)
        applied = await n.ask(apply, Applied)
        assert applied.record == record_digest(0) and applied.state_digest != loaded.state_digest
        assert applied.checkpoint_path == checkpoint
        assert blob_digest(checkpoint.read_bytes()) == applied.state_digest
        written = await n.ask(WriteCheckpoint(world.folder / "held"), Applied)
        assert (written.record, written.state_digest) == (applied.record, applied.state_digest)
        assert (world.folder / "held").read_bytes() == checkpoint.read_bytes()
        await n.until(Progress, lambda p: p.waiting and shares_of(p)["waiting"] > 0.1)
        await n.trained(8 * BATCH)
        assert (await n.ask(Stop(), Stopped)).saved
        gone = await ended(n.link.wait())
        assert gone.code == 0
        assert not any(isinstance(m, Note) for m in n.heard)

    async with node(world.start(1)) as n:
        load = world.load(accepted_round(0, (1, made)), next_window=made.end_window)
        assert (await n.ask(load, Applied)).state_digest == applied.state_digest
        again = await n.update(1, record_digest(0), world.folder / "u1")
        assert again.first_window == made.end_window and again.end_window >= made.end_window + 8 * BATCH
        progress = await n.trained(BATCH)
        assert 0 < progress.trained <= progress.next_window - 8 * BATCH  # in this life, and of all


@pytest.mark.long
@pytest.mark.parametrize("saved", [False, True])
async def test_a_killed_trainer_is_seen_and_the_next_one_takes_up_what_was_announced(world, saved):
    async with node(world.start(1)) as n:
        await n.ask(world.load(), Applied)
        await n.trained(3 * BATCH)
        made = await n.update(0, GENESIS, world.folder / "u")
        sheet = world.start(1).state_folder / STATE_MANIFEST
        # Saved by itself soon after it was announced, though nothing is applied.
        while saved and not (sheet.exists() and str(made.digest) in sheet.read_text()):
            await n.until(Progress)
        n.link.kill()
        gone = await ended(n.link.wait())
        assert gone.code == -signal.SIGKILL
        with pytest.raises(StopAsyncIteration):
            await n.until(Stopped)
    async with node(world.start(1)) as n:
        await n.ask(world.load(), Applied)
        assert (await n.update(0, GENESIS, world.folder / "again")).digest == made.digest


@pytest.mark.long
async def test_saving_waits_for_the_round_that_others_wait_for(world):
    async with node(world.start(1)) as n:
        await n.ask(world.load(), Applied)
        await n.trained(BATCH)
        made = await n.update(0, GENESIS, world.folder / "u")
        sheet = world.start(1).state_folder / STATE_MANIFEST
        assert not sheet.exists()
        apply = Apply(accepted_round(0, (1, made)), (), made.end_window, made.end_window)
        await n.ask(apply, Applied)
        while not sheet.exists():
            await n.until(Progress)
        assert str(made.digest) in sheet.read_text()


@pytest.mark.long
async def test_a_save_is_counted_as_time_spent_saving(world):
    async with node(world.start(1)) as n:
        await n.ask(world.load(), Applied)
        assert shares_of(await n.trained(BATCH))["saving"] == 0
        await n.update(0, GENESIS, world.folder / "u")
        await n.until(Progress, lambda p: shares_of(p)["saving"] > 0)


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no priorities here")
@pytest.mark.long
async def test_training_on_a_cpu_yields_to_the_node(world):
    async with node(world.start(1)) as n:
        await n.ask(world.load(), Applied)
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, n.link.pid) > mine
        if sys.platform == "linux":  # and the thread that others wait for does not
            threads = [int(t) for t in os.listdir(f"/proc/{n.link.pid}/task")]
            assert mine in [os.getpriority(os.PRIO_PROCESS, t) for t in threads]


async def test_what_cannot_be_done_is_told_and_the_trainer_goes_on_until_the_channel_closes(world):
    async with node(world.start(1)) as n:
        await n.link.send(MakeUpdate(0, GENESIS, world.folder / "u"))
        failed = await n.until(Failed)
        assert failed.what == "update" and not failed.fatal and "what is held is nothing" in failed.reason
        await n.link.send(replace(world.load(), base_state=Digest(bytes(32))))
        failed = await n.until(Failed)
        assert failed.what == "load" and not failed.fatal and "fetch it again" in failed.reason
        await n.ask(world.load(), Applied)
        await n.trained(BATCH)
        made = await n.update(0, GENESIS, world.folder / "u")
        wrong = accepted_round(0, (1, replace(made, blob_path=world.folder / "gone")))
        await n.link.send(Apply(wrong, (), 0, 0))
        failed = await n.until(Failed)
        assert failed.what == "apply" and "gone" in failed.reason
        await n.ask(Apply(accepted_round(0, (1, made)), (), made.end_window, made.end_window), Applied)
        await n.trained(BATCH)
        # The process leaves when the node closes the channel.
        gone = await n.link.stop(LIMIT)
        assert gone.code == 1 and "closed the channel" in str(gone)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cuda:7"}, "--device cpu|this machine has"),
        ({"spec_path": Path("/nonexistent/spec")}, "No such file"),
    ],
)
async def test_a_trainer_that_cannot_start_says_why_and_exits(world, change, words):
    async with node() as n:
        await n.link.send(replace(world.start(1), **change))
        failed = await n.until(Failed)
        assert failed.what == "start" and failed.fatal
        assert re.search(words, failed.reason)
        assert (await ended(n.link.wait())).code == 1


@pytest.mark.long
async def test_without_data_a_trainer_says_so_waits_and_still_applies(world):
    async with node(replace(world.start(1), shards={})) as n:
        await n.ask(world.load(), Applied)
        note = await n.until(Note, lambda m: m.level == "error")
        assert note.kind == "data" and "trying again" in note.text
        assert (await n.until(DataUnavailable)).shard == world.spec.data.train[0].name
        assert (await n.until(Progress, lambda p: p.waiting and shares_of(p)["data"] > 0.1)).windows == 0
        assert await n.ask(MakeUpdate(0, GENESIS, world.folder / "u"), NothingDone) == NothingDone(GENESIS)
        await n.ask(Apply(accepted_round(0), (), 0, 0), Applied)
        assert (await n.ask(Stop(), Stopped)).saved


def test_started_by_hand_it_says_what_it_is():
    done = subprocess.run(
        [sys.executable, "-m", "peer.training", "--fd", "0", "--parent", "1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr and "by hand" in done.stderr
