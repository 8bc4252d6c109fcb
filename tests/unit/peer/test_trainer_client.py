"""The machine learns of a state that is not in the store, though it asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer import channel
from peer.node import trainer_client
from peer.node.options import NodeOptions
from peer.node.tasks import Tasks
from peer.node.trainer_client import TrainerClient
from peer.store import StoreFull
from protocol.rounds import events
from protocol.rounds.actions import KeepState
from tests.support.specs import digest, identity
from tests.support.waiting import ended, until

RECORD, STATE = digest("record"), digest("state")


class FullStore:
    """A store without room."""

    def __init__(self, folder: Path):
        self.scratch = folder

    def adopt(self, source: Path, digest: object) -> None:
        raise StoreFull("the disk is full")


class Supervisor:
    """A trainer that answers each message in the same way."""

    answer: channel.FromTrainer
    stopping = False

    def __init__(self, start: Any, *, on_message: Callable[[channel.FromTrainer], None], **_: Any):
        self._on_message = on_message

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def send(self, message: channel.ToTrainer) -> None:
        assert isinstance(message, channel.WriteState)
        self._on_message(self.answer)


async def nothing(*_: Any, **__: Any) -> None:
    pass


@pytest.mark.parametrize("adopts", [False, True], ids=["the trainer cannot write it", "the store has no room"])
async def test_a_state_that_could_not_be_kept_is_no_success(adopts: bool, tmp_path: Path, monkeypatch):
    for name in ("start_message", "remove_outdated_state"):
        monkeypatch.setattr(trainer_client, name, lambda *_: None)
    monkeypatch.setattr(trainer_client, "fetch_assets", nothing)
    written = tmp_path / "held"
    written.touch()
    failed = channel.Failed("write", "the disk is full", fatal=False)
    monkeypatch.setattr(
        Supervisor, "answer", channel.Applied(RECORD, STATE, 0.0, written) if adopts else failed, raising=False
    )
    posted: list[events.Event] = []
    other: Any = SimpleNamespace(run=nothing, prune=nothing, head=digest("head"))
    client = TrainerClient(
        cast(Any, None), identity("me").key, NodeOptions(tmp_path), cast(Any, FullStore(tmp_path)), other, other, other,
        other, Tasks(), posted.append, supervise=cast(Any, Supervisor),
    )  # fmt: skip
    await ended(client.begin(cast(Any, None)))
    client.keep_state(KeepState(RECORD))
    await until(lambda: posted, "the machine is informed")
    assert posted[0] == events.StateNotKept(RECORD)
    await client.tasks.cancel()
