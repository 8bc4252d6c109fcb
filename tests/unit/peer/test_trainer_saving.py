"""The trainer's state is written while training goes on: what is on the disk is one whole state, whatever happens."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peer.channel import Apply, TrainerEnd
from peer.errors import SavedStateError, TrainingError
from peer.training import checkpointer
from peer.training.background import BackgroundTask
from peer.training.gate import YieldGate
from peer.training.memory import UNKNOWN, available
from peer.training.parallel import sharded_file
from peer.training.parallel.sharded_file import ShardedFile
from peer.training.saved_state import STATE_MANIFEST, FeedbackEntry, SavedFolder
from peer.training.service import TrainerService
from peer.training.state_writer import copy_size
from peer.training.time_breakdown import Activity, TimeBreakdown
from peer.training.trainer import Trainer
from protocol.layout import Layout
from protocol.spec import CodecSpec
from tests.support.local_trainer import Heard, born, closed, copied, loaded, same, train, update
from tests.support.specs import digest
from tests.support.trainer_world import BATCH, World, accepted_round, apply, finish, saved_counter
from tests.support.waiting import LIMIT

__all__ = ["closed"]  # a fixture
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def world(tmp_path) -> World:
    return World.make(tmp_path)


@dataclass
class Disk:
    """A disk that waits within the first write until `go` is set; `error` is then raised there."""

    reached: threading.Event
    go: threading.Event
    error: Exception | None = None


@pytest.fixture
def disk(monkeypatch) -> Iterator[Disk]:
    made = Disk(threading.Event(), threading.Event())
    write = sharded_file.write_at

    def slow(file: int, data: memoryview, offset: int) -> None:
        made.reached.set()
        assert made.go.wait(LIMIT)
        if made.error is not None:
            raise made.error
        write(file, data, offset)

    monkeypatch.setattr(sharded_file, "write_at", slow)
    yield made
    made.go.set()


@dataclass
class Clock:
    """The checkpointer's clock."""

    now: float = 0.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("peer.training.checkpointer.time.monotonic", lambda: made.now)
    return made


def saving_behind(disk: Disk, world: World) -> Trainer:
    """Return a trainer that has made a step, and whose state is being written to a slow disk."""
    trainer = loaded(world)
    train(trainer, 1)
    trainer.checkpointer.start()
    trainer.checkpointer.step(now=True)
    assert disk.reached.wait(60)
    return trainer


def test_steps_go_on_while_a_slow_disk_writes_and_what_is_saved_is_as_it_was_before_them(world, disk):
    trainer = loaded(world)
    train(trainer, 2)
    update(trainer, world.folder / "u")
    train(trainer, 1)
    feedback, progress = copied(trainer.backend.outer.feedback), dict(trainer.backend.outer.progress())
    steps, moments = trainer.backend.inner.moments()
    moments = copied(moments)
    trainer.checkpointer.start()
    trainer.checkpointer.step(now=True)
    assert disk.reached.wait(60)
    train(trainer, 3)
    trainer.checkpointer.step()
    assert not trainer.checkpointer.is_idle and not (trainer.folder.folder / STATE_MANIFEST).exists()
    disk.go.set()
    finish(trainer)
    saved = trainer.folder.read()
    assert saved is not None and saved.windows.counter == 3 * BATCH and saved.optimizer_steps == steps == 3
    for found, expected in ((saved.feedback, feedback), (saved.progress, progress), (saved.moments, moments)):
        assert found.keys() == expected.keys()
        same(found, expected, atol=0)
    assert trainer.windows.counter == 6 * BATCH


def test_what_is_saved_beside_the_training_has_the_bytes_of_what_is_saved_at_once(world):
    trainer = loaded(world)
    train(trainer, 2)
    trainer.checkpointer.start()
    finish(trainer)
    folder = trainer.folder.folder
    beside = (folder / "trainer-1.safetensors").read_bytes()
    trainer.checkpointer.save_now()
    assert (folder / "trainer-2.safetensors").read_bytes() == beside
    assert sorted(p.name for p in folder.iterdir()) == [STATE_MANIFEST, "trainer-2.safetensors"][::-1]
    assert {n.split("/")[0] for n in load_file(folder / "trainer-2.safetensors")} == {
        "exp_avg", "exp_avg_sq", "feedback", "progress",
    }  # fmt: skip


