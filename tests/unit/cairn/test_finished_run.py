"""A copy of a finished run's last state: whole and verified, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cairn import finished_run
from cairn.checkpoints import find_checkpoint
from cairn.finished_run import FetchStopped, fetch_archived, offer_model
from cairn.peer_screen import PeerScreen
from coordinator.checkpoints.copies import file_reader
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
    made, came = world.final(5), []
    folder = tmp_path / "volunteer"
    copy = folder / "checkpoints" / "round-000005"
    fetch_archived(str(made.folder), world.spec.run_id, made.state, copy, threading.Event(), came.append)
    assert find_checkpoint(folder).origin.state == made.state
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]
    assert sum(came) == sum(p.stat().st_size for p in copy.iterdir())


def test_what_does_not_verify_leaves_nothing(world: CheckpointWorld, tmp_path: Path):
    made, came = world.final(5), []
    copy = tmp_path / "volunteer" / "checkpoints" / "round-000005"
    with pytest.raises(CairnError, match="not the run's last"):
        fetch_archived(str(made.folder), world.spec.run_id, digest("another"), copy, threading.Event(), came.append)
    model = made.folder / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.unlink()
    model.write_bytes(data)
    with pytest.raises(CairnError, match="damaged or exchanged"):
        fetch_archived(str(made.folder), world.spec.run_id, made.state, copy, threading.Event(), came.append)
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(FetchStopped):
        fetch_archived(str(made.folder), world.spec.run_id, made.state, copy, stopped, came.append)
    assert not any(copy.parent.iterdir())


class Offer:
    """The offer to a volunteer with an empty folder."""

    def __init__(self, world: CheckpointWorld, folder: Path):
        self.made = world.final(5)
        self.folder = folder
        last = LastState(self.made.record, 5, self.made.state)
        self.info = RunInfo(world.spec, b"", (), "http://run.example", "finished: all is trained", last)
        self.addresses: list[str] = []

    def fetch(self, address: str, run: Any, state: Any, copy: Path, stopped: threading.Event, note: Any) -> None:
        self.addresses.append(address)
        assert copy == self.folder / "checkpoints" / "round-000005" and state == self.made.state

    async def make(self, most: int = 1 << 40) -> None:
        with Store(self.folder / "store", 1 << 30) as store:
            never = asyncio.get_running_loop().create_future()
            await ended(offer_model(self.info, self.folder, store, most, never, PeerScreen()))


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


async def test_a_page_that_answers_no_more_holds_nobody(
    world: CheckpointWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    offer, answers, stopping = Offer(world, tmp_path / "volunteer"), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(*_: Any) -> None:
        loop.call_soon_threadsafe(stopping.set)
        answers.wait()

    monkeypatch.setattr(finished_run, "fetch_archived", hang)
    monkeypatch.setattr(finished_run, "STOP_SECONDS", 0.1)
    with Store(offer.folder / "store", 1 << 30) as store:
        stops = asyncio.ensure_future(stopping.wait())  # Ctrl-C, once the fetch has begun
        await ended(offer_model(offer.info, offer.folder, store, 1 << 40, stops, PeerScreen()))
    assert "it was stopped, or took too long" in capsys.readouterr().err
    answers.set()


def test_a_page_sends_nobody_to_another_address():
    asked: list[str] = []

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/round-000005"
        for redirects in (True, False):
            asked.clear()
            with contextlib.suppress(CairnError):
                list(file_reader(address, redirects=redirects)("cairn.json"))
            assert ("/elsewhere" in asked) is redirects and "/round-000005/cairn.json" in asked
        server.shutdown()
