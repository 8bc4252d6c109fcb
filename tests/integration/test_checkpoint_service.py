"""The archive within the coordinator: what its overview says, and a state that goes back into the swarm."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cairn.swarm_view import ObserverView
from coordinator.errors import CoordinatorError
from coordinator.service import Coordinator, CoordinatorConfig
from peer.store import Store
from protocol.errors import CairnError, MalformedError
from protocol.ids import Digest, Round
from protocol.message_codec import KeySigner
from protocol.messages import Finalization
from tests.support.checkpoint_world import CheckpointWorld
from tests.support.command_line import refused
from tests.support.observer_world import SPEC, Observed
from tests.support.specs import OWNER, digest
from tests.support.waiting import until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointWorld:
    return CheckpointWorld(tmp_path, monkeypatch)


async def test_the_coordinator_signs_what_it_settles_and_shows_the_newest_judgement(
    world: CheckpointWorld, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("coordinator.checkpoints.archiver.POLL_SECONDS", 0.1)
    world.rounds(12)
    world.add(0), world.add(5), world.add(10)
    keeper = world.keeper()
    keeper.evaluations.add(world.archive.all()[1], {"loss": 4.5, "windows": 3, "seconds": 1.0, "device": "cpu"}, [])
    config = CoordinatorConfig(world.folder / "run", "127.0.0.1", 0, "127.0.0.1", 0)
    coordinator = Coordinator(config, world.spec, world.envelope, OWNER, world.swarm, keeper)
    await coordinator.start()
    try:
        newest = await until(world.newest_final, "a checkpoint is final")
        assert newest is not None and newest.round == 5  # 12 rounds, three of depth: 8 is final, 10 is not
        o = await until(lambda: (o := coordinator.overview()).final_round == 8 and o, "8 rounds are shown as final")
        assert (o.final_round, o.validation_round, o.validation_loss, o.archive_problem) == (8, 5, 4.5, "")
        shown = keeper.checkpoints()
        assert [(c["round"], c["final"], c["validation_loss"]) for c in shown] == [
            (10, False, None), (5, True, 4.5), (0, True, None),
        ]  # fmt: skip
        assert {f["name"] for f in shown[1]["files"]} >= {"model.safetensors", "cairn.json", "certificate.bin"}
        assert keeper.samples(None, 10) == []
    finally:
        await coordinator.stop()


async def test_an_archived_state_goes_back_into_the_store_when_it_is_what_it_should_be(world: CheckpointWorld):
    made = world.final(5)
    held: list[Digest] = []

    async def hold(state: Digest) -> None:
        held.append(state)

    with Store(world.folder / "store", 10**9) as store:
        bus = SimpleNamespace(subscribe=lambda *_: None)
        node = SimpleNamespace(store=store, keep_checkpoint=hold, chain=None, bus=bus)
        view = ObserverView(cast(Any, node), world.spec, world.archive)
        await view.offer(made)
        assert store.has(made.state) and held == [made.state] and made.size
        assert store.verify(made.state)
        store.remove(made.state)
        assert (made.folder / "model.safetensors").exists()  # linked, not moved
        (made.folder / "model.safetensors").unlink()
        shutil.copyfile(world.files[0], made.folder / "model.safetensors")
        with pytest.raises(MalformedError, match="is not blob"):
            await view.offer(made)
        assert not store.has(made.state) and list(store.scratch.iterdir()) == []


async def test_a_full_disk_is_said_once_with_what_it_means_and_the_chain_is_followed(tmp_path, monkeypatch, caplog):
    o = Observed(tmp_path)
    o.rounds(7, {1: 2})
    tries = []

    def full(*a, **k):
        tries.append(1)
        raise CoordinatorError("the disk of checkpoints is full: 0.00 GB are free: free some disk space")

    monkeypatch.setattr(o.archive, "free_space", full)
    o.node.store.has = lambda d: False
    monkeypatch.setattr("cairn.swarm_view.wait_at_most", lambda event, seconds: asyncio.sleep(0.01))
    monkeypatch.setattr("cairn.swarm_view.RETRY_SECONDS", 0.01)
    keeping = asyncio.create_task(o.view.keep_archive())
    try:
        await until(lambda: len(tries) >= 3, "it has tried three times")
        said = [r.getMessage() for r in caplog.records if "not archived" in r.getMessage()]
        assert len(said) == 1 and "free some disk space" in said[0] and "no round becomes final" in said[0]
        assert "the checkpoint of round 5 was not archived" in o.view.archive_problem and o.view.held_state() == 0
        o.node.store.has = lambda d: True
        await until(lambda: o.view.held_state() == 5 and o.view.archive_problem == "", "the newest state is archived")
    finally:
        keeping.cancel()


async def test_what_was_signed_as_final_is_the_runs_however_far_the_chain_has_come(tmp_path):
    """A coordinator that was restored has its archive, and no chain yet: somebody else may make up one for it."""
    o = Observed(tmp_path)
    o.rounds(7, {1: 2})
    for number, final in ((10, False), (15, True)):
        made = o.archive.add(
            tmp_path / "genesis",
            tmp_path / "blob",
            round=number,
            state=digest(number),
            record=digest(-number),
            tokens=1,
        )
        if final:
            signed = KeySigner(OWNER).sign(Finalization(SPEC.run_id, Round(number), made.record))
            o.archive.mark_final(made, signed.encoded, b"")
    await o.archive_newest()
    assert [a.round for a in o.archive.all()] == [0, 5, 15]
    o.rounds(9, {1: 2})
    with pytest.raises(CairnError, match="another state of that round is final"):
        await o.archive_newest()
    with pytest.raises(CairnError, match="an earlier rollback has left it: those of rounds 5 are there"):
        await o.view.offer_state(digest(15), digest(-15))


def test_settings_that_are_wrong_are_refused_before_anything_starts(tmp_path: Path):
    (tmp_path / "run.toml").write_text("")
    (tmp_path / "coordinator.toml").write_text("[archive]\nnewst = 3\n")
    serve = ("coordinator", "serve", tmp_path / "run.toml", "--home", tmp_path)
    assert "coordinator.toml: archive.newst: is not a setting" in refused(*serve)
    assert "no such file" in refused(*serve, "--settings", "x")