def test_one_save_at_a_time_and_one_that_has_not_begun_is_replaced(world, disk):
    trainer = loaded(world)
    train(trainer, 1)
    trainer.checkpointer.start()
    trainer.checkpointer.step()  # it is not time yet: a round may be about to be applied
    assert not disk.reached.is_set()
    train(trainer, 1)
    trainer.checkpointer.start()
    trainer.checkpointer.step(now=True)
    assert disk.reached.wait(60)
    train(trainer, 1)
    trainer.checkpointer.start()  # put off
    trainer.checkpointer.step(now=True)
    assert sum(t.name == "save" for t in threading.enumerate()) == 1
    disk.go.set()
    finish(trainer)
    assert saved_counter(trainer) == 2 * BATCH
    trainer.checkpointer.start()  # too soon: it would cost more than its share of the time
    assert trainer.checkpointer.is_idle


def test_a_full_disk_is_told_leaves_the_old_state_and_is_tried_again_later(world, disk, monkeypatch):
    trainer = loaded(world)
    train(trainer, 1)
    disk.go.set()
    trainer.checkpointer.save_now()
    train(trainer, 1)
    disk.error = OSError(28, "No space left on device")
    monkeypatch.setattr(trainer.checkpointer, "due", 0.0)
    trainer.checkpointer.start()
    with pytest.raises(SavedStateError, match="No space left on device.*free some space"):
        finish(trainer)
    assert saved_counter(trainer) == BATCH and not list(trainer.folder.folder.glob(".*"))
    disk.error = None
    trainer.checkpointer.start()
    assert trainer.checkpointer.is_idle  # not yet
    monkeypatch.setattr(trainer.checkpointer, "due", 0.0)
    trainer.checkpointer.start()
    finish(trainer)
    assert saved_counter(trainer) == 2 * BATCH


def test_a_sheet_that_cannot_be_written_is_told_and_the_old_state_is_read(world, monkeypatch):
    trainer = loaded(world)
    train(trainer, 1)
    trainer.checkpointer.save_now()
    train(trainer, 1)

    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.checkpointer, "due", 0.0)
    trainer.checkpointer.start()
    with monkeypatch.context() as patch:
        patch.setattr("peer.training.saved_state.write_durably", full)
        with pytest.raises(SavedStateError, match="free some space"):
            finish(trainer)
    assert saved_counter(trainer) == BATCH
    assert len(list(trainer.folder.folder.glob("trainer-*"))) == 1  # the new file uses no space on a full disk
    trainer.checkpointer.save_now()
    assert saved_counter(trainer) == 2 * BATCH


def test_what_nobody_expected_of_the_thread_that_writes_is_raised_in_the_one_that_trains(world, disk):
    trainer = loaded(world)
    disk.error = RuntimeError("a bug")
    disk.go.set()
    trainer.checkpointer.start()
    with pytest.raises(RuntimeError, match="a bug"):
        finish(trainer)
    with pytest.raises(ZeroDivisionError):
        BackgroundTask(lambda: 1 / 0).result()


def test_without_memory_for_a_copy_it_is_written_at_once_and_told_once(world, monkeypatch):
    trainer, heard = born(world)
    trainer.load(world.load())
    size = trainer.backend.copy_size
    monkeypatch.setattr(checkpointer, "available", lambda: int(size / checkpointer.MEMORY_SHARE) - 1)
    for n in (1, 2):
        train(trainer, 1)
        monkeypatch.setattr(trainer.checkpointer, "due", 0.0)
        trainer.checkpointer.start()
        size = trainer.backend.copy_size
        assert trainer.checkpointer.is_idle and saved_counter(trainer) == n * BATCH
    assert heard.kinds() == ["saved-state"] and "stands still" in heard[0][2]
    monkeypatch.setattr(checkpointer, "available", lambda: int(size / checkpointer.MEMORY_SHARE) + 1)
    monkeypatch.setattr(trainer.checkpointer, "due", 0.0)
    trainer.checkpointer.start()
    assert not trainer.checkpointer.is_idle


