"""However often a user's mind changes, one process of the trainer runs at a time, and none while the peer rests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer import channel
from peer.node import trainer_client
from peer.node.options import NodeOptions
from peer.node.rest import RestWish
from peer.node.tasks import Tasks
from peer.node.trainer_client import RELEASE_SECONDS, TrainerClient
from peer.node.trainer_supervisor import EXIT_SECONDS
from peer.swarm.pace import Pace
from protocol.rounds.actions import SyncState
from protocol.rounds.rest import HAND_IN_SECONDS, REST_SECONDS
from tests.support.specs import digest, identity, tiny_spec
from tests.support.waiting import ended, until


class Process:
    """A trainer's process that takes a moment to end."""

    made: list[Process]

    def __init__(
        self, *_: Any, gpu_memory: Callable[[], int], on_message: Callable[[channel.FromTrainer], None],
        was_ready: bool, **__: Any,
    ):  # fmt: skip
        self.gpu_memory = gpu_memory
        self.on_message = on_message
        self.was_ready = was_ready
        self.stopping = False
        self.runs = True
        self.seconds = 0.0
        self.got: list[Any] = []
        self.made.append(self)

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def send(self, message: channel.ToTrainer) -> None:
        self.got.append(message)

    async def stop(self, seconds: float) -> bool:
        self.stopping = True
        self.seconds = seconds
        await asyncio.sleep(0.01)
        self.runs = False
        return True


def running() -> list[Process]:
    return [process for process in Process.made if process.runs]


async def nothing(*_: Any, **__: Any) -> None:
    pass


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TrainerClient]:
    for name in ("remove_outdated_state", "remove_saved_state"):
        monkeypatch.setattr(trainer_client, name, lambda *_: None)
    monkeypatch.setattr(trainer_client, "start_message", lambda *_: SimpleNamespace(state_folder=tmp_path))
    monkeypatch.setattr(trainer_client, "fetch_assets", nothing)
    monkeypatch.setattr(Process, "made", [], raising=False)
    other: Any = SimpleNamespace(run=nothing, drop=lambda: None, sync=print, lend=print, scratch=tmp_path)
    made = TrainerClient(
        cast(Any, None), identity("me").key, NodeOptions(tmp_path), other, other, other, other, other, Tasks(), print,
        RestWish(), Pace(), supervise=cast(Any, Process),
    )  # fmt: skip
    yield made
    await made.tasks.cancel()


async def test_a_pause_before_the_last_one_has_ended_leaves_no_process(client):
    await ended(client.begin(cast(Any, None)))
    client.release()
    client.acquire()
    client.release()
    await until(lambda: len(Process.made) == 2 and not running(), "no process runs")
    await until(lambda: client.rest.is_free, "the devices are free")
    client.acquire()
    await until(lambda: len(Process.made) == 3, "a process is started again")
    assert len(running()) == 1 and not client.rest.is_free


async def test_the_process_after_a_rest_is_known_to_have_been_ready_before_it(client):
    await ended(client.begin(cast(Any, None)))
    client.release()
    client.acquire()
    await until(lambda: len(Process.made) == 2, "a process is started again")
    Process.made[1].on_message(channel.Ready("cpu", 1, 1))
    client.release()
    client.acquire()
    await until(lambda: len(Process.made) == 3, "and again")
    assert [process.was_ready for process in Process.made] == [False, False, True]


async def test_the_parts_of_a_rest_fit_in_five_seconds(client):
    await ended(client.begin(cast(Any, None)))
    client.release()
    await until(lambda: client.rest.is_free, "the devices are free")
    save = Process.made[0].seconds
    assert save == RELEASE_SECONDS >= 2.0 and HAND_IN_SECONDS + save + EXIT_SECONDS == REST_SECONDS == 5.0


async def test_a_rollback_during_a_rest_starts_one_process(client):
    await ended(client.begin(cast(Any, None)))
    client.release()
    await until(lambda: client.rest.is_free, "the devices are free")
    client.acquire()
    client.move(SyncState((), (), 0, 0, (), None, True, (), False))
    await until(lambda: len(Process.made) == 3, "the reset is made")
    assert len(running()) == 1


async def test_a_rollback_during_the_rest_that_a_peer_begins_with_removes_what_was_saved(client, monkeypatch):
    removed: list[Any] = []
    monkeypatch.setattr(trainer_client, "remove_saved_state", removed.append)
    client.rest.want("user", "a game")
    await ended(client.begin(cast(Any, None)))
    client.release()
    await until(lambda: client.rest.is_free, "the devices are free")
    assert not Process.made
    client.acquire()
    client.move(SyncState((), (), 0, 0, (), None, True, (), False))
    await until(lambda: removed and len(running()) == 1, "a process runs without the saved state")


async def test_a_rest_that_begins_during_a_rollback_leaves_no_process(client):
    await ended(client.begin(cast(Any, None)))
    client.move(SyncState((), (), 0, 0, (), None, True, (), False))
    await until(lambda: Process.made[0].stopping, "the process is being replaced")
    client.release()
    await until(lambda: client.rest.is_free, "the devices are free")
    await asyncio.sleep(0.05)
    assert not running() and client.rest.is_free
    client.acquire()
    await until(lambda: len(running()) == 1, "a process is started again")


async def test_a_reason_that_goes_before_the_node_follows_it_keeps_no_trainer_away(client):
    client.rest.want("schedule", "not yet")
    await ended(client.begin(cast(Any, None)))
    assert not Process.made
    sending = asyncio.create_task(client.send(cast(Any, digest("load"))))
    await asyncio.sleep(0)
    client.rest.want("schedule", "")
    client.hold(False)
    await ended(sending)
    (process,) = running()
    assert process.got == [digest("load")]


async def test_a_limit_of_a_gpu_counts_in_what_starts_after_a_rest(client, tmp_path):
    limits = [6]
    client.spec = tiny_spec(audit={"replayable": True}, codec={"kind": "sign", "beta": 0})
    client.options = NodeOptions(tmp_path, gpu_memory=lambda: limits[-1])
    await ended(client.begin(cast(Any, None)))
    assert Process.made[-1].gpu_memory() == 3  # checks have the other half
    client.release()
    limits.append(8)
    client.acquire()
    await until(lambda: len(Process.made) == 2, "a process is started again")
    assert Process.made[-1].gpu_memory() == 4
