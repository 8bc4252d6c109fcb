"""A checkpoint goes out as a model that Hugging Face's libraries load, and a model comes in as a run's first state."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import tests.support.coordinator_fakes as fakes
from cairn.checkpoints import find_checkpoint
from coordinator.authoring import tokens
from coordinator.authoring.documents import TextSegment
from coordinator.authoring.errors import RunChangedError, RunFileError
from coordinator.authoring.resolve import ResolvedRun, resolve
from coordinator.authoring.runfile import load_run
from coordinator.authoring.weights import WeightsError, read, read_headers
from coordinator.checkpoints.archive import MANIFEST, Archive
from peer.node.chain_store import DIRECTIVE
from peer.node.snapshot import Snapshot, write_snapshot
from peer.store import Store
from protocol.errors import CairnError
from protocol.ids import Digest, Round, RunId
from protocol.invite import HostPort, Invite
from protocol.layout import Layout, is_outer_tensor
from protocol.message_codec import KeySigner, encode_certificate
from protocol.messages import Directive, Finalization, Rollback
from protocol.model import build_model, load_state, model_layout, parameters_of, plain_config
from protocol.spec import RunSpec
from protocol.state import checkpoint_chunks, state_digest, state_layout, tensors_from_checkpoint
from tests.support.command_line import cairn, refused
from tests.support.specs import OWNER, digest

RUN = """
[run]
name = "little"
seed = 3
[model]
model_type = "llama"
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
tie_word_embeddings = true
max_position_embeddings = 64
[data]
source = "documents.jsonl"
window = 16
vocabulary = 300
[inner.schedule]
kind = "constant"
[outer]
optimizer = "nesterov"
[round]
target_tokens = 4_000
[checkpoint]
every = 2
"""
MODELS = {
    "llama": {},
    "llama, untied": {"tie_word_embeddings": False},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2},
    "gpt_neox": {"model_type": "gpt_neox", "tie_word_embeddings": False},
}
"""The last two have files in which tensors have other names than in the model."""

SMALL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 64, "vocab_size": 300,
}  # fmt: skip


@dataclass
class World:
    """A run whose model has been trained (its weights are noise), as its owner's and a volunteer's disk have it."""

    folder: Path
    run: ResolvedRun

    @property
    def spec(self) -> RunSpec:
        return self.run.spec

    @property
    def tokenizer(self) -> Path:
        return self.run.blobs[self.spec.tokenizer.name]

    @property
    def layout(self) -> Layout:
        return state_layout(self.spec.model.layout, self.spec.outer)

    def state(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {t.name: torch.randn(t.shape, generator=generator) / 8 for t in self.layout.tensors}

    def checkpoint(self, seed: int) -> tuple[Path, Digest]:
        path = self.folder / f"state-{seed}"
        path.write_bytes(b"".join(checkpoint_chunks(self.layout, self.state(seed))))
        return path, state_digest(self.layout, self.state(seed))

    def archive(self, round_: int) -> Path:
        """Archive a state in the owner's folder."""
        path, state = self.checkpoint(round_)
        archive = Archive(self.folder / "owner" / "checkpoints", self.spec, spec_envelope=self.run.spec_envelope)
        record = digest(round_)
        return archive.add(path, self.tokenizer, round=round_, state=state, record=record, tokens=1000 * round_).folder

    def copy_to(self, folder: Path, round_: int, epoch: int = 0) -> Path:
        """Copy a state that is final to where a volunteer keeps a run's last state."""
        copy = folder / "checkpoints" / f"round-{round_:06d}"
        shutil.copytree(self.archive(round_), copy)
        final = KeySigner(OWNER).sign(Finalization(self.spec.run_id, Round(round_ - 1), digest(round_), epoch))
        manifest = json.loads((copy / MANIFEST).read_text()) | {"final": base64.b64encode(final.encoded).decode()}
        (copy / MANIFEST).write_text(json.dumps(manifest))
        return copy

    def logits(self, seed: int) -> torch.Tensor:
        model = build_model(self.spec.model.config).eval()
        load_state(model, {n: t for n, t in self.state(seed).items() if not is_outer_tensor(n)})
        return model(input_ids=torch.arange(12)[None]).logits

    def volunteer(self, monkeypatch: pytest.MonkeyPatch, *, rounds: int = 7, held: tuple[int, ...] = (2, 4)) -> Path:
        """Make the folder of a peer that is in round `rounds` and holds some states."""
        folder = self.folder / "volunteer"
        states = {r: self.checkpoint(r) for r in held}
        monkeypatch.setattr(fakes, "state", lambda r: states[r][1] if r in states else digest(f"state {r}"))
        chain = fakes.ChainMaker(self.spec)
        with Store(folder / "store", 10**9) as store:
            store.put(self.tokenizer.read_bytes())
            for path, _ in states.values():
                store.adopt(path)
            for i in range(rounds):
                c = chain.add({1: 2, 2: 1}, loss=5.0 - i / 10)
                store.append_certificate(encode_certificate(c), c.record.body.round, c.record.digest)
        (folder / "spec.json").write_bytes(self.spec.canonical())
        write_snapshot(folder, snapshot(round=rounds, head=str(chain.head), accepted_tokens=rounds * 3 * 16))
        return folder