def test_a_copy_takes_what_its_tensors_have_and_in_pinned_memory_powers_of_two(world):
    layout = Layout.of({"a": (1000,), "b": (1024,), "c": (3, 7)})
    file = ShardedFile(layout, {0: layout.full_slices})
    assert copy_size(file, torch.device("cpu")) == 4 * (1000 + 1024 + 21)
    assert copy_size(file, torch.device("cuda:0")) == 4096 + 4096 + 128
    backend = loaded(world).backend
    assert backend.copy_size == 8 * world.spec.model.layout.numel  # feedback and progress
    backend.copy_state()
    assert backend.copy_size == 0  # the next one uses the same memory


def test_a_save_that_is_asked_for_waits_for_the_one_under_way_and_has_the_present(world, disk):
    trainer = saving_behind(disk, world)
    train(trainer, 1)
    asked = BackgroundTask(trainer.checkpointer.save_now)
    asked.wait(0.1)
    assert not asked.is_done
    disk.go.set()
    asked.result()
    assert saved_counter(trainer) == 2 * BATCH and trainer.checkpointer.is_idle
    assert (trainer.folder.folder / "trainer-2.safetensors").exists()  # the first was finished, not given up


@pytest.mark.parametrize(
    ("share", "spent", "given_up"),
    [(0.5, 1.0, True), (0.9, 1.0, False), (0.5, 2.0, False), (0.01, 0.01, False), (0.0, 1.0, False)],
    ids=["only the present fits", "both fit", "neither fits", "small", "unknown"],
)
def test_when_there_is_time_for_one_the_present_is_saved(world, disk, clock, monkeypatch, share, spent, given_up):
    clock.now = 1000.0
    trainer = saving_behind(disk, world)
    train(trainer, 1)
    clock.now += spent
    monkeypatch.setattr(type(trainer.backend), "written_share", share)
    disk.go.set()
    trainer.checkpointer.save_now(2.5)
    assert saved_counter(trainer) == 2 * BATCH
    assert (trainer.folder.folder / f"trainer-{1 if given_up else 2}.safetensors").exists()


def test_the_thread_that_writes_stands_aside_and_says_nothing_of_where_the_training_thread_s_time_goes(
    world, monkeypatch
):
    stood, told = set(), set()
    wait, turn = YieldGate.wait, TimeBreakdown.turn

    def stand(gate: YieldGate, *times) -> None:
        stood.add(threading.current_thread().name)
        wait(gate, *times)

    def tell(spent: TimeBreakdown, *what) -> Activity:
        told.add(threading.current_thread().name)
        return turn(spent, *what)

    monkeypatch.setattr(YieldGate, "wait", stand)
    monkeypatch.setattr(TimeBreakdown, "turn", tell)
    trainer = loaded(world)
    train(trainer, 1)
    with trainer.gate.closed(Activity.APPLYING):
        trainer.checkpointer.start()
        trainer.checkpointer.step(now=True)
        while "save" not in stood:
            assert not trainer.backend.is_written and "save" not in told
    finish(trainer)
    assert saved_counter(trainer) == BATCH and "save" not in told


@pytest.mark.parametrize("saved", ["at once", "after the round"])
def test_one_killed_after_its_update_was_missed_finds_a_state_that_has_it_and_the_update(tmp_path, saved):
    raw = World.make(tmp_path, codec=CodecSpec(kind="none", beta=1.0))
    before = loaded(raw)
    train(before, 2)
    made = update(before, raw.folder / "u")
    before.checkpointer.start()
    if saved == "at once":
        finish(before)
    apply(before, Apply(accepted_round(0), (made.blob_path,), 0, 0))
    finish(before)
    made.blob_path.unlink()  # the store may remove it

    after, heard = born(raw)
    after.load(raw.load(accepted_round(0)))
    same(after.backend.outer.feedback, before.backend.outer.feedback, atol=0)
    assert not heard and any(bool(t.any()) for t in after.backend.outer.feedback.values())
    train(after, 1)
    again = update(after, raw.folder / "v")
    assert (again.first_window, again.end_window, again.inner_steps) == (0, 3 * BATCH, 3)
    after.checkpointer.save_now()
    apply(after, Apply(accepted_round(1, (1, again)), (), again.end_window, again.end_window))
    kept = f"update-{again.digest}.blob"
    assert [p.name for p in after.folder.folder.glob("update*")] == [kept]  # no state on disk has the first any more


