"""A trainer's process that is killed while it saves, or told to stop, or whose disk hangs or is full."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from peer.channel import Applied, Apply, Failed, Note, Progress, Ready, Save, Stop, Stopped, TrainerLink
from peer.training.saved import SHEET
from tests.support.trainer_process import Node
from tests.support.trainer_states import born, closed, train, update
from tests.support.trainer_world import BATCH, GENESIS, World, accepted_round

__all__ = ["closed"]  # a fixture
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def world(tmp_path) -> World:
    return World.make(tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
from peer.training import saved
from peer.training.parallel import file as part_file
from peer.training.trainer import Trainer
from tests.support.trainer_states import loaded, train
from tests.support.trainer_world import World
world = World.make(Path(sys.argv[1]))
trainer = loaded(world)
train(trainer, 1)
trainer.save()
train(trainer, 1)
trainer.saving._due = 0.0
trainer.saving.keep()
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
write, left = part_file._write_all, int(sys.argv[3])
def some(file, data, offset):
    global left
    write(file, data[: len(data) // 2], offset)
    left -= 1
    if left < 0:
        die()
    write(file, data, offset)
match sys.argv[2]:
    case "writing":
        part_file._write_all = some
    case "before it has its name":
        saved.publish = die
    case "before the sheet":
        saved.write_durably = die
    case "before the old one is gone":
        Path.unlink = die
while not trainer.saving.is_idle:
    trainer.saving.go_on(now=True)
print("was not killed")
"""


@pytest.mark.parametrize(
    ("when", "chunks", "counter"),
    [
        ("writing", 0, BATCH),
        ("writing", 1, BATCH),
        ("before it has its name", 0, BATCH),
        ("before the sheet", 0, BATCH),
        ("before the old one is gone", 0, 2 * BATCH),
    ],
)
def test_one_killed_while_it_saves_finds_the_old_state_or_the_new_one(tmp_path, when, chunks, counter):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", KILLED, str(tmp_path), when, str(chunks)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    world = World.make(tmp_path)
    after, heard = born(world)
    after.load(world.load())
    assert after.claims.counter == counter and not heard
    train(after, 1)
    after.save()
    assert not list(after.folder.folder.glob(".*")) and len(list(after.folder.folder.glob("trainer-*"))) == 1


@asynccontextmanager
async def slow_node(world: World, monkeypatch):
    """A real trainer's process, whose disk waits while there is a file."""
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


async def test_a_trainer_trains_and_answers_while_its_disk_hangs_and_saves_the_present_when_it_stops(
    world, monkeypatch
):
    async with slow_node(world, monkeypatch) as (n, folder):
        made = await begun(n, world, folder)
        before = (await n.until(Progress)).windows
        accepted = Apply(accepted_round(0, (1, made)), (), True, made.end_window, made.end_window)
        await n.ask(accepted, Applied)
        await n.trained(max(8 * BATCH, before - (made.end_window - made.first_window)))
        sheet = world.start(1).state_folder / SHEET
        assert not sheet.exists()
        await n.link.send(Stop())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(n.link.wait(), 0.3)
        (folder / "hold").unlink()
        assert (await n.until(Stopped)).saved
        assert (await asyncio.wait_for(n.link.wait(), 10)).code == 0
        assert not any(isinstance(m, Note) for m in n.heard)
    after, heard = born(world)
    after.load(world.load(accepted_round(0, (1, made)), next_window=made.end_window))
    assert after.claims.counter >= made.end_window + 8 * BATCH and not heard


async def test_a_trainer_killed_while_its_disk_hangs_loses_no_announced_work(world, monkeypatch):
    async with slow_node(world, monkeypatch) as (n, folder):
        made = await begun(n, world, folder)
        await n.trained(BATCH)
        n.link.kill()
        await asyncio.wait_for(n.link.wait(), 10)
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
        await n.link.send(Save())
        failed = None
        while failed is None:
            message = await asyncio.wait_for(anext(n._messages), 60)
            failed = message if isinstance(message, Failed) else None
        assert failed.what == "save" and not failed.fatal
        (folder / "full").unlink()
        assert (await n.ask(Stop(), Stopped)).saved
