"""A node ends soon whenever it is asked to, and at once, with the cause, when it cannot go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peer.node import node as node_module
from peer.node import status_reporter, trainer_client
from peer.node.builder import build_node, load_chain
from peer.node.enrollment import Enrollment
from peer.node.network import Network
from peer.node.node import Node
from peer.node.options import NodeOptions
from peer.node.snapshot import read_snapshot
from peer.store import Store, StoreFull
from protocol.rounds.events import CertificateReceived
from tests.support.coordinator_fakes import ChainMaker, make_spec, state
from tests.support.specs import identity
from tests.support.waiting import NEVER, ended, until

SPEC = make_spec(genesis={"digest": state(0).hex(), "size": 524_288})


async def forever(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


async def at_once(*_: Any, **__: Any) -> None:
    return


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """No daemon is started here: the network side neither finds nor loses anybody."""
    for name in ("start", "stop"):
        monkeypatch.setattr(Network, name, at_once)
    for name in ("discover", "keep_running"):
        monkeypatch.setattr(Network, name, forever)
    return tmp_path


def node(folder: Path, store: Store, *, observer: bool = True) -> Node:
    membership = Enrollment(identity("me"), SPEC, store, None, "me", b"")
    options = NodeOptions(folder, observer=observer)
    return build_node(membership, options, load_chain(membership, options))


@pytest.mark.parametrize("slow", ["the swarm", "the run's assets"])
async def test_told_to_leave_while_it_starts_it_does_not_finish_starting_first(folder, monkeypatch, slow):
    if slow == "the swarm":
        monkeypatch.setattr(Network, "start", forever)
    monkeypatch.setattr(trainer_client, "fetch_assets", forever)
    monkeypatch.setattr(node_module, "HARD_STOP_SECONDS", NEVER)
    with Store(folder / "store", 1 << 30) as store:
        n = node(folder, store, observer=False)
        running = asyncio.create_task(n.run())
        await asyncio.sleep(0.05)
        n.leave()
        await ended(running)
        assert n.snapshot().finished and (shown := read_snapshot(folder)) is not None and shown.finished


async def test_while_the_runs_data_come_the_swarm_is_kept_and_the_admission_renewed(folder, monkeypatch):
    begun: set[str] = set()

    def noting(name: str):
        async def runs(*_: Any) -> None:
            begun.add(name)
            await forever()

        return runs

    monkeypatch.setattr(Network, "discover", noting("discover"))
    monkeypatch.setattr(Network, "keep_running", noting("keep_running"))
    monkeypatch.setattr(Enrollment, "keep_valid", noting("keep_valid"))
    monkeypatch.setattr(trainer_client, "fetch_assets", forever)
    with Store(folder / "store", 1 << 30) as store:
        n = node(folder, store, observer=False)
        running = asyncio.create_task(n.run())
        await until(lambda: begun == {"discover", "keep_running", "keep_valid"}, "all three have begun")
        n.leave()
        await ended(running)


async def test_an_observer_leaves_with_a_goodbye(folder, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(Network, "broadcast", lambda self, message: said.append(type(message.body).__name__))
    with Store(folder / "store", 1 << 30) as store:
        n = node(folder, store)
        running = asyncio.create_task(n.run())
        await ended(n.started(running))
        n.leave()
        await ended(running)
    assert said[0] == "Heartbeat" and said[-1] == "Goodbye"


async def test_a_certificate_that_the_disk_does_not_take_ends_the_node_with_that(folder, monkeypatch):
    with Store(folder / "store", 1 << 30) as store:
        n = node(folder, store)

        def full(*_: Any, **_options: Any) -> None:
            raise StoreFull("writing the certificate: no space left; free some disk space")

        monkeypatch.setattr(store, "append_certificate", full)
        running = asyncio.create_task(n.run())
        await ended(n.started(running))
        n.post(CertificateReceived(ChainMaker(SPEC).add({1: 1}), identity("other").key))
        with pytest.raises(StoreFull, match="no space left"):
            await ended(running)


async def test_a_task_that_fails_ends_the_node_with_its_error_and_the_rest_is_stopped(folder, monkeypatch):
    stopped: list[bool] = []

    async def until_cancelled(self) -> None:
        try:
            await forever()
        finally:
            stopped.append(True)

    async def fails(self) -> None:
        await asyncio.sleep(0.05)
        raise StoreFull("no room")

    monkeypatch.setattr(Network, "discover", until_cancelled)
    monkeypatch.setattr(Network, "keep_running", fails)
    with Store(folder / "store", 1 << 30) as store:
        with pytest.raises(StoreFull, match="no room"):
            await ended(node(folder, store).run())
    assert stopped == [True]


async def test_a_cancellation_that_was_swallowed_does_not_keep_the_node(folder, monkeypatch):
    swallowed: list[bool] = []

    async def swallows_one(self) -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            swallowed.append(True)  # as `asyncio.wait_for` before Python 3.12 may
        await forever()

    monkeypatch.setattr(Network, "discover", swallows_one)
    with Store(folder / "store", 1 << 30) as store:
        n = node(folder, store)
        running = asyncio.create_task(n.run())
        await ended(n.started(running))
        n.leave()
        await ended(running)
    assert swallowed == [True]


async def test_a_status_file_that_cannot_be_written_is_said_once(folder, monkeypatch, caplog):
    tries: list[int] = []

    def full(*_: Any) -> None:
        tries.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status_reporter, "write_snapshot", full)
    monkeypatch.setattr(status_reporter, "SNAPSHOT_SECONDS", 0.01)
    with Store(folder / "store", 1 << 30) as store:
        n = node(folder, store)
        running = asyncio.create_task(n.run())
        await ended(n.started(running))
        await until(lambda: len(tries) >= 3, "it has tried three times")
        n.leave()
        await ended(running)
    assert caplog.text.count("status.json is not written: no space left") == 1