def test_an_update_that_is_gone_when_it_is_missed_is_told_and_its_windows_are_claimed_by_none(world):
    before = loaded(world)
    train(before, 2)
    made = update(before, world.folder / "u")
    before.checkpointer.save_now()
    before.folder.update_file(made.digest).unlink()
    after, heard = born(world)
    after.load(world.load(accepted_round(0)))
    assert heard.kinds() == ["lost-update"]
    train(after, 1)
    following = update(after, world.folder / "v")
    assert (following.first_window, following.end_window, following.inner_steps) == (2 * BATCH, 3 * BATCH, 1)


def test_closing_ends_the_thread_and_leaves_the_old_state(world, disk):
    trainer = saving_behind(disk, world)
    threading.Timer(0.05, disk.go.set).start()
    trainer.close()
    assert not any(t.name == "save" for t in threading.enumerate())
    assert saved_counter(trainer) is None


def test_a_copy_is_not_changed_by_what_changes_the_tensors(world):
    trainer = loaded(world)
    train(trainer, 1)
    trainer.checkpointer.start()
    expected = {n: t.clone() for n, t in trainer.backend.inner.moments()[1].items()}
    for tensor in (*trainer.backend.inner.moments()[1].values(), *trainer.backend.outer.feedback.values()):
        tensor.fill_(7.0)
    finish(trainer)
    saved = trainer.folder.read()
    assert saved is not None and not any(bool(t.any()) for t in saved.feedback.values())
    same(saved.moments, expected, atol=0)


