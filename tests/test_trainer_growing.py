"""An update that is written while it is made: the same bytes as ever, told of in order, and never in the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from peer.channel import MakeUpdate, UpdateGrows, UpdateMade
from peer.errors import ChannelError
from peer.training.growing import GrowingFile
from peer.training.trainer import Trainer
from protocol.codec import interface
from protocol.errors import CodecError
from protocol.merkle import CHUNK, blob_digest
from protocol.spec import CodecSpec
from tests.trainer_world import GENESIS, World

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 2048}


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    monkeypatch.setattr(interface, "RUN_CHUNKS", 8)
    monkeypatch.setattr("peer.training.growing.TELL_SECONDS", 0.0)
    return World.make(tmp_path, config=WIDE, codec=CodecSpec(kind="none", beta=1.0))


@pytest.fixture
def trainer(world):
    made = Trainer(world.start(1), lambda *_: None)
    made.load(world.load())
    made.step(made.batches.take(made.claims.counter))
    yield made
    made.close()


def make(world: World, trainer: Trainer, say=lambda grown: None, **ask) -> UpdateMade:
    made = trainer.make_update(replace(MakeUpdate(0, GENESIS, world.folder / "u", streamed=True), **ask), say)
    assert isinstance(made, UpdateMade)
    return made


def test_each_word_names_bytes_that_are_there_and_stay(world, trainer):
    told: list[tuple[int, bytes]] = []

    def say(grown: UpdateGrows) -> None:
        assert grown.parent == GENESIS
        told.append((grown.final, grown.path.read_bytes()[: grown.final]))

    made = make(world, trainer, say)
    data = made.blob_path.read_bytes()
    assert made.size == len(data) > 4 * CHUNK and blob_digest(data) == made.digest
    assert len(told) > 3 and [n for n, _ in told] == sorted({n for n, _ in told})
    assert told[0][0] < 2 * CHUNK and told[-1][0] == made.size
    assert all(len(start) == n and data.startswith(start) for n, start in told)
    assert not list(trainer.folder.folder.glob(".*"))
    assert trainer.folder.update_file(made.digest).read_bytes() == data


def test_who_does_not_ask_for_it_hears_nothing_and_gets_the_same(world, trainer):
    told: list[UpdateGrows] = []
    made = make(world, trainer, told.append, streamed=False)
    assert not told and blob_digest(made.blob_path.read_bytes()) == made.digest
    # Asked again, it is there already.
    assert make(world, trainer, told.append, out=world.folder / "again").digest == made.digest and not told


def test_a_node_that_is_gone_does_not_spoil_the_update(world, trainer):
    def gone(grown: UpdateGrows) -> None:
        raise ChannelError("the node closed the channel")

    made = make(world, trainer, gone)
    assert blob_digest(made.blob_path.read_bytes()) == made.digest
    assert not list(trainer.folder.folder.glob(".*"))


def test_a_disk_that_fails_meanwhile_does_not_spoil_the_update(world, trainer):
    (trainer.folder.folder / ".update-growing.part").mkdir(parents=True)
    told: list[UpdateGrows] = []
    made = make(world, trainer, told.append)
    assert not told and blob_digest(made.blob_path.read_bytes()) == made.digest


def test_an_update_that_cannot_be_made_leaves_no_file(world, trainer):
    trainer.outer.feedback["model.layers.2.self_attn.v_proj.weight"].fill_(float("nan"))
    told: list[UpdateGrows] = []
    with pytest.raises(CodecError):
        make(world, trainer, told.append)
    assert told and not told[0].path.exists()


def test_it_is_told_of_when_there_is_a_chunk_more_and_not_too_often(tmp_path: Path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("peer.training.growing.TELL_SECONDS", 0.1)
    monkeypatch.setattr("peer.training.growing.time.monotonic", lambda: clock[0])
    told: list[int] = []
    data = memoryview(bytes(5 * CHUNK + 7))
    grown = GrowingFile(tmp_path / "g", len(data), lambda path, n: told.append(n))
    for at, size in ((0.0, CHUNK - 1), (0.0, CHUNK + 1), (0.05, 3 * CHUNK), (0.2, 4 * CHUNK), (0.2, len(data))):
        clock[0] = 100.0 + at
        grown.take(data[:size])
    assert told == [CHUNK + 1, 4 * CHUNK, len(data)]
    assert grown.finish(tmp_path / "whole") and (tmp_path / "whole").read_bytes() == data
    grown.close()
    assert not (tmp_path / "g").exists()


def test_an_update_of_many_ranks_is_never_said_to_grow_and_is_written_at_the_end(tmp_path: Path):
    grown = GrowingFile(tmp_path / "g", 5, lambda path, n: pytest.fail("nothing is there yet"))
    assert not grown.finish(tmp_path / "whole") and not list(tmp_path.iterdir())
    grown.close()
