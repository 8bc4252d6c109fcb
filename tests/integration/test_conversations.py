"""From a base model and a file of conversations to a model that answers in transformers' chat as it was taught."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.authoring.chat_template import TEMPLATE, ChatTemplate
from coordinator.authoring.resolve import ResolvedRun, resolve
from coordinator.authoring.runfile import load_run
from coordinator.checkpoints import evaluation_job
from coordinator.checkpoints.archive import Archive
from coordinator.export import export
from coordinator.model_card import Origin
from peer.channel import Load, Start
from peer.training.data import WindowReader
from peer.training.inner_optimizer import InnerOptimizer
from peer.training.trainer import Trainer
from protocol.ids import Digest, sha256
from protocol.model import build_model, load_state, parameters_of
from protocol.spec import parse_spec
from protocol.state import checkpoint_chunks, state_layout, tensors_from_checkpoint
from tests.support.chat_world import BEGIN, base_tokenizer, chat, write_rows
from tests.support.command_line import cairn, refused
from tests.support.specs import OWNER
from tests.support.trainer_world import peer_key

QUESTIONS = {"the dog?": "lazy", "the fox?": "quick and brown", "yes?": "no", "who says so?": "the lazy dog"}
WINDOW = 48
TINY = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def base_model(folder: Path) -> Path:
    """Make the folder of a base model that can do nothing yet."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(TINY))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.7, "repetition_penalty": 2.0, "do_sample": True, "x": "y"})
    )
    return folder


