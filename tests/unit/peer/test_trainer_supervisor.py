"""The node keeps a trainer alive, tells of each loss once, and never asks a new process what was asked of the old."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from peer.channel import FromTrainer, Load, MakeUpdate, NothingDone, Ready, RoundUpdates, Start, TrainerLink
from peer.channel import link as link_module
from peer.errors import TrainerDied
from peer.node import trainer_supervisor as module
from peer.node.trainer_supervisor import TrainerSupervisor
from protocol.ids import Digest, PeerKey
from tests.support.waiting import LIMIT, NEVER, ended, until

D, K = Digest(bytes(range(32))), PeerKey(bytes(range(1, 33)))

PROLOGUE = """
import argparse, os, sys, time
from pathlib import Path
from peer.channel import *
from protocol.ids import Digest
p = argparse.ArgumentParser(); p.add_argument("--fd", type=int); p.add_argument("--parent", type=int)
a = p.parse_args(); end = TrainerEnd.from_fd(a.fd)
start = end.receive(None)
D = Digest(bytes(range(32)))
lives = start.state_folder / "lives"
life = len(lives.read_text()) if lives.exists() else 0
lives.write_text("x" * (life + 1))
"""


@pytest.fixture(autouse=True)
def _restart_at_once(monkeypatch):
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.02)


class World:
    """A supervisor over a stand-in for the trainer's process, and what it reported."""

    def __init__(self, folder: Path, program: str, base: Path | None):
        self.said: list[FromTrainer] = []
        self.lost: list[str] = []
        self.news = asyncio.Event()
        command = (sys.executable, "-c", PROLOGUE + textwrap.dedent(program))
        self.trainer = TrainerSupervisor(
            Start(folder / "spec", K, folder, "cpu", 1, {}, base=base),
            on_message=self._message,
            on_lost=self._lost,
            command=command,
        )

    def _message(self, message: FromTrainer) -> None:
        self.said.append(message)
        self.news.set()

    def _lost(self, reason: str) -> None:
        self.lost.append(reason)
        self.news.set()

    async def until(self, look) -> None:
        async def seen() -> None:
            while not look():
                await self.news.wait()
                self.news.clear()

        await ended(seen())

    def names(self) -> list[str]:
        return [type(m).__name__ for m in self.said]


