"""The trainer's words reach the machine in the right order, and a state that is not in the store is a failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer import channel
from peer.errors import PeerError
from peer.node import trainer_client
from peer.node.options import NodeOptions
from peer.node.rest import RestWish
from peer.node.tasks import Tasks
from peer.node.trainer_client import TrainerClient
from peer.store import Store, StoreFull
from peer.swarm.pace import Pace
from protocol.ids import Digest, Round
from protocol.rounds import events
from protocol.rounds.actions import KeepState, RequestUpdate
from tests.support.specs import digest, identity, tiny_spec
from tests.support.waiting import LIMIT, ended, until

RECORD, STATE = digest("record"), digest("state")


class FullStore:
    """A store without room for states; what it takes in, it takes when a test says so."""

    def __init__(self, folder: Path):
        self.scratch = folder
        self.slow = threading.Event()

    def adopt(self, source: Path, name: Digest) -> Digest:
        if name == STATE:
            raise StoreFull("the disk is full")
        self.slow.wait(LIMIT)
        return name


class Supervisor:
    """A trainer that answers each message in the same way."""

    answers: tuple[channel.FromTrainer, ...]
    stopping = False

    def __init__(
        self, start: Any, *, on_message: Callable[[channel.FromTrainer], None], on_lost: Callable[[str], None], **_: Any
    ):
        self._on_message = on_message
        self._on_lost = on_lost

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def send(self, message: channel.ToTrainer) -> None:
        for answer in self.answers:
            self._on_message(answer)
        if not self.answers:
            self._on_lost("killed")


async def nothing(*_: Any, **__: Any) -> None:
    pass


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    for name in ("start_message", "remove_outdated_state"):
        monkeypatch.setattr(trainer_client, name, lambda *_: None)
    monkeypatch.setattr(trainer_client, "fetch_assets", nothing)
    clients: list[TrainerClient] = []

    async def make(store: FullStore, post: Callable[[events.Event], None], *answers: channel.FromTrainer):
        monkeypatch.setattr(Supervisor, "answers", answers, raising=False)
        other: Any = SimpleNamespace(run=nothing, prune=nothing, head=digest("head"))
        other.sync = other.trust = other.protect_update = other.drop = print
        client = TrainerClient(
            cast(Any, None), identity("me").key, NodeOptions(tmp_path), cast(Any, store), other, other, other, other,
            Tasks(), post, RestWish(), Pace(), supervise=cast(Any, Supervisor),
        )  # fmt: skip
        clients.append(client)
        await ended(client.begin(cast(Any, "the network")))
        return client

    yield make
    for client in clients:
        await client.tasks.cancel()


@pytest.mark.parametrize("adopts", [False, True], ids=["the trainer cannot write it", "the store has no room"])
async def test_a_state_that_could_not_be_kept_is_no_success(make, adopts: bool, tmp_path: Path):
    written = channel.Applied(RECORD, STATE, tmp_path / "held")
    failed = channel.Failed("write", "the disk is full", fatal=False)
    posted: list[events.Event] = []
    client = await make(FullStore(tmp_path), posted.append, written if adopts else failed)
    client.keep_state(KeepState(RECORD))
    await until(lambda: posted, "the machine is informed")
    assert posted[0] == events.StateNotKept(RECORD)


@pytest.mark.parametrize("asked", [False, True])
async def test_a_checkpoint_that_the_trainer_could_not_write_is_reported_and_the_state_is_reached(
    make, asked: bool, tmp_path: Path
):
    posted: list[events.Event] = []
    client = await make(FullStore(tmp_path), posted.append, channel.Applied(RECORD, STATE, None))
    client.move(cast(Any, SimpleNamespace(reset=False, missed=(), is_checkpoint=asked)))
    await ended(client.send(cast(Any, None)))
    await until(lambda: events.StateReached(RECORD, STATE) in posted, "the state is reached")
    assert posted[:-1] == [events.StateNotKept(RECORD)] * asked


async def test_what_a_killed_trainer_was_writing_is_gone_before_the_next_one_starts(make, tmp_path: Path):
    kept, draft = tmp_path / "update-3.blob", tmp_path / ".state-4.safetensors.77.part"
    for path in (kept, draft):
        path.touch()
    client = await make(FullStore(tmp_path), lambda event: None)
    assert kept.exists() and not draft.exists()
    draft.touch()
    await ended(client.send(channel.Stop()))
    assert kept.exists() and not draft.exists()


async def test_windows_trained_while_an_update_was_stored_are_not_lost(make, tmp_path: Path):
    """A trainer with all windows of the next update says nothing more: a machine that saw none would wait for ever."""
    store, posted = FullStore(tmp_path), list[events.Event]()
    made = channel.UpdateMade(RECORD, tmp_path / "update", 9, digest("update"), 0, 0, 20, 5, 1.0)
    client = await make(store, posted.append, made, channel.Progress(20, 1.0, 1.0, False))
    client.request_update(RequestUpdate(Round(0), RECORD))
    await until(lambda: posted, "the progress is posted")
    store.slow.set()
    await until(lambda: any(isinstance(e, events.UpdateReady) for e in posted), "the update is posted")
    assert posted[-1] == events.TrainingProgress(20, 1.0, 1.0)


async def test_a_trainer_s_files_count_as_used(make, tmp_path: Path):
    with Store(tmp_path / "store", 10**9) as store:
        for size in (10**8, 0):
            client = await make(store, lambda event: None, channel.Ready("cpu", 1, 1, disk=size))
            await ended(client.send(channel.Stop()))
            assert store.used_bytes == size and store.free_bytes == 10**9 - size


async def test_training_data_from_addresses_counts_as_what_this_peer_gets(make, tmp_path: Path):
    """The limit of a day holds for it, too."""
    first, second = (channel.Progress(1, 1.0, 1.0, False, data_bytes=n) for n in (700, 900))
    client = await make(FullStore(tmp_path), lambda event: None, first, second)
    client.request_update(RequestUpdate(Round(0), RECORD))
    await until(lambda: client.progress == second, "the progress is here")
    assert client.pace.gone == 900


async def test_a_shard_that_nobody_gives_now_is_fetched_at_the_trainer_s_next_attempt(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
):
    fetched: list[Any] = []

    async def fetch(*_: Any, **__: Any) -> None:
        fetched.append(1)
        if len(fetched) == 1:
            raise PeerError("no member answers")

    monkeypatch.setattr(trainer_client, "fetch_training_files", fetch)
    spec = tiny_spec()
    with Store(tmp_path / "store", 10**9) as store:
        client = await make(store, lambda event: None, channel.DataUnavailable(spec.data.train[0].name))
        client.spec = spec
        for count in (1, 2):
            await ended(client.send(channel.Stop()))
            await until(lambda n=count: len(fetched) == n, "it is fetched")
        assert "is not repaired yet: no member answers" in caplog.text