@pytest.mark.parametrize("asked", [False, True])
def test_a_gpu_without_memory_to_save_is_an_error_with_a_remedy(world, monkeypatch, asked):
    trainer, (ours, theirs) = loaded(world), socket.socketpair()
    train(trainer, 1)

    def full(*_):
        raise torch.OutOfMemoryError("a GPU's")

    monkeypatch.setattr(trainer.backend.outer, "progress", full)
    with ours, theirs, pytest.raises(TrainingError, match="does not suffice to save.*stop other programs"):
        service = TrainerService(TrainerEnd(ours))
        service.save(trainer, trainer.checkpointer.save_now if asked else trainer.checkpointer.start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_gpu_s_state_is_copied_to_pinned_memory_that_is_used_again(world):
    trainer, _ = born(world, device="cuda:0")
    trainer.load(world.load())
    for n in (1, 2):
        train(trainer, 1)
        expected = copied(trainer.backend.inner.moments()[1])
        trainer.checkpointer.due = 0.0
        trainer.checkpointer.start()
        held = dict(trainer.backend.pinned)  # type: ignore[attr-defined]
        assert all(t.is_pinned() for t in held.values())
        train(trainer, 1)
        finish(trainer)
        saved = trainer.folder.read()
        assert saved is not None and saved.windows.counter == (2 * n - 1) * BATCH
        same(saved.moments, {k: t.cpu() for k, t in expected.items()}, atol=0)
        train(trainer, 0)
    trainer.checkpointer.due = 0.0
    trainer.checkpointer.start()
    assert {k: t.data_ptr() for k, t in trainer.backend.pinned.items()} == {  # type: ignore[attr-defined]
        k: t.data_ptr() for k, t in held.items()
    }


# -- memory ----------------------------------------------------------------------------------------------------------


def test_available_memory_is_the_machine_s_or_what_the_container_has_left(tmp_path):
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert available(meminfo, cgroup) == UNKNOWN
    meminfo.write_text("MemTotal:  2000 kB\nMemFree:  100 kB\nMemAvailable:    1000 kB\n")
    assert available(meminfo, cgroup) == 1000 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("5000\n")
    assert available(meminfo, cgroup) == 1000 * 1024
    (cgroup / "memory.max").write_text("9000\n")
    assert available(meminfo, cgroup) == 4000
    (cgroup / "memory.stat").write_text("anon 3000\ninactive_file 700\n")
    assert available(meminfo, cgroup) == 4700


def test_a_trainer_that_holds_no_state_saves_nothing(world):
    trainer = Trainer(world.start(1), Heard())
    try:
        trainer.checkpointer.start()
        trainer.checkpointer.save_now()
        assert trainer.checkpointer.is_idle and trainer.folder.read() is None
    finally:
        trainer.close(in_order=True)


@pytest.mark.parametrize("fails", [False, True])
def test_while_an_update_is_written_no_state_without_it_is_saved(world, monkeypatch, fails):
    trainer, keep, found = loaded(world), SavedFolder.keep_update, []
    train(trainer, 1)

    def slow(folder: SavedFolder, *update) -> Path:
        trainer.checkpointer.save_now()
        found.append(folder.read())
        if fails:
            raise OSError("the disk is full")
        return keep(folder, *update)

    monkeypatch.setattr(SavedFolder, "keep_update", slow)
    with pytest.raises(OSError, match="full") if fails else contextlib.nullcontext():
        update(trainer, world.folder / "u")
    trainer.checkpointer.save_now()
    saved = trainer.folder.read()
    assert found == [None] and saved is not None
    assert (saved.windows.announced is None) == fails and saved.windows.counter == BATCH


def test_an_update_that_could_not_be_written_is_as_large_at_the_next_attempt(world, monkeypatch):
    trainer = loaded(world)

    def fails(folder: SavedFolder, *update) -> Path:
        raise OSError("the disk is full")

    train(trainer, 2)
    outer, name = trainer.backend.outer, digest("missed")
    trainer.base.feedback_contents.entries = {name: FeedbackEntry(1.0, None)}
    learnt = {n: outer.anchor[n] - t for n, t in outer.local.items()}
    for _ in range(3):
        with monkeypatch.context() as m, pytest.raises(OSError, match="full"):
            m.setattr(SavedFolder, "keep_update", fails)
            update(trainer, world.folder / "u")
    blob = update(trainer, world.folder / "u").blob_path.read_bytes()
    outer.add_back(blob)
    same(outer.feedback, learnt)
    assert trainer.base.feedback_contents.entries[name].factor == world.spec.codec.beta


def test_in_a_long_round_what_was_trained_is_saved_too_but_not_too_often(world, monkeypatch):
    for name, value in (("PROGRESS_SECONDS", 0.0), ("STILL_SHARE", 1e9), ("WRITE_SHARE", 1e9)):
        monkeypatch.setattr(checkpointer, name, value)
    trainer = loaded(world)
    train(trainer, 1)
    trainer.checkpointer.start_mid_round()  # before the first update
    finish(trainer)
    assert saved_counter(trainer) == BATCH
    update(trainer, world.folder / "u")
    trainer.checkpointer.start()
    assert not trainer.checkpointer.is_mid_round_due  # one save at a time
    finish(trainer)
    saved = trainer.folder.read()
    assert saved is not None and saved.windows.announced is not None
    train(trainer, 2)
    trainer.checkpointer.start_mid_round()
    finish(trainer)
    assert saved_counter(trainer) == 3 * BATCH
    saved = trainer.folder.read()
    assert saved is not None and saved.windows.announced is not None and saved.windows.announced.end == BATCH
    monkeypatch.setattr(checkpointer, "PROGRESS_SECONDS", 3600.0)
    train(trainer, 1)
    trainer.checkpointer.start_mid_round()
    assert trainer.checkpointer.is_idle


@pytest.mark.parametrize(("left", "due"), [(100.0, True), (5.0, False), (-100.0, True)])
def test_the_save_after_an_update_does_not_wait_for_one_that_came_before_it(world, clock, monkeypatch, left, due):
    monkeypatch.setattr(checkpointer, "PROGRESS_SECONDS", 0.0)
    trainer = loaded(world)
    for clock.now in (10_000.0, 11_000.0 + left):  # two updates; a save takes 2.5 s, so the next is due 50 s later
        trainer.checkpointer.start()
        trainer.checkpointer.step(now=True)
        clock.now += 2.5
        finish(trainer)
    clock.now += 997.5
    assert trainer.checkpointer.is_mid_round_due == due
