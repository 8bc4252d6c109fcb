"""Several ranks save beside the training: each writes its shard, and all learn of an error on one."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from peer.errors import SavedStateError
from peer.training.parallel import sharded_file
from peer.training.time_breakdown import Activity, TimeBreakdown
from peer.training.trainer import Trainer
from tests.support.local_trainer import Heard, same, train, update
from tests.support.long_cases import long_cases
from tests.support.trainer_world import BATCH, World, finish, saved_counter
from tests.support.waiting import LIMIT

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def trainer_of(world: World, parallel: str) -> Iterator[tuple[Trainer, Heard]]:
    heard = Heard()
    trainer = Trainer(replace(world.start(1), parallel=parallel), heard)
    try:
        trainer.load(world.load())
        yield trainer, heard
    finally:
        trainer.close(in_order=True)


def keep(trainer: Trainer) -> None:
    trainer.checkpointer.due = 0.0
    trainer.checkpointer.start()
    assert not trainer.checkpointer.is_idle


@pytest.mark.parametrize("parallel", ["fsdp=2", *long_cases("dp=2", "tp=2")])
def test_ranks_save_as_it_was_the_bytes_that_they_save_at_once_while_steps_go_on(parallel, tmp_path, monkeypatch):
    world = World.make(tmp_path, optimizer="muon")
    reached, go = threading.Event(), threading.Event()
    write = sharded_file.write_at

    def slow(file: int, data: memoryview, offset: int) -> None:
        reached.set()
        assert go.wait(LIMIT)
        write(file, data, offset)

    def tell(spent: TimeBreakdown, *what) -> Activity:
        assert threading.current_thread() is threading.main_thread()  # not the one that writes
        return turn(spent, *what)

    turn = TimeBreakdown.turn
    with trainer_of(world, parallel) as (trainer, heard):
        folder = trainer.folder.folder
        train(trainer, 2)
        update(trainer, tmp_path / "u")
        train(trainer, 1)
        trainer.checkpointer.save_now()
        at_once = (folder / "trainer-1.safetensors").read_bytes()
        monkeypatch.setattr(sharded_file, "write_at", slow)  # rank 0's
        monkeypatch.setattr(TimeBreakdown, "turn", tell)
        keep(trainer)
        trainer.checkpointer.step(now=True)
        assert reached.wait(LIMIT)
        train(trainer, 2)
        trainer.checkpointer.step()
        assert not trainer.checkpointer.is_idle and not (folder / "trainer-2.safetensors").exists()
        with trainer.gate.closed(Activity.APPLYING):
            go.set()
            time.sleep(0.05)
            assert not trainer.backend.is_written  # it yields
        finish(trainer)
        assert (folder / "trainer-2.safetensors").read_bytes() == at_once
        state = trainer.folder.read()  # of the digest that all ranks made together
        assert state is not None and state.windows.counter == 3 * BATCH and state.optimizer_steps == 3
        assert trainer.windows.counter == 5 * BATCH
        assert {n.split("/")[0] for n in state.moments} == {"exp_avg", "exp_avg_sq", "momentum_buffer"}
        assert heard.kinds() == ["parallel"]
        keep(trainer)
        trainer.checkpointer.save_now()  # replaces what was kept
        assert saved_counter(trainer) == 5 * BATCH
    # One process restores it, and saves the same bytes, except for later progress, which is computed again.
    many = load_file(folder / "trainer-3.safetensors")
    header = len((folder / "trainer-3.safetensors").read_bytes()) - 4 * sum(t.numel() for t in many.values())
    with trainer_of(world, "dp=1") as (one, heard):
        one.checkpointer.save_now()
        assert one.windows.counter == 5 * BATCH and not heard
        after = folder / "trainer-4.safetensors"
    found = load_file(after)
    same({n: t for n, t in found.items() if "progress" not in n}, many, atol=0)
    same(found, many, atol=1e-6)
    assert after.read_bytes()[:header].rstrip() == _header(at_once)


def _header(data: bytes) -> bytes:
    return data[: 8 + int.from_bytes(data[:8], "little")].rstrip()


@pytest.mark.long
def test_a_disk_that_is_full_for_one_rank_is_told_leaves_the_old_state_and_all_ranks_go_on(tmp_path, monkeypatch):
    world = World.make(tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -m tests.support.slow_disk "$@"\n')
    python.chmod(0o755)
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv("CAIRN_TEST_DISK", str(disk))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(sys, "executable", str(python))  # rank 1's: this process is rank 0
    with trainer_of(world, "fsdp=2") as (trainer, _):
        train(trainer, 1)
        keep(trainer)
        finish(trainer)
        assert saved_counter(trainer) == BATCH
        (disk / "full").touch()
        train(trainer, 1)
        for save in (lambda: (keep(trainer), finish(trainer)), trainer.checkpointer.save_now):
            with pytest.raises(SavedStateError, match="No space left on device.*free some space"):
                save()
            assert trainer.checkpointer.is_idle and saved_counter(trainer) == BATCH
            assert not list(trainer.folder.folder.glob(".*"))
            train(trainer, 1)
        (disk / "full").unlink()
        keep(trainer)
        finish(trainer)
        assert saved_counter(trainer) == 4 * BATCH
        # One that waits for a slow rank waits for it, and one that is given up leaves nothing.
        (disk / "hold").touch()
        train(trainer, 1)
        keep(trainer)
        trainer.checkpointer.step(now=True)
        while not (disk / "held").exists():
            train(trainer, 1)
        counter = trainer.windows.counter
        (disk / "hold").unlink()
        trainer.checkpointer.save_now()
        assert saved_counter(trainer) == counter
        keep(trainer)
        trainer.checkpointer.step(now=True)
    assert not any(t.name == "save" for t in threading.enumerate())