def snapshot(**given: Any) -> Snapshot:
    plain = {
        "str": "",
        "int": 0,
        "bool": False,
        "float": 0.0,
        "dict[str, float]": {},
        "dict[str, int]": {},
        "list[dict[str, float]]": [],
    }
    plain |= {"float | None": None}
    needed = {f.name: plain[str(f.type)] for f in fields(Snapshot) if f.default is f.default_factory is MISSING}
    return Snapshot(**needed | given)


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., World]:
    """Begins the run of RUN, with (pattern, replacement) edits."""

    def begin(*edits: tuple[str, str], text: str = RUN) -> World:
        texts = [f"Document {i}: the quick brown fox jumps over {i * i} lazy dogs." for i in range(40)]
        (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        for pattern, replacement in edits:
            assert re.search(pattern, text), pattern
            text = re.sub(pattern, replacement, text)
        (tmp_path / "run.toml").write_text(text)
        return World(tmp_path, resolve(load_run(tmp_path / "run.toml"), tmp_path / "owner" / "run", OWNER))

    return begin


@pytest.fixture
def world(begin: Callable[..., World]) -> World:
    return begin()


def export(*arguments: str | Path) -> str:
    done = cairn("export", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(folder: Path) -> Any:
    given: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    model, said = given
    assert not any(said.values()), said
    return model.eval()


# -- out: what is written ------------------------------------------------------------------------------------


def test_an_exported_model_says_what_the_run_s_model_says(world: World, tmp_path: Path):
    export(world.archive(4), tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert torch.equal(model(input_ids=torch.arange(12)[None]).logits, world.logits(4))
    assert next(model.parameters()).dtype == torch.float32


def test_the_weights_are_the_model_s_alone(world: World, tmp_path: Path):
    export(world.archive(4), tmp_path / "out")
    tensors, state = load_file(tmp_path / "out" / "model.safetensors"), world.state(4)
    assert tensors.keys() == {t.name for t in world.spec.model.layout.tensors} < state.keys()
    assert "lm_head.weight" not in tensors
    assert all(torch.equal(t, state[n]) for n, t in tensors.items())


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_goes_out_and_comes_in_with_the_same_bits(kind: str, tmp_path: Path):
    from coordinator.export import export as write
    from coordinator.model_card import Origin

    config = plain_config(SMALL | MODELS[kind] | {"bos_token_id": 0, "eos_token_id": 0})
    model = build_model(config, seed=5)
    layout, tensors = model_layout(model), parameters_of(model)
    (tmp_path / "state").write_bytes(b"".join(checkpoint_chunks(layout, tensors)))
    (tmp_path / "tokenizer.json").write_bytes(tokens.train(iter([TextSegment("a b c", True)]), 300).file)
    origin = Origin("little", RunId(digest("run")), state_digest(layout, tensors))
    write(tmp_path / "state", config, tmp_path / "tokenizer.json", origin, tmp_path / "out")
    there = parameters_of(loaded(tmp_path / "out"))
    assert there.keys() == tensors.keys() and all(torch.equal(t, there[n]) for n, t in tensors.items())
    loaded(tmp_path / "out").save_pretrained(tmp_path / "saved")  # in the names that the type's files have
    for folder in ("out", "saved"):
        back = read(tmp_path / folder, config)
        assert back.keys() == tensors.keys() and all(torch.equal(t, back[n]) for n, t in tensors.items())


def test_the_tokenizer_is_the_run_s_and_loads(world: World, tmp_path: Path):
    export(world.archive(4), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == world.tokenizer.read_bytes()
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    text = "The quick brown fox: 49 lazy dogs."
    raw = Tokenizer.from_file(str(world.tokenizer)).encode(text).ids
    assert tokenizer(text)["input_ids"] == raw and tokenizer.decode(raw) == text
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.eos_token_id == 0
    assert tokenizer.model_max_length == 64


def test_the_config_and_the_card_say_what_it_is(world: World, tmp_path: Path):
    said = export(world.archive(4), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "vocab_size": 300, "eos_token_id": 0}
    assert wanted.items() <= config.items() and config["tie_word_embeddings"] is True
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["bos_token_id"] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    state = state_digest(world.layout, world.state(4))
    for fact in ("little", str(world.spec.run_id), "| 4 |", "4,000", str(state), "library_name: transformers"):
        assert fact in card
    assert "round 4" in said and world.spec.run_id.short in said
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt" and file.metadata()["cairn_state"] == str(state)


# -- out: what may be named ----------------------------------------------------------------------------------


def test_of_an_owner_s_folder_the_newest_archived_state_is_taken(world: World, tmp_path: Path):
    for round_ in (2, 10, 4):
        world.archive(round_)
    assert "round 10, 10,000 tokens" in export(tmp_path / "owner", tmp_path / "out")
    assert find_checkpoint(tmp_path / "owner" / "checkpoints").origin.round == 10


def test_text_is_generated_from_all_that_is_exported_and_from_the_export(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    places = [world.archive(4), tmp_path / "owner", world.volunteer(monkeypatch), tmp_path / "out"]
    export(places[0], places[-1])
    said = set()
    for place in places:
        done = cairn("generate", place, "--prompt", "The quick", "--tokens", "8", "--temperature", "0")
        assert done.returncode == 0, done.stderr
        said.add(done.stdout)
    assert len(said) == 1 and said.pop().startswith("The quick")


def test_an_archived_state_that_was_copied_elsewhere_still_says_its_run(world: World, tmp_path: Path):
    shutil.copytree(world.archive(4), tmp_path / "else" / "where" / "copy")
    found = find_checkpoint(tmp_path / "else" / "where" / "copy")
    assert (found.origin.name, found.origin.run, found.origin.round) == ("little", world.spec.run_id, 4)


def test_of_a_volunteer_s_folder_the_newest_held_state_is_taken_with_its_tokens_and_loss(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = world.volunteer(monkeypatch)
    assert "round 4, 192 tokens, training loss 4.7000" in export(folder, tmp_path / "out")
    assert torch.equal(loaded(tmp_path / "out")(input_ids=torch.arange(12)[None]).logits, world.logits(4))
    (folder / "status.json").unlink()
    origin = find_checkpoint(folder).origin
    assert origin.round == 4 and origin.tokens is None and origin.loss == pytest.approx(4.7)


def test_the_last_state_of_a_run_which_no_record_names_is_found(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    folder = world.volunteer(monkeypatch)
    path, state = world.checkpoint(7)
    with Store(folder / "store", 10**9) as store:
        store.adopt(path)
    status = json.loads((folder / "status.json").read_text()) | {"state": str(state), "state_round": 7}
    (folder / "status.json").write_text(json.dumps(status))
    origin = find_checkpoint(folder).origin
    assert (origin.round, origin.tokens, origin.loss) == (7, 7 * 48, pytest.approx(4.4))


@pytest.mark.parametrize("copied, newest", [(2, 4), (10, 10)])
def test_of_a_volunteer_s_copy_of_a_last_state_and_its_store_the_newer_is_taken(
    world: World, monkeypatch: pytest.MonkeyPatch, copied: int, newest: int
):
    folder = world.volunteer(monkeypatch)
    world.copy_to(folder, copied)
    assert find_checkpoint(folder).origin.round == newest


def test_of_a_volunteer_s_folder_no_state_is_taken_that_a_rollback_may_have_left(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    folder = world.volunteer(monkeypatch)
    left = world.copy_to(folder, 10)
    assert find_checkpoint(folder).origin.round == 10
    world.copy_to(folder, 8, epoch=1)  # the run ended again, earlier, and this peer was away
    said: list[str] = []
    assert find_checkpoint(folder, report=said.append).origin.round == 8
    assert len(said) == 1 and said[0].startswith(f"{left} is passed over: the owner has rolled the run back since")
    back = Rollback(2, digest("record"), Round(3), digest("state"))
    with Store(folder / "store", 10**9) as store:
        store.write_value(DIRECTIVE, KeySigner(OWNER).sign(Directive(world.spec.run_id, 1, rollback=back)).encoded)
    done = cairn("export", folder, tmp_path / "out")
    assert "round 4," in done.stdout and done.stderr.count("passed over") == 2
    assert find_checkpoint(left).origin.round == 10
    shutil.rmtree(folder / "store" / "blobs")
    (folder / "store" / "blobs").mkdir()
    with pytest.raises(CairnError, match="holds no checkpoint yet"):
        find_checkpoint(folder)


def test_a_file_of_a_volunteer_s_store_is_known_by_its_name(world: World, monkeypatch: pytest.MonkeyPatch):
    folder = world.volunteer(monkeypatch)
    name = str(state_digest(world.layout, world.state(2)))
    found = find_checkpoint(folder / "store" / "blobs" / name[:2] / name)
    assert (found.origin.round, found.origin.tokens) == (2, 96)
    (folder / "store" / "blobs" / name[:2] / name).rename(folder / "mine.safetensors")
    assert find_checkpoint(folder / "mine.safetensors").origin.round == 2


def test_a_file_elsewhere_needs_the_spec_and_the_tokenizer_beside_it(world: World, tmp_path: Path):
    (tmp_path / "away").mkdir()
    path = shutil.move(world.checkpoint(4)[0], tmp_path / "away" / "state")
    assert "--spec" in refused("export", path, tmp_path / "out")
    spec = tmp_path / "spec.json"
    spec.write_bytes(world.spec.canonical())
    assert "tokenizer.json beside" in refused("export", path, tmp_path / "out", "--spec", spec)
    shutil.copy(world.tokenizer, tmp_path / "away" / "tokenizer.json")
    export(path, tmp_path / "out", "--spec", spec)
    assert "not known" in (tmp_path / "out" / "README.md").read_text()
    export(path, tmp_path / "second", "--spec", tmp_path / "owner" / "run" / "spec.signed")
    assert (tmp_path / "second" / "model.safetensors").exists()


def test_a_file_under_the_tokenizer_s_name_is_not_passed_on_unless_it_is_the_run_s(world: World, tmp_path: Path):
    folder, secret = world.archive(4), tmp_path / "secret"
    secret.write_bytes(b"-" * world.tokenizer.stat().st_size)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(secret)
    shutil.copytree(folder, tmp_path / "away", symlinks=True)
    assert "the run's tokenizer" in refused("export", tmp_path / "away", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_token_s_number_that_no_tokenizer_can_have_is_left_out(world: World, tmp_path: Path):
    from coordinator.model_card import tokenizer_settings

    said = tokenizer_settings(world.tokenizer.read_text(), world.tokenizer, {"eos_token_id": 2**40, "bos_token_id": 0})
    assert "eos_token" not in said and said["bos_token"] == "<|endoftext|>"


# -- out: what is refused, and leaves nothing ----------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_half_written(tmp_path: Path):
    yield
    assert not [p for p in tmp_path.rglob(".*") if p.name.endswith((".partial", ".old"))]


def test_what_is_no_checkpoint_is_said_to_be_none(world: World, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "photo.jpg").write_bytes(os.urandom(5000))
    spec = ("--spec", tmp_path / "owner" / "run" / "spec.signed")
    export(world.archive(4), tmp_path / "model")
    assert "no such file" in refused("export", tmp_path / "gone", tmp_path / "out")
    assert "not a checkpoint" in refused("export", tmp_path / "empty", tmp_path / "out")
    assert "not a Cairn checkpoint" in refused("export", tmp_path / "photo.jpg", tmp_path / "out", *spec)
    assert "load already" in refused("export", tmp_path / "model", tmp_path / "out")
    damaged = world.archive(6)
    (damaged / "cairn.json").write_text("{}")
    assert "cairn.json: cannot be read" in refused("export", damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_run_is_refused(begin: Callable[..., World], tmp_path: Path):
    world = begin()
    archived = world.archive(4)
    other = Invite(RunId(digest("other")), Digest(digest("tls")), (HostPort("127.0.0.1", 9),))
    same = Invite(world.spec.run_id, Digest(digest("tls")), (HostPort("127.0.0.1", 9),))
    assert "not of run" in refused("export", archived, tmp_path / "out", "--invite", str(other))
    export(archived, tmp_path / "out", "--invite", str(same))
    assert "--invite" in refused("export", archived, tmp_path / "out", "--invite", "cairn1:abc")
    path, _ = world.checkpoint(4)
    (tmp_path / "away").mkdir()
    moved = shutil.move(path, tmp_path / "away" / "state")
    shutil.rmtree(tmp_path / "owner")
    wider = begin((r"hidden_size = 32", "hidden_size = 64"))
    shutil.copy(wider.tokenizer, tmp_path / "away" / "tokenizer.json")
    said = refused("export", moved, tmp_path / "new", "--spec", tmp_path / "owner" / "run" / "spec.signed")
    assert "another model" in said and not (tmp_path / "new").exists()


@pytest.mark.parametrize("harm", ["a bit", "the end"])
def test_a_damaged_checkpoint_is_found_out(world: World, tmp_path: Path, harm: str):
    archived = world.archive(4)
    data = bytearray((archived / "model.safetensors").read_bytes())
    data = data[:-1] if harm == "the end" else data
    data[-1] ^= 1
    (archived / "model.safetensors").unlink()
    (archived / "model.safetensors").write_bytes(data)
    said = refused("export", archived, tmp_path / "out")
    assert ("cut off" if harm == "the end" else "damaged") in said and not (tmp_path / "out").exists()


def test_only_a_model_is_ever_replaced_and_only_by_force(world: World, tmp_path: Path):
    archived, thesis = world.archive(4), tmp_path / "thesis"
    thesis.mkdir()
    export(archived, thesis)  # an empty folder is as good as none
    assert "--force" in refused("export", archived, thesis)
    export(world.archive(6), thesis, "--force")
    assert "| 6 |" in (thesis / "README.md").read_text()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "years.txt").write_text("of it")
    assert "no exported model" in refused("export", archived, tmp_path / "work", "--force")
    assert "no exported model" in refused("export", archived, archived, "--force")
    assert "not a folder" in refused("export", archived, tmp_path / "work" / "years.txt", "--force")
    assert (tmp_path / "work" / "years.txt").read_text() == "of it" and (archived / "cairn.json").exists()


def test_a_clone_of_a_hub_keeps_what_no_export_wrote(world: World, tmp_path: Path):
    archived, clone = world.archive(4), tmp_path / "clone"
    export(archived, clone)
    (clone / ".git").mkdir()
    for name in ("notes.txt", "eval.csv", "logo.png"):
        (clone / name).write_text("mine")
    said = refused("export", archived, clone, "--force")
    assert "would be lost: .git, eval.csv, logo.png, …: move that away, or name another folder" in said
    assert (clone / ".git").is_dir() and (clone / "notes.txt").read_text() == "mine"


def test_each_file_of_a_draft_is_on_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch):
    from coordinator.export import new_folder

    synced = []
    monkeypatch.setattr("coordinator.durable.sync", lambda path: synced.append((path.name, out.exists())))
    out = tmp_path / "out"
    with new_folder(out, 1, force=False) as draft:
        (draft / "adapter").write_text("as a library writes it")
    assert ("adapter", False) in synced


def test_of_two_exports_to_a_folder_the_second_is_refused_and_the_first_is_whole(world: World, tmp_path: Path):
    from coordinator.export import new_folder

    with new_folder(tmp_path / "out", 1, force=False) as draft:
        (draft / "config.json").write_text("{}")
        assert "another export writes there: wait" in refused("export", world.archive(4), tmp_path / "out")
        (draft / "model.safetensors").write_text("the first's")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert "--force" in refused("export", world.archive(4), tmp_path / "out")
    export(world.archive(4), tmp_path / "out", "--force")
    assert not list(tmp_path.glob(".out*"))


def test_what_a_killed_export_left_is_taken_away_by_the_next(world: World, tmp_path: Path):
    for left in (".out.partial", ".out.old"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "model.safetensors").write_bytes(bytes(1000))
    export(world.archive(4), tmp_path / "out")
    assert not (tmp_path / ".out.partial").exists()
    export(world.archive(4), tmp_path / "out", "--force")
    assert not (tmp_path / ".out.old").exists()


def test_a_disk_without_room_is_named_before_anything_is_written(world: World, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    assert "make room" in refused("export", world.archive(4), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_keeps_the_old_model(world: World, tmp_path: Path, monkeypatch):
    archived = world.archive(4)
    export(archived, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    later = world.archive(6)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert "no space left on device: make room" in refused("export", later, tmp_path / "out", "--force")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


# -- in: a run that goes on from a model ---------------------------------------------------------------------


@pytest.fixture
def model(world: World, tmp_path: Path) -> Path:
    export(world.archive(4), tmp_path / "model")
    return tmp_path / "model"


def init(model: Path, tmp_path: Path, *more: str) -> Path:
    path = tmp_path / "second.toml"
    done = cairn("run", "init", "--from", model, "--out", path, "--total-tokens", "1M", *more)
    assert done.returncode == 0, done.stderr
    text = path.read_text().replace("EDIT-ME/documents.jsonl", "documents.jsonl")
    path.write_text(re.sub(r"validation_every = \d+", "validation_every = 5", text))
    return path


def test_a_run_that_is_begun_from_an_exported_model_has_its_weights_as_genesis(
    world: World, model: Path, tmp_path: Path
):
    path = init(model, tmp_path)
    done = cairn("run", "validate", path)
    assert done.returncode == 0, done.stderr
    assert "initial weights: model" in done.stdout and "note:" not in done.stdout
    run = resolve(load_run(path), tmp_path / "second", OWNER)
    layout = state_layout(run.spec.model.layout, run.spec.outer)
    tensors = tensors_from_checkpoint(layout, run.blobs[run.spec.genesis.name].read_bytes())
    state = world.state(4)
    assert run.spec.model.layout == world.spec.model.layout
    assert all(torch.equal(tensors[t.name], state[t.name]) for t in run.spec.model.layout.tensors)
    assert run.spec.model.config == world.spec.model.config
    assert run.spec.tokenizer == world.spec.tokenizer


def test_the_file_that_init_writes_names_weights_and_tokenizer_and_says_what_each_field_means(
    model: Path, tmp_path: Path
):
    text = init(model, tmp_path).read_text()
    for line in ('weights = "model"', 'tokenizer = "model/tokenizer.json"', 'end_of_text = "<|endoftext|>"'):
        assert f"\n{line}\n" in text
    assert "\n#vocabulary = " in text and "total_tokens = 1_000_000" in text
    assert text.count("\n# ") > 60
    assert "--force" in refused("run", "init", "--from", model, "--out", tmp_path / "second.toml")


def test_sharded_and_half_precision_weights_come_in_as_fp32(world: World, model: Path, tmp_path: Path):
    half = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half", max_shard_size="20KB")
    assert len(list((tmp_path / "half").glob("model-*.safetensors"))) > 1
    tensors = read(tmp_path / "half", world.spec.model.config)
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, world.state(4)[name].bfloat16().float())


def test_once_a_run_has_begun_its_weights_are_its_own(model: Path, tmp_path: Path):
    path = init(model, tmp_path)
    first = resolve(load_run(path), tmp_path / "second", OWNER)
    genesis = tmp_path / "second" / "genesis.safetensors"
    genesis.unlink()
    assert resolve(load_run(path), tmp_path / "second", OWNER) == first  # made again
    genesis.unlink()
    _change(model, lambda tensors: tensors["model.norm.weight"].fill_(2.0))
    with pytest.raises(CairnError, match=r"now holds other weights.*restore the file"):
        resolve(load_run(path), tmp_path / "second", OWNER)
    path.write_text(path.read_text().replace('weights = "model"', ""))
    with pytest.raises(RunChangedError, match="run.weights was 'model', is now ''"):
        resolve(load_run(path), tmp_path / "second", OWNER)


def test_weights_by_another_config_are_said_to_be(model: Path, tmp_path: Path):
    path = init(model, tmp_path)
    text = path.read_text()
    path.write_text(text.replace("rms_norm_eps = 1e-06", "rms_norm_eps = 0.001"))
    assert "rms_norm_eps = 0.001" in path.read_text()
    done = cairn("run", "validate", path)
    assert done.returncode == 0 and "differs from the config of these weights in rms_norm_eps" in done.stdout
    path.write_text(text.replace("hidden_size = 32", "hidden_size = 64"))
    assert "in [model]" in refused("run", "validate", path)


# -- in: what is refused -------------------------------------------------------------------------------------


def _change(model: Path, how: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(model / "model.safetensors")
    how(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _config(model: Path, **fields: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _pickles_only(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def _index(model: Path, name: str) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


def test_a_window_that_the_model_has_no_positions_for_is_refused(model: Path, tmp_path: Path):
    said = refused("run", "init", "--from", model, "--window", "65", "--out", tmp_path / "second.toml")
    assert "--window" in said and "65 tokens do not fit the model's 64 positions" in said


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_pickles_only, r"pytorch_model\.bin is a pickle.*save_pretrained"),
        (lambda m: (m / "model.safetensors").unlink(), r"no model\.safetensors"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 100), r"not a safetensors file.*another copy"),
        (lambda m: (m / "config.json").unlink(), r"config\.json: no such file"),
        (lambda m: (m / "config.json").write_text("{"), r"config\.json: not a JSON file.*another copy"),
        (lambda m: _config(m, model_type="vit"), r"model_type is 'vit'.*no causal language model"),
        (lambda m: _config(m, auto_map={}), r"bring their own code"),
        (lambda m: _config(m, quantization_config={"bits": 4}), r"quantised"),
        (lambda m: (m / "adapter_config.json").write_text("{}"), r"an adapter.*merge"),
        (lambda m: (m / "tokenizer.json").unlink(), r"tokenizer\.json: no such file.*AutoTokenizer"),
        (lambda m: (m / "tokenizer.json").write_text("{}"), r"not a tokenizer\.json"),
        (lambda m: _config(m, hidden_size=64), r"in \[model\]"),
        (lambda m: _change(m, lambda t: t.pop("model.embed_tokens.weight")), r"1 tensors are missing"),
        (lambda m: _change(m, lambda t: t.update({"outer_momentum/x": torch.ones(3)})), r"`cairn export` first"),
        (lambda m: _index(m, "../model.safetensors"), r"files in the folder itself"),
        (lambda m: _index(m, "model-1.safetensors"), r"is missing.*whole copy"),
    ],
)
def test_a_folder_that_is_no_model_to_go_on_from_is_refused_in_a_line(model: Path, tmp_path: Path, harm, says: str):
    harm(model)
    said = refused("run", "init", "--from", model, "--out", tmp_path / "second.toml")
    assert re.search(says, said), said
    assert len(said.splitlines()) == 1 and not (tmp_path / "second.toml").exists()


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda t: t.update(strange=torch.ones(3)), r"1 tensors are no tensors of this model.*strange"),
        (
            lambda t: t.update(pad=torch.ones(40), extra=t.pop("model.norm.weight")),
            r"1 tensors are missing.*model\.norm\.weight",
        ),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), r"model\.norm\.weight is not finite"),
        (lambda t: t["model.norm.weight"][3:4].fill_(-float("inf")), r"not finite"),
        (lambda t: t["model.norm.weight"].fill_(1e9), r"1e\+09, beyond 1e\+06"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), r"is I8.*unquantised"),
        (lambda t: t.update({"lm_head.weight": torch.ones(300, 32)}), r"tie_word_embeddings = false|no tensors of"),
    ],
)
def test_weights_that_are_not_the_model_s_begin_no_run(model: Path, tmp_path: Path, harm, says: str):
    path = init(model, tmp_path)
    _change(model, harm)
    with pytest.raises(WeightsError, match=r"second\.toml: run\.weights: .*(" + says + ")") as e:
        resolve(load_run(path), tmp_path / "second", OWNER)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "second" / "spec.signed").exists()


def test_pickles_are_found_out_before_documents_are_prepared(model: Path, tmp_path: Path):
    path = init(model, tmp_path)
    _pickles_only(model)
    with pytest.raises(WeightsError, match="pickle"):
        resolve(load_run(path), tmp_path / "second", OWNER)
    assert not (tmp_path / "second" / "data").exists()
    assert "pickle" in refused("run", "validate", path)


def test_a_tokenizer_that_is_not_the_weights_own_is_refused_before_documents_are_prepared(model: Path, tmp_path: Path):
    path = init(model, tmp_path)
    text = path.read_text()
    (tmp_path / "other.json").write_bytes(tokens.train(iter([TextSegment("zap zip zop " * 50, True)]), 280).file)
    for mistake, says in (
        ('tokenizer = "other.json"', r"data\.tokenizer: not the tokenizer of run\.weights: token 2\d\d is"),
        ("vocabulary = 280", r'data\.vocabulary: .* their own tokenizer only: write tokenizer = "'),
    ):
        edited = text.replace('\ntokenizer = "model/tokenizer.json"\n', f"\n{mistake}\n")
        path.write_text(edited.replace('\nend_of_text = "<|endoftext|>"\n', "\n"))
        assert edited != text
        assert re.search(says, refused("run", "validate", path))
        with pytest.raises(RunFileError, match=says):
            resolve(load_run(path), tmp_path / "second", OWNER)
        assert not (tmp_path / "second" / "data").exists()


def test_what_a_folder_holds_is_told_without_reading_it(model: Path):
    found = read_headers(model)
    assert found.numel == sum(t.numel() for t in load_file(model / "model.safetensors").values())
    assert found.files == (model / "model.safetensors",)


@pytest.mark.parametrize("settings", ["[]", '{"watermarking_config": 5}'])
def test_settings_of_generation_at_which_the_weights_do_not_load_are_refused_early(
    model: Path, tmp_path: Path, settings: str
):
    path = init(model, tmp_path)
    (model / "generation_config.json").write_text(settings)
    assert "generation_config.json: transformers cannot use it: " in refused("run", "validate", path)


def test_fields_that_a_config_s_author_has_added_are_left_out_and_named(model: Path, tmp_path: Path):
    _config(model, is_llama_config=True, use_mrope=False)
    path = tmp_path / "second.toml"
    done = cairn("run", "init", "--from", model, "--out", path)
    assert done.returncode == 0 and "left out of [model]" in done.stdout and "is_llama_config, use_mrope" in done.stdout
    text = path.read_text()
    assert "is_llama_config, use_mrope" in text and "\nuse_mrope" not in text
    _config(model, intermediate_size=96)
    said = refused("run", "init", "--from", model, "--out", path, "--force")
    assert "in [model]" in said and "is_llama_config, use_mrope" in said and len(said.splitlines()) == 1


def test_a_tied_tensor_that_is_there_twice_and_names_without_prefix_are_taken(tmp_path: Path):
    config = plain_config({"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 1, "n_head": 4,
                           "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0})  # fmt: skip
    tensors = parameters_of(build_model(config, seed=2))
    old = {n.removeprefix("transformer."): t.clone() for n, t in tensors.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "lm_head.weight": old["wte.weight"].clone()}
    (tmp_path / "old").mkdir()
    save_file(old, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    back = read(tmp_path / "old", config)
    assert back.keys() == tensors.keys() and all(torch.equal(t, back[n]) for n, t in tensors.items())


def test_a_checkpoint_is_never_whole_in_memory(tmp_path: Path):
    from coordinator.export import export as write
    from coordinator.model_card import Origin

    config = plain_config(SMALL | {"vocab_size": 200_000, "bos_token_id": 0, "eos_token_id": 0})
    model = build_model(config, device="meta")
    layout = model_layout(model)
    with (tmp_path / "state").open("wb") as file:
        file.write(layout.checkpoint_header())
        file.truncate(layout.checkpoint_size)
    (tmp_path / "tokenizer.json").write_bytes(tokens.train(iter([TextSegment("a b c", True)]), 300).file)
    origin = Origin("little", RunId(digest("run")))
    tracemalloc.start()
    try:
        made = write(tmp_path / "state", config, tmp_path / "tokenizer.json", origin, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made.size > 25_000_000 and peak < 8_000_000