def init(folder: Path, *more: str) -> Path:
    rows = [chat(q, a) for q, a in QUESTIONS.items()] * 5 + [chat("the dog?", "lazy", "yes?", "no")] * 5
    write_rows(folder / "chats.jsonl", rows)
    path = folder / "run.toml"
    done = cairn(
        "run", "init", "--from", folder / "base", "--sft", folder / "chats.jsonl", "--out", path,
        "--window", str(WINDOW), "--peers", "2", "--total-tokens", "20k", *more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


def begun(path: Path, folder: Path) -> ResolvedRun:
    """Begin the run of a file that `init` wrote, with settings for a few quick steps."""
    text = re.sub(r"validation_every = \d+", "validation_every = 5", path.read_text())
    text = text.replace('optimizer = "muon"', 'optimizer = "adamw"').replace("beta = 0.5", "beta = 0.0")
    lines = ["lr = 5e-3" if line.startswith("lr = ") and "outer" not in text[: text.index(line)] else line
             for line in text.splitlines()]  # fmt: skip
    path.write_text("\n".join(lines))
    return resolve(load_run(path), folder, OWNER)


def trained(run: ResolvedRun, folder: Path, steps: int) -> tuple[Path, list[float]]:
    """Train one peer; return the checkpoint of its model, and the losses."""
    spec = run.spec
    (folder / "spec.json").write_bytes(spec.canonical())
    shards = {s.digest: str(run.blobs[s.name]) for s in spec.data.train}
    trainer = Trainer(Start(folder / "spec.json", peer_key(1), folder / "t", "cpu", 1, shards), print)
    try:
        trainer.load(Load(run.blobs[spec.genesis.name], spec.genesis.name, Digest(sha256(b"x")), 0, (), (), 0, 0))
        losses = []
        for number in range(steps):
            batch = trainer.steps.batches.take(number * spec.inner.batch)
            step = trainer.backend.inner.forward_backward(batch)
            assert step is not None and step.is_finite
            trainer.backend.inner.set_rate(min(1.0, 2 - 2 * number / steps))  # the last steps settle
            trainer.backend.inner.optimizer_step(step)
            losses.append(step.loss)
        layout = state_layout(spec.model.layout, spec.outer)
        inner = trainer.backend.inner
        assert isinstance(inner, InnerOptimizer)
        tensors = {n: p.detach() for n, p in inner.parameters.items()}
        tensors |= {t.name: torch.zeros(t.shape) for t in layout.tensors if t.name not in tensors}
        (folder / "state").write_bytes(b"".join(checkpoint_chunks(layout, tensors)))
    finally:
        trainer.close()
    return folder / "state", losses


@dataclass(frozen=True)
class Taught:
    """A run whose one peer has trained, and the checkpoint of its model."""

    folder: Path
    run: ResolvedRun
    state: Path
    losses: list[float]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    folder = tmp_path_factory.mktemp("taught")
    base_model(folder / "base")
    run = begun(init(folder), folder / "work")
    return Taught(folder, run, *trained(run, folder, 300))


def test_a_run_of_conversations_begins_and_goes_on(taught: Taught):
    path, spec = taught.folder / "run.toml", taught.run.spec
    done = cairn("run", "validate", path)
    assert done.returncode == 0 and "trained tokens; a window counts as" in done.stdout, done.stderr
    assert parse_spec(spec.canonical()) == spec and spec.data.conversations is not None
    assert spec.data.conversations.attention == "document"
    assert resolve(load_run(path), taught.folder / "work", OWNER).spec == spec


def test_a_model_answers_in_chat_what_it_was_taught(taught: Taught, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, spec, state = taught.run, taught.run.spec, taught.state
    assert taught.losses[-1] < 0.1 < 3 < taught.losses[0]
    marked = spec.data.conversations
    assert marked is not None and marked.chat is not None
    made = export(
        state, spec.model.config, run.blobs[spec.tokenizer.name], Origin(spec.name, spec.run_id), tmp_path / "out",
        chat=marked.chat,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    model: Any = AutoModelForCausalLM.from_pretrained(made.folder).eval()
    assert isinstance(model.generation_config.repetition_penalty, float), "transformers takes no whole number"
    assert model.generation_config.temperature == 0.7 and not hasattr(model.generation_config, "x")
    for question, answer in QUESTIONS.items():
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**asked, do_sample=False, max_new_tokens=40)[0, asked["input_ids"].shape[1] :]
        assert tokenizer.decode(ids) == f"{answer}<|im_end|>"  # it stops there by itself


def test_generate_asks_a_model_of_conversations_and_its_export_in_chat(taught: Taught, tmp_path: Path):
    run = taught.run
    state = shutil.copy(taught.state, tmp_path / "state.safetensors")
    shutil.copy(taught.folder / "spec.json", tmp_path)
    shutil.copy(run.blobs[run.spec.tokenizer.name], tmp_path / "tokenizer.json")
    assert cairn("export", state, tmp_path / "out").returncode == 0
    for place in (state, tmp_path / "out"):
        for question, answer in QUESTIONS.items():
            done = cairn("generate", place, "--prompt", question, "--tokens", "40", "--temperature", "0")
            assert done.stdout == f"{answer}\n", done.stderr
    raw = cairn("generate", state, "--prompt", "the fox?", "--tokens", "40", "--temperature", "0", "--raw")
    assert raw.stdout.startswith("the fox?") and raw.stdout != "the fox?\n"


def test_the_owner_s_prompts_are_answered_and_the_loss_is_of_trained_tokens(taught: Taught, tmp_path: Path):
    run, spec, state = taught.run, taught.run.spec, taught.state
    archive = Archive(tmp_path / "archive", spec, spec_envelope=run.spec_envelope)
    digest = Digest(sha256(b"state"))
    tokenizer = run.blobs[spec.tokenizer.name]
    folder = archive.add(state, tokenizer, round=1, state=digest, record=digest, tokens=1).folder
    job = {
        "spec": spec.canonical().decode(), "folder": str(folder), "windows": 8, "most": None, "seconds": None,
        "shards": [str(run.blobs[s.name]) for s in spec.data.validation], "prompts": ["the fox?"], "sample_tokens": 20,
        "temperature": 0.8, "seed": 1, "base": None,
    }  # fmt: skip
    rows: list[dict] = []
    evaluation_job.evaluate(job, spec, "cpu", rows.append)
    assert rows[0]["loss"] < 1 < 4 < taught.losses[0] and rows[0]["windows"] > 0
    held = {s.name: run.blobs[s.name] for s in spec.data.validation}
    reader = WindowReader(spec.data, held, part="validation", vocabulary=300)
    model = build_model(spec.model.config)
    state_of = tensors_from_checkpoint(state_layout(spec.model.layout, spec.outer), state.read_bytes())
    load_state(model, {name: state_of[name] for name in parameters_of(model)})
    inner = InnerOptimizer(spec.inner, model, torch.device("cpu"), conversations=spec.data.conversations)
    step = inner.forward_backward(reader.read(range(reader.total)))
    assert step is not None and rows[0]["loss"] == pytest.approx(step.loss, rel=1e-4)
    assert rows[1] == {"prompt": "the fox?", "text": "quick and brown", "temperature": 0.0}
    rows.clear()
    evaluation_job.evaluate(job | {"prompts": []}, spec, "cpu", rows.append)
    assert "user" in rows[1]["prompt"] and rows[1]["text"].strip() in QUESTIONS.values()


@pytest.mark.parametrize("begins", [False, True])
def test_a_base_model_without_a_template_gets_a_plain_one(tmp_path: Path, begins: bool):
    base_model(tmp_path / "base")
    base_tokenizer(tmp_path / "base", None, begins=begins)
    path = init(tmp_path)
    text = path.read_text()
    assert 'chat_template = "chat_template.jinja"' in text and (tmp_path / "chat_template.jinja").is_file()
    assert "#train_on = " in text and "#share = " in text
    # Its words are tokens of their own, so some conversations do not fit into so small a window.
    assert 'long = "drop"' in text and "are longer than a window of 48 tokens" in text
    run = begun(path, tmp_path / "work")
    marked = run.spec.data.conversations
    assert marked is not None and marked.chat is not None and marked.chat.end_tokens == [0]
    assert run.spec.round.max_update_tokens >= run.spec.inner.batch * marked.window_tokens
    question = ChatTemplate(marked.chat.template, {**marked.chat.special_tokens}, TEMPLATE).question(
        [{"role": "user", "content": "the dog?"}]
    )
    assert question == BEGIN * begins + "<user>\nthe dog?\n<assistant>\n"


def test_bad_conversations_are_named_before_a_run_file_is_written(tmp_path: Path):
    base_model(tmp_path / "base")
    write_rows(tmp_path / "bad.jsonl", [chat("q", "a"), {"messages": [{"role": "bot", "content": "x"}]}])
    said = refused(
        "run", "init", "--from", tmp_path / "base", "--sft", tmp_path / "bad.jsonl", "--out", tmp_path / "run.toml"
    )
    assert "bad.jsonl: line 2: message 1 has the role 'bot'" in said and not (tmp_path / "run.toml").exists()


def test_a_refused_run_file_leaves_no_template_and_a_template_that_is_there_serves_again(tmp_path: Path):
    """Of a model without a chat template of its own."""
    base_model(tmp_path / "base")
    base_tokenizer(tmp_path / "base", template=None)
    (tmp_path / "run.toml").write_text("mine")
    small = ("--window", str(WINDOW), "--peers", "2", "--total-tokens", "20k")
    asked = ("run", "init", "--from", tmp_path / "base", "--sft", tmp_path / "chats.jsonl", *small, "--out")
    write_rows(tmp_path / "chats.jsonl", [chat(q, a) for q, a in QUESTIONS.items()] * 5)
    assert "run.toml: is there already" in refused(*asked, tmp_path / "run.toml")
    assert not (tmp_path / TEMPLATE).exists()
    for name in ("first.toml", "second.toml"):
        done = cairn(*asked, tmp_path / name)
        assert done.returncode == 0 and (tmp_path / TEMPLATE).exists(), done.stderr
    (tmp_path / TEMPLATE).write_text("mine")
    said = refused(*asked, tmp_path / "third.toml")
    assert f"{TEMPLATE}: is there already" in said and not (tmp_path / "third.toml").exists()
    assert "trained tokens" not in said, "refused after it prepared all conversations"
    said = refused(*asked, tmp_path / "missing" / "run.toml")
    assert "there is no such folder: make it, or name another place" in said and "trained tokens" not in said


def test_a_full_temporary_folder_is_named_with_the_variable_that_names_another(tmp_path: Path, monkeypatch):
    base_model(tmp_path / "base")
    write_rows(tmp_path / "chats.jsonl", [chat(q, a) for q, a in QUESTIONS.items()])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    said = refused(
        "run", "init", "--from", tmp_path / "base", "--sft", tmp_path / "chats.jsonl", "--out", tmp_path / "run.toml"
    )
    assert "temporary files: no such file or directory: free some space, or name another folder as TMPDIR" in said


def test_init_writes_what_was_measured_best_for_fine_tuning(tmp_path: Path):
    base_model(tmp_path / "base")
    path = init(tmp_path)
    whole = load_run(path)
    assert (whole.inner.optimizer, whole.outer.optimizer, whole.outer.lr) == ("muon", "plain", 1.8)
    planned = re.search(r"# Planned: (\d+) inner steps x (\d+) peers x (\d+) windows x (\d+) tokens", path.read_text())
    assert planned and math.prod(map(int, planned.groups())) == whole.round.target_tokens, "not of trained tokens"
    assert "EDIT THIS" not in path.read_text() and "x data-parallel's" not in path.read_text()
    adapted = load_run(init(tmp_path, "--adapter", "4", "--force"))
    assert adapted.inner.optimizer == "adamw" and adapted.outer == whole.outer


def test_too_few_conversations_are_refused_with_the_peers_that_fit_and_few_rounds_are_a_note(tmp_path: Path):
    base_model(tmp_path / "base")
    path, rows = tmp_path / "run.toml", [chat(q, a) for q, a in QUESTIONS.items()]
    small = ("--window", str(WINDOW), "--out", path)
    asked = ("run", "init", "--from", tmp_path / "base", "--sft", tmp_path / "chats.jsonl", *small, "--peers")
    write_rows(tmp_path / "chats.jsonl", rows * 100)
    said = refused(*asked, "64")
    few = r"\(3 passes over 400 conversations\) are fewer than one round of 64 peers has: take --peers (\d+), or more"
    assert (fitting := re.search(few, said)) and "Invalid value for --peers:" in said, said
    refused(*asked, str(int(fitting[1]) + 1))
    done = cairn(*asked, fitting[1])
    assert done.returncode == 0 and re.search(r"note    only [12] rounds: the fewer, ", done.stdout), done.stderr
    assert re.search(r"warning: only [12] rounds: the fewer, ", cairn("run", "validate", path).stdout)
    write_rows(tmp_path / "chats.jsonl", rows)
    said = refused(*asked, "2", "--force")
    assert "Invalid value for --sft:" in said and "take more conversations, a larger --total-tokens" in said


def test_prepared_conversations_keep_their_window(tmp_path: Path):
    base_model(tmp_path / "base")
    path = init(tmp_path)
    out = tmp_path / "data"
    asked = ("data", "prepare", tmp_path / "chats.jsonl", "--out", out, "--tokenizer", tmp_path / "base/tokenizer.json")
    assert "give --window too" in refused(*asked, "--long", "drop")
    done = cairn(*asked, "--window", "48", "--validation-every", "5")
    assert done.returncode == 0 and "a window counts as" in done.stdout, done.stderr
    table = path.read_text().partition("\n[data]\n")
    rest = table[2].partition("\n[inner]\n")[2]
    for window, good in ((48, True), (32, False)):
        path.write_text(f'{table[0]}\n[data]\nprepared = "data"\nwindow = {window}\n[inner]{rest}')
        if good:
            assert resolve(load_run(path), tmp_path / "work", OWNER).spec.data.conversations is not None
        else:
            assert "packed into windows of 48 tokens" in refused("run", "validate", path)