@asynccontextmanager
async def supervised(folder: Path, program: str, *, base: Path | None = None):
    world = World(folder, program, base)
    running = asyncio.create_task(world.trainer.run())
    try:
        yield world, running
    finally:
        await world.trainer.stop(2.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


ASK = MakeUpdate(0, D, Path("out"))

DIES_ONCE = """
end.send(Ready("cpu", 1, 1))
while (m := end.receive(None)) is not None:
    if isinstance(m, Stop):
        end.send(Stopped(True)); sys.exit(0)
    if life == 0:
        sys.exit(3)
    end.send(NothingDone(D))
"""


async def test_a_trainer_that_dies_of_a_question_is_told_once_and_the_question_is_not_asked_again(tmp_path):
    async with supervised(tmp_path, DIES_ONCE) as (world, _):
        await world.trainer.send(ASK)
        await world.until(lambda: world.lost)
        assert len(world.lost) == 1 and "code 3" in world.lost[0]
        # The new process is up, and nobody has asked it anything.
        await world.until(lambda: world.names().count("Ready") == 2)
        await asyncio.sleep(0.2)
        assert "NothingDone" not in world.names()
        await world.trainer.send(ASK)
        await world.until(lambda: "NothingDone" in world.names())
        assert len(world.lost) == 1 and world.trainer.restarts == 1


@pytest.mark.parametrize("failures", [1, module.MAX_FAILURES])
async def test_a_restart_for_which_the_machine_is_short_of_something_is_tried_again(tmp_path, monkeypatch, failures):
    real, left = asyncio.create_subprocess_exec, [BlockingIOError(11, "no process now")] * failures

    async def start(*given, **options):
        if (tmp_path / "lives").exists() and left:
            raise left.pop()
        return await real(*given, **options)

    monkeypatch.setattr(link_module.asyncio, "create_subprocess_exec", start)
    async with supervised(tmp_path, DIES_ONCE) as (world, running):
        await world.trainer.send(ASK)
        await world.until(lambda: world.lost)
        with pytest.raises(TrainerDied, match="cannot start the trainer"):
            await ended(world.trainer.send(ASK))  # of the process that could not be started
        if failures == module.MAX_FAILURES:
            with pytest.raises(TrainerDied, match="died 5 times in a row, last: cannot start"):
                await ended(running)
        else:
            await world.until(lambda: len(world.lost) == 2)
            await ended(world.trainer.send(ASK))
            await world.until(lambda: "NothingDone" in world.names())


@pytest.mark.parametrize("is_started", [False, True])
async def test_a_first_start_after_a_rest_is_tried_again_like_any_other(tmp_path, monkeypatch, is_started):
    real, left = asyncio.create_subprocess_exec, [BlockingIOError(11, "no process now")] * (not is_started)

    async def start(*given, **options):
        if left:
            raise left.pop()
        return await real(*given, **options)

    monkeypatch.setattr(link_module.asyncio, "create_subprocess_exec", start)
    (tmp_path / "lives").write_text("x" * (not is_started))
    program = """
    if life == 0:
        end.send(Failed("start", "the GPU is full", fatal=True)); sys.exit(1)
    end.send(Ready("cpu", 1, 1)); end.receive(None)
    """
    async with supervised(tmp_path, program) as (world, running):
        world.trainer.was_ready = True
        running.add_done_callback(lambda _: world.news.set())
        await world.until(lambda: "Ready" in world.names() or running.done())
        assert (
            not running.done()
            and len(world.lost) == 1
            and ("GPU is full" if is_started else "no process now") in world.lost[0]
        )


async def test_each_process_has_the_limit_of_a_gpu_as_it_is_when_it_starts(tmp_path):
    program = """
    end.send(Ready(str(start.gpu_memory), 1, 1))
    if life == 0:
        sys.exit(3)
    end.receive(None)
    """
    async with supervised(tmp_path, program) as (world, _):
        limits = iter([6, 7])
        world.trainer.gpu_memory = lambda: next(limits)
        await world.until(lambda: world.names().count("Ready") == 2)
        assert [m.device for m in world.said if isinstance(m, Ready)] == ["6", "7"]


async def test_a_base_that_is_gone_is_for_the_trainer_to_say(tmp_path):
    program = """
    end.send(Failed("start", f"{start.base.name} is gone: start the peer again", True)); sys.exit(1)
    """
    async with supervised(tmp_path, program, base=tmp_path / "base") as (_, running):
        with pytest.raises(TrainerDied, match="base is gone: start the peer again"):
            await ended(running)


async def test_who_waits_for_a_trainer_that_dies_before_it_is_ready_hears_of_it(tmp_path):
    program = """
    if life == 0:
        sys.exit(3)
    end.send(Ready("cpu", 1, 1)); end.receive(None)
    """
    async with supervised(tmp_path, program) as (world, _):
        with pytest.raises(TrainerDied):
            await ended(world.trainer.send(ASK))
        await world.until(lambda: world.lost)
        await ended(world.trainer.send(ASK))  # the next one is asked
        assert len(world.lost) == 1


async def test_a_trainer_that_hangs_is_killed_and_restarted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(module, "REPLAY_SECONDS", 0.0)
    program = """
    end.send(Ready("cpu", 1, 1))
    end.receive(None)
    if life == 0:
        time.sleep(3600)
    end.send(NothingDone(D)); end.receive(None)
    """
    async with supervised(tmp_path, program) as (world, _):
        await world.trainer.send(ASK)
        await world.until(lambda: world.lost)
        assert "has not answered MakeUpdate" in world.lost[0]
        await world.trainer.send(ASK)
        await world.until(lambda: "NothingDone" in world.names())


async def test_each_request_has_a_deadline_of_its_own_which_begins_when_those_before_are_answered(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(module, "REPLAY_SECONDS", 0.1)
    program = """
    end.send(Ready("cpu", 1, 1))
    end.receive(None); end.receive(None)
    time.sleep(0.3)  # longer than the second request may take, and not as long as the first
    end.send(Applied(D, D, None))
    end.receive(None)
    """
    async with supervised(tmp_path, program) as (world, _):
        await world.trainer.send(Load(Path("state"), D, D, 0, (RoundUpdates(0, D, ()),) * 3000, (), 0, 0))
        await world.trainer.send(ASK)
        await world.until(lambda: world.lost)
        assert "Applied" in world.names() and "it has not answered MakeUpdate for 0 s" in world.lost[0]


@pytest.mark.parametrize("name", ["base", "trainer-1.safetensors"])
async def test_a_trainer_that_reads_a_large_base_or_state_has_longer_to_become_ready(tmp_path, monkeypatch, name):
    monkeypatch.setattr(module, "START_SECONDS", 0.01)
    monkeypatch.setattr(module, "READ_RATE", 1 / LIMIT)
    async with supervised(tmp_path, 'end.send(Ready("cpu", 1, 1)); end.receive(None)') as (world, _):
        await world.until(lambda: world.lost)
        assert "was not ready within 0 s" in world.lost[0]
        (tmp_path / name).write_bytes(b"x")
        world.trainer.start = replace(world.trainer.start, base=tmp_path / "base")
        await world.until(lambda: "Ready" in world.names())


async def test_a_trainer_that_waits_for_the_node_is_not_taken_for_one_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(module, "REPLAY_SECONDS", 0.0)
    program = """
    end.send(Ready("cpu", 1, 1))
    end.receive(None); end.send(NothingDone(D)); end.receive(None)
    """
    async with supervised(tmp_path, program) as (world, _):
        await world.trainer.send(ASK)
        await world.until(lambda: "NothingDone" in world.names())
        await asyncio.sleep(2.0)
        assert not world.lost


async def test_a_trainer_that_can_never_start_ends_the_node_with_its_own_words(tmp_path):
    program = 'end.send(Failed("start", "no such device: use another", fatal=True)); sys.exit(1)'
    async with supervised(tmp_path, program) as (world, running):
        with pytest.raises(TrainerDied, match="no such device"):
            await ended(running)
        assert (tmp_path / "lives").read_text() == "x" and not world.lost


@pytest.mark.parametrize(
    ("does", "lives"),
    [
        # Another round, then training: each counts.
        ("end.send(Applied(D, D, None) if life == 1 else Progress(8, 1.0, 100.0, False))", 4),
        ("end.send(Progress(8, 1.0, 0.0, False))", 2),  # only loaded, as at every start
    ],
)
async def test_deaths_in_a_row_are_too_many_only_when_nothing_was_done_in_between(tmp_path, monkeypatch, does, lives):
    monkeypatch.setattr(module, "MAX_FAILURES", 2)
    program = f"""
    end.send(Ready("cpu", 1, 1))
    end.send(Applied(D, D, None))
    if life < 3:
        {does}
    sys.exit(3)
    """
    async with supervised(tmp_path, program) as (_, running):
        with pytest.raises(TrainerDied, match="2 times in a row"):
            await ended(running)
        assert (tmp_path / "lives").read_text() == "x" * lives


async def test_a_search_for_a_micro_batch_is_no_row_of_failures_and_is_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "MAX_FAILURES", 2)
    monkeypatch.setattr(module, "MAX_SEARCH", 1)
    program = 'end.send(Ready("cpu", 1, 1)); end.send(Failed("memory", "half of it", fatal=True)); sys.exit(1)'
    async with supervised(tmp_path, program) as (world, running):
        with pytest.raises(TrainerDied, match="2 times in a row, last: half of it"):
            await ended(running)
        assert (tmp_path / "lives").read_text() == "xxx"
    assert "(step 1 of the search for a micro-batch that fits)" in caplog.text and "(failure 1 of 2)" in caplog.text


async def test_stopping_tells_whether_the_trainer_saved(tmp_path):
    async with supervised(tmp_path, DIES_ONCE) as (world, running):
        await world.until(lambda: "Ready" in world.names())
        assert await world.trainer.stop(LIMIT) is True
        await ended(running)
        assert await world.trainer.stop(LIMIT) is True  # and again
    deaf = tmp_path / "deaf"
    deaf.mkdir()
    async with supervised(deaf, 'end.send(Ready("cpu", 1, 1)); time.sleep(3600)') as (world, running):
        await world.until(lambda: "Ready" in world.names())
        assert await ended(world.trainer.stop(0.3)) is False
        await ended(running)
        assert not world.lost


async def test_a_trainer_that_has_saved_and_does_not_exit_is_killed(tmp_path):
    program = 'end.send(Ready("cpu", 1, 1)); end.receive(None); end.send(Stopped(True)); time.sleep(3600)'
    async with supervised(tmp_path, program) as (world, _):
        await world.until(lambda: "Ready" in world.names())
        stopping = asyncio.create_task(world.trainer.stop(NEVER))
        await world.until(lambda: "Stopped" in world.names())
        assert not stopping.done()
        assert await ended(world.trainer.stop(0.1)) is True
        link = world.trainer.link
        assert link is not None
        await until(lambda: not link.running, "it is killed")
        assert await ended(stopping) is True


async def test_stopping_while_the_trainer_starts_does_not_wait_for_it(tmp_path):
    async with supervised(tmp_path, "time.sleep(3600)") as (world, running):
        await asyncio.sleep(0.05)
        assert await ended(world.trainer.stop(NEVER)) is False
        await ended(running)
    assert not isinstance(world.trainer.ready, Ready) and NothingDone not in map(type, world.said)


async def test_a_gpu_that_was_found_once_is_asked_for_by_name_so_that_the_cpu_never_takes_over(tmp_path):
    program = """
    end.send(Ready(start.device, 1, 1, on_gpu=life == 0))
    if life == 0:
        sys.exit(3)
    end.receive(None)
    """
    async with supervised(tmp_path, program) as (world, _):
        world.trainer.start = replace(world.trainer.start, device="auto")
        await world.until(lambda: world.names().count("Ready") == 2)
        assert [m.device for m in world.said if isinstance(m, Ready)] == ["auto", "cuda"]


async def test_a_rank_that_outlives_its_trainer_is_killed_with_it(tmp_path):
    program = """
    import subprocess
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    end.send(Ready(str(rank.pid), 1, 1)); end.receive(None); time.sleep(3600)
    """
    async with supervised(tmp_path, program) as (world, running):
        await world.until(lambda: "Ready" in world.names())
        rank = int(next(m.device for m in world.said if isinstance(m, Ready)))
        await ended(world.trainer.stop(0.1))
        await ended(running)
    await until(lambda: not alive(rank), "it is gone with the trainer")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_trainer_that_cannot_be_killed_ends_the_peer_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(link_module, "KILLED_SECONDS", 0.2)
    with monkeypatch.context() as m:
        m.setattr(TrainerLink, "kill", lambda self, why="": None)  # as if the kernel waited for a device
        hang = "import socket; socket.socket(fileno=a.fd).shutdown(socket.SHUT_RDWR); time.sleep(3600)"
        world = World(tmp_path, hang, None)
        with pytest.raises(TrainerDied, match="cannot be ended"):
            await ended(world.trainer.run(), 60)
    assert world.trainer.link is not None
    world.trainer.link.kill()
    await world.trainer.link.stop()
