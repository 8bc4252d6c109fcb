"""A copy of a finished run's last state: whole and verified, or not at all."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from cairn import finished_run
from cairn.checkpoints import find_checkpoint
from cairn.finished_run import FetchStopped, fetch_archived, offer_model
from peer.coordinator_client import LastState, RunInfo
from peer.store import Store
from protocol.errors import CairnError
from tests.support.checkpoint_world import CheckpointWorld
from tests.support.specs import digest
from tests.support.waiting import ended


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointWorld:
    return CheckpointWorld(tmp_path, monkeypatch)


def test_a_verified_copy_lies_where_export_looks(world: CheckpointWorld, tmp_path: Path):
    made = world.final(5)
    folder = tmp_path / "volunteer"
    copy = folder / "checkpoints" / "round-000005"
    fetch_archived(str(made.folder), world.spec.run_id, made.state, copy, threading.Event())
    assert find_checkpoint(folder).origin.state == made.state
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]


def test_what_does_not_verify_leaves_nothing(world: CheckpointWorld, tmp_path: Path):
    made = world.final(5)
    copy = tmp_path / "volunteer" / "checkpoints" / "round-000005"
    with pytest.raises(CairnError, match="not the run's last"):
        fetch_archived(str(made.folder), world.spec.run_id, digest("another"), copy, threading.Event())
    model = made.folder / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.unlink()
    model.write_bytes(data)
    with pytest.raises(CairnError, match="damaged or exchanged"):
        fetch_archived(str(made.folder), world.spec.run_id, made.state, copy, threading.Event())
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(FetchStopped):
        fetch_archived(str(made.folder), world.spec.run_id, made.state, copy, stopped)
    assert not any(copy.parent.iterdir())


class Offer:
    """The offer to a volunteer with an empty folder."""

    def __init__(self, world: CheckpointWorld, folder: Path):
        self.made = world.final(5)
        self.folder = folder
        last = LastState(self.made.record, 5, self.made.state)
        self.info = RunInfo(world.spec, b"", (), "http://run.example", "finished: all is trained", last)
        self.addresses: list[str] = []

    def fetch(self, address: str, run: Any, state: Any, copy: Path, stopped: threading.Event) -> None:
        self.addresses.append(address)
        assert copy == self.folder / "checkpoints" / "round-000005" and state == self.made.state

    async def make(self, most: int = 1 << 40) -> None:
        with Store(self.folder / "store", 1 << 30) as store:
            await ended(offer_model(self.info, self.folder, store, most, asyncio.get_running_loop().create_future()))


async def test_a_volunteer_is_told_where_the_model_is_and_gets_it_if_there_is_room(
    world: CheckpointWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    offer = Offer(world, tmp_path / "volunteer")
    monkeypatch.setattr(finished_run, "fetch_archived", offer.fetch)
    await offer.make(most=1000)
    said = capsys.readouterr()
    assert "http://run.example/#model" in said.out and "--disk" in said.err and not offer.addresses
    await offer.make()
    assert offer.addresses == ["http://run.example/checkpoints/round-000005"]
    assert f"cairn export {offer.folder} my-model" in capsys.readouterr().out


async def test_who_has_the_state_fetches_nothing(world: CheckpointWorld, tmp_path: Path, monkeypatch, capsys):
    offer = Offer(world, tmp_path / "volunteer")
    monkeypatch.setattr(finished_run, "fetch_archived", offer.fetch)
    with Store(offer.folder / "store", 1 << 30) as store:
        assert store.put(world.files[5].read_bytes()) == offer.made.state
    await offer.make()
    assert not offer.addresses and "cairn export" in capsys.readouterr().out
