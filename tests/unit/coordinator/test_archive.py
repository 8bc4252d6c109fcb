"""The archive: whole folders or none, of the chain as it is, and only what may be made final."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from coordinator.checkpoints.archive import LEFT, MANIFEST, Archive, ArchivedState, read_manifest
from coordinator.checkpoints.evaluation import end_tokens, load_archived, measure
from coordinator.checkpoints.retention import RetentionPolicy
from coordinator.errors import CoordinatorError
from protocol.chain import genesis_digest
from protocol.ids import Digest
from protocol.layout import MOMENTUM, REFERENCE_NORMS
from protocol.model import build_model, parameters_of
from protocol.spec import DataSpec
from tests.support.checkpoint_world import Uniform, shards
from tests.support.coordinator_fakes import state
from tests.support.observer_world import SPEC, Observed
from tests.support.specs import digest


class World:
    def __init__(self, folder: Path):
        self.checkpoint, self.tokenizer = folder / "checkpoint", folder / "tokenizer"
        self.checkpoint.write_bytes(b"weights")
        self.tokenizer.write_text("{}")
        self.archive = Archive(folder / "checkpoints", SPEC, policy=RetentionPolicy(newest=3))

    def add(self, round: int, *, of: Digest | None = None, record: Digest | None = None) -> ArchivedState:
        return self.archive.add(
            self.checkpoint, self.tokenizer, round=round, state=of or state(round),
            record=record or digest(round), tokens=10 * round,
        )  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_archived_state_says_what_it_is_and_holds_the_checkpoint_itself(world: World):
    made = world.add(5)
    assert read_manifest(made.folder) == made == world.archive.all()[-1]
    assert {p.name for p in made.folder.iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "cairn.json",
    }
    assert (made.folder / "model.safetensors").read_bytes() == b"weights"
    assert world.add(5) == made  # again: nothing happens


def test_the_first_and_the_newest_stay(world: World):
    for round_ in range(0, 35, 5):
        world.add(round_)
    assert [a.round for a in world.archive.all()] == [0, 20, 25, 30]


def test_another_state_of_the_same_round_takes_the_place_of_the_one_of_a_branch_that_lost(world: World):
    world.add(5)
    world.add(5, of=digest("other"))
    assert [a.state for a in world.archive.all()] == [digest("other")]


def test_each_manifest_is_read_once_however_many_states_there_are(world: World, monkeypatch):
    read: list[Path] = []
    monkeypatch.setattr(
        "coordinator.checkpoints.archive.read_manifest", lambda folder: read.append(folder) or read_manifest(folder)
    )
    manifest = json.loads((world.add(0).folder / MANIFEST).read_bytes())
    for round_ in range(1, 4200):
        folder = world.archive.folder / f"round-{round_:06d}"
        folder.mkdir()
        (folder / MANIFEST).write_text(json.dumps(manifest | {"round": round_}))
    assert len(world.archive.all()) == 4200
    (folder / MANIFEST).write_text(json.dumps(manifest | {"round": round_, "tokens": 77777}))
    read.clear()
    assert world.archive.all()[-1].tokens == 77777 and read == [folder]


def test_a_restart_does_not_forget_whose_copies_are_to_be_deleted(world: World):
    first, second = world.add(5), world.add(10)
    world.archive.drop([first, second])
    again = Archive(world.archive.folder, SPEC)
    assert again.left() == {first.state, second.state} and again.all() == []
    again.forget_left([first.state])
    assert Archive(world.archive.folder, SPEC).left() == {second.state}
    (world.archive.folder / LEFT).write_text("[1")
    assert Archive(world.archive.folder, SPEC).left() == set()


def test_of_the_states_whose_copies_are_to_be_deleted_only_the_newest_are_kept(world: World, monkeypatch):
    monkeypatch.setattr("coordinator.checkpoints.archive.MAX_LEFT", 3)
    states = []
    for round_ in (25, 5, 20, 10, 15):
        world.archive.drop([made := world.add(round_)])
        states.append(made.state)
    assert world.archive.left() == set(states[-3:]) == Archive(world.archive.folder, SPEC).left()


def test_a_process_killed_while_it_archived_leaves_nothing_for_good(world: World):
    left = world.archive.folder / ".round-000005.4711"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    assert world.archive.all() == []
    world.add(10)
    assert not left.exists() and [p.name for p in world.archive.folder.iterdir()] == ["round-000010"]


@pytest.mark.parametrize("number, remedy", [(errno.ENOSPC, "free some disk space"), (errno.EACCES, "writable")])
def test_a_disk_that_does_not_take_it_is_said_and_leaves_the_old_ones(world: World, monkeypatch, number, remedy):
    world.add(5)
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
    with pytest.raises(CoordinatorError, match=remedy):
        world.add(10)
    assert [p.name for p in world.archive.folder.iterdir()] == ["round-000005"]


def test_a_folder_that_is_something_else_is_passed_over(world: World):
    made = world.add(5)
    (made.folder / "cairn.json").write_text('{"run": 7}')
    (world.archive.folder / "round-x").mkdir()
    assert world.archive.all() == []


# -- the observer's archive follows the chain -----------------------------------------------------------------


@pytest.fixture
def observed(tmp_path: Path) -> Observed:
    return Observed(tmp_path)


async def test_what_is_archived_may_be_made_final_and_the_observer_keeps_it(observed: Observed):
    o = observed
    o.rounds(4, {1: 2})
    assert o.view.unarchived_checkpoint() is None and o.view.held_state() == 0
    o.rounds(3, {1: 2})
    await o.archive_newest()
    assert o.view.held_state() == 5 and o.node.held == [state(5)] == o.node.fetched
    assert o.view.unarchived_checkpoint() is None  # there already


async def test_a_state_that_a_full_disk_keeps_from_the_archive_stays_in_the_store(observed: Observed, monkeypatch):
    """The state with which a run ends is named by no record, and its peers may be gone when space comes back."""
    o = observed
    o.rounds(7, {1: 2})
    with monkeypatch.context() as m:
        m.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with pytest.raises(CoordinatorError, match="free some disk space"):
            await o.archive_newest()
    assert o.node.held == [state(5)] and o.view.held_state() == 0
    await o.archive_newest()
    assert o.view.held_state() == 5


async def test_a_chain_that_turned_below_an_archived_state_is_archived_anew_and_the_lost_state_goes(observed: Observed):
    o = observed
    fork_at = 2
    o.rounds(8, {1: 2})
    await o.archive_newest()
    lost = o.archive.all()[-1]
    assert o.view.held_state() == 5
    o.made = o.made.fork(fork_at)
    o.rounds(5, {2: 40})  # heavier, and shorter
    assert o.chain.head == o.made.head
    assert o.view.held_state() == 0  # the archived state is of a branch that lost
    o.rounds(1, {2: 40})
    await o.archive_newest()
    assert o.view.held_state() == 5
    assert [(a.round, a.record) for a in o.archive.all()] == [
        (0, genesis_digest(SPEC.run_id)), (5, o.made.certificates[4].record.digest),
    ]  # fmt: skip
    assert lost.record not in {a.record for a in o.archive.all()}
    assert o.view.unarchived_checkpoint() is None


async def test_a_lost_state_of_a_higher_round_does_not_stand_in_the_way_of_finals(observed: Observed):
    o = observed
    o.rounds(6, {1: 2})
    await o.archive_newest()
    o.rounds(5, {1: 2})
    await o.archive_newest()
    assert o.view.held_state() == 10
    o.made = o.made.fork(8)
    o.rounds(1, {2: 60})
    assert o.chain.height(o.chain.head) == 9
    assert o.view.held_state() == 5  # on both branches


# -- what a state is worth ------------------------------------------------------------------------------------


def data() -> DataSpec:
    return SPEC.data


def test_the_loss_of_a_model_that_knows_nothing_is_that_of_the_alphabet(tmp_path):
    model = Uniform()
    assert measure(model, data(), shards(tmp_path, 3, 2)).loss == pytest.approx(np.log(256), abs=1e-5)
    assert model.firsts == [0, 1, 2, 3, 4]


def test_of_much_data_evenly_spaced_windows_are_taken(tmp_path):
    model = Uniform()
    measure(model, data(), shards(tmp_path, 50, 50), max_windows=20)
    assert model.firsts == list(range(0, 100, 5))


def test_no_data_or_none_that_can_be_read_is_said(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(CoordinatorError, match="no validation data"):
        measure(Uniform(), data(), [tmp_path / "empty"])
    with pytest.raises(CoordinatorError, match="cannot be read"):
        measure(Uniform(), data(), [tmp_path / "missing"])


def test_a_folder_that_is_no_archived_checkpoint_does_not_load(tmp_path):
    with pytest.raises(CoordinatorError, match="not an archived checkpoint"):
        load_archived(tmp_path)


def archived_model(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> torch.nn.Module:
    model = build_model(SPEC.model.config, seed=1)
    tensors = {**parameters_of(model), **{MOMENTUM + n: torch.ones_like(p) for n, p in parameters_of(model).items()}}
    tensors[REFERENCE_NORMS] = torch.ones(len(parameters_of(model)))
    change(tensors)
    save_file({n: t.detach().contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SPEC.model.config))
    return model


def test_a_state_with_momentum_loads_as_its_model_without_a_word(tmp_path, capfd):
    model = archived_model(tmp_path, lambda tensors: None)
    loaded = load_archived(tmp_path)
    assert all(torch.equal(p, parameters_of(model)[n]) for n, p in parameters_of(loaded).items())
    assert capfd.readouterr() == ("", "")


def test_a_model_from_strangers_fetches_no_code_and_is_refused_in_one_line(tmp_path):
    model = archived_model(tmp_path, lambda tensors: None)
    whole = SPEC.model.config | {"_attn_implementation": "evil-org/kernel", "experts_implementation": "evil-org/x"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "generation_config.json").write_text("[]")
    loaded = load_archived(tmp_path)  # the library's loader would ask for the kernel, or for the package to fetch it
    assert parameters_of(loaded).keys() == parameters_of(model).keys()
    with pytest.raises(CoordinatorError, match=r"generation_config\.json: not a model's settings"):
        end_tokens(tmp_path)
    for wrong in ({"hidden_act": "nope"}, {"num_attention_heads": 0}, {"rope_scaling": {"rope_type": "nope"}}):
        (tmp_path / "config.json").write_text(json.dumps(SPEC.model.config | wrong))
        with pytest.raises(CoordinatorError, match=r"config\.json: model: "):
            load_archived(tmp_path)


def test_a_state_of_another_model_does_not_load(tmp_path):
    name = next(iter(parameters_of(build_model(SPEC.model.config))))
    archived_model(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CoordinatorError, match=f"not its config's: .*{name.split('.')[-1]}"):
        load_archived(tmp_path)
    archived_model(tmp_path, lambda tensors: tensors.update(strange=torch.zeros(2)))
    with pytest.raises(CoordinatorError, match="not its config's: strange"):
        load_archived(tmp_path)
