"""A trainer's process that is killed or stopped while it saves, or whose disk hangs or is full."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from peer.channel import Applied, Apply, Note, Progress, Ready, Stop, Stopped, TrainerLink
from peer.training import saved_state
from peer.training.parallel import sharded_file
from peer.training.saved_state import STATE_MANIFEST
from tests.support.local_trainer import born, closed, loaded, train, update
from tests.support.parallel_world import run_ranks
from tests.support.trainer_process import Node
from tests.support.trainer_world import BATCH, GENESIS, World, accepted_round
from tests.support.waiting import ended

__all__ = ["closed"]  # a fixture
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def world(tmp_path) -> World:
    return World.make(tmp_path)


def save_until_killed(rank: int, ranks: int, folder: Path) -> None:
    """Save a second time, and die where the case says: by SIGKILL, in a process of its own."""
    when, chunks = json.loads((folder / "case").read_text())
    trainer = loaded(World.make(folder))
    train(trainer, 1)
    trainer.checkpointer.save_now()
    train(trainer, 1)
    trainer.checkpointer.due = 0.0
    trainer.checkpointer.start()
    write, left = sharded_file.write_at, [chunks]

    def die(*_: Any, **__: Any) -> None:
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def some(file: Any, data: Any, offset: int) -> None:
        write(file, data[: len(data) // 2], offset)
        left[0] -= 1
        if left[0] < 0:
            die()
        write(file, data, offset)

    match when:
        case "writing":
            sharded_file.write_at = some
        case "before it has its name":
            saved_state.publish = die
        case "before the manifest":
            saved_state.write_durably = die
        case "before the old one is gone":
            Path.unlink = die
    while not trainer.checkpointer.is_idle:
        trainer.checkpointer.step(now=True)


@pytest.mark.parametrize(
    ("when", "chunks", "counter"),
    [
        ("writing", 0, BATCH),
        ("writing", 1, BATCH),
        ("before it has its name", 0, BATCH),
        ("before the manifest", 0, BATCH),
        ("before the old one is gone", 0, 2 * BATCH),
    ],
)
def test_one_killed_while_it_saves_finds_the_old_state_or_the_new_one(tmp_path, when, chunks, counter):
    (tmp_path / "case").write_text(json.dumps([when, chunks]))
    with pytest.raises(AssertionError, match="rank 0: "):
        run_ranks(1, f"{__name__}:{save_until_killed.__name__}", tmp_path)
    assert (tmp_path / "died").exists()
    world = World.make(tmp_path)
    after, heard = born(world)
    after.load(world.load())
    assert after.windows.counter == counter and not heard
    train(after, 1)
    after.checkpointer.save_now()
    assert not list(after.folder.folder.glob(".*")) and len(list(after.folder.folder.glob("trainer-*"))) == 1


@asynccontextmanager
async def slow_node(world: World, monkeypatch):
    """Yield a real trainer's process, whose disk waits while a file exists."""
    folder = world.folder / "disk"
    folder.mkdir()
    monkeypatch.setenv("CAIRN_TEST_DISK", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    link = await TrainerLink.start(
        threads=1, command=[sys.executable, "-m", "tests.support.slow_disk", "peer.training"]
    )
    try:
        n = Node(link)
        await n.ask(world.start(1), Ready)
        await n.ask(world.load(), Applied)
        yield n, folder
    finally:
        link.kill()
        await link.stop()


async def until(what: Callable[[], bool], n: Node) -> None:
    while not what():
        await n.until(Progress)


async def begun(n: Node, world: World, folder: Path):
    """Have it train and announce; the disk holds what it saves then."""
    (folder / "hold").touch()
    await n.trained(2 * BATCH)
    made = await n.update(0, GENESIS, world.folder / "u")
    await until((folder / "held").exists, n)
    return made


@pytest.mark.long
async def test_a_trainer_trains_and_answers_while_its_disk_hangs_and_saves_the_present_when_it_stops(
    world, monkeypatch
):
    async with slow_node(world, monkeypatch) as (n, folder):
        made = await begun(n, world, folder)
        before = (await n.until(Progress)).windows
        accepted = Apply(accepted_round(0, (1, made)), (), made.end_window, made.end_window)
        await n.ask(accepted, Applied)
        await n.trained(max(8 * BATCH, before - (made.end_window - made.first_window)))
        sheet = world.start(1).state_folder / STATE_MANIFEST
        assert not sheet.exists()
        await n.link.send(Stop())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(n.link.wait(), 0.3)
        (folder / "hold").unlink()
        assert (await n.until(Stopped)).saved
        assert (await ended(n.link.wait())).code == 0
        assert not any(isinstance(m, Note) for m in n.heard)
    after, heard = born(world)
    after.load(world.load(accepted_round(0, (1, made)), next_window=made.end_window))
    assert after.windows.counter >= made.end_window + 8 * BATCH and not heard


@pytest.mark.long
async def test_a_trainer_killed_while_its_disk_hangs_loses_no_announced_work(world, monkeypatch):
    async with slow_node(world, monkeypatch) as (n, folder):
        made = await begun(n, world, folder)
        await n.trained(BATCH)
        n.link.kill()
        await ended(n.link.wait())
    after, heard = born(world)
    after.load(world.load())
    assert update(after, world.folder / "again").digest == made.digest and not heard


async def test_a_full_disk_is_told_and_training_goes_on(world, monkeypatch):
    async with slow_node(world, monkeypatch) as (n, folder):
        (folder / "full").touch()
        await n.trained(BATCH)
        await n.update(0, GENESIS, world.folder / "u")
        note = await n.until(Note)
        assert note.kind == "saved-state" and note.level == "warning" and "No space left on device" in note.text
        await n.until(Progress)
        await n.link.send(Stop())
        assert not (await n.until(Stopped)).saved
