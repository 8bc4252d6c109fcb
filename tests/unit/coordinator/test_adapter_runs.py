"""A run that trains an adapter: from run.toml and a trained model to its spec and files, and out again for `peft`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cairn.checkpoints import find_checkpoint
from cairn.commands.run_file import DTYPES
from coordinator.adapter_export import export_adapter, export_merged
from coordinator.authoring.errors import RunFileError
from coordinator.authoring.measurements import NESTEROV, PLAIN
from coordinator.authoring.resolve import ResolvedRun, resolve
from coordinator.authoring.runfile import load_run
from coordinator.authoring.summary import dtypes_line, validate
from coordinator.checkpoints import evaluation_job
from coordinator.checkpoints.archive import Archive
from coordinator.checkpoints.evaluation import load_adapted, measure
from coordinator.export import ExportError
from coordinator.model_card import Origin
from peer.store.blobs import blob_file
from protocol.adapter import build_adapted, held_bytes
from protocol.codec import make_codec
from protocol.errors import SpecError
from protocol.identity import Identity
from protocol.ids import Digest, sha256
from protocol.ledger.credits import CreditRule
from protocol.merkle import blob_digest, blob_leaves
from protocol.model import model_layout, plain_config
from protocol.quantised import ABSMAX
from protocol.spec import AdapterSettings, AdapterSpec, parse_spec
from protocol.state import checkpoint_chunks, state_digest, state_layout, tensors_from_checkpoint
from protocol.units import byte_size
from tests.support.command_line import cairn, refused

OWNER = Identity(b"o" * 32)
RUN = """
[run]
name = "adapted"
seed = 3
total_tokens = 100_000
weights = "base"

[model]
model_type = "llama"
vocab_size = 300
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
tie_word_embeddings = true
max_position_embeddings = 64

[model.adapter]
rank = 4
alpha = 8
train = ["input_layernorm"]

[data]
source = "documents.jsonl"
window = 16
vocabulary = 300

[inner]
lr = 0.002
batch = 4

[round]
target_tokens = 1_000
"""
TOKENS = torch.arange(48).reshape(3, 16) * 5 % 300


def noise(run: ResolvedRun, folder: Path) -> Path:
    """Return the checkpoint of a state that is noise, in a new folder."""
    layout = state_layout(run.spec.model.layout, run.spec.outer)
    chance = torch.Generator().manual_seed(5)
    state = {t.name: torch.randn(t.shape, generator=chance) * 0.3 for t in layout.tensors}
    folder.mkdir()
    path = folder / "model.safetensors"
    path.write_bytes(b"".join(checkpoint_chunks(layout, state)))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with documents, and with a model in base/ whose norms are not all ones."""
    folder = tmp_path_factory.mktemp("adapted")
    texts = [f"Document {i}: the quick brown fox jumps over {i * i} lazy dogs." for i in range(40)]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder / "base")
    return folder


def run_file(folder: Path, *edits: tuple[str, str], name: str = "run.toml") -> Path:
    text = RUN
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture(scope="module")
def begun(base: Path) -> ResolvedRun:
    return resolve(load_run(run_file(base)), base / "work", OWNER)


def adapter_of(run: ResolvedRun) -> AdapterSpec:
    assert run.spec.model.adapter is not None
    return run.spec.model.adapter


def test_the_state_is_the_adapter_and_the_base_is_a_blob(base: Path, begun: ResolvedRun):
    spec, adapter = begun.spec, adapter_of(begun)
    assert parse_spec(spec.canonical()) == spec
    model = load_file(base / "base" / "model.safetensors")
    file = begun.blobs[adapter.base.name]
    data = file.read_bytes()
    assert len(data) == adapter.base.size and blob_digest(data) == adapter.base.name
    assert file == base / "work" / "base" / f"{adapter.base.digest}.safetensors"
    assert file.with_suffix(".leaves").read_bytes() == b"".join(blob_leaves(data))
    held = load_file(file)
    assert held.keys() == model.keys() and all(torch.equal(held[n], t.bfloat16()) for n, t in model.items())
    assert adapter.parameters == sum(t.numel() for t in model.values())
    names = {t.name for t in spec.model.layout.tensors}
    assert all(".lora_" in n or "input_layernorm" in n for n in names) and len(names) == 2 * (7 * 2 + 1)
    assert make_codec(spec.codec, spec.model.layout).size < adapter.base.size / 8


def test_a_file_that_names_no_optimizers_has_those_that_an_adapter_learns_best_with(base: Path, begun: ResolvedRun):
    inner, outer = begun.spec.inner, begun.spec.outer
    assert (inner.optimizer, outer.optimizer, outer.lr) == ("adamw", "plain", PLAIN.lr)
    edit = ("[inner]", '[outer]\noptimizer = "nesterov"\n\n[inner]\noptimizer = "muon"')
    chosen = load_run(run_file(base, edit, name="chosen.toml"))
    assert chosen.inner.optimizer == "muon" and chosen.outer == NESTEROV


def test_the_adapter_begins_as_nothing_and_what_is_trained_in_full_as_the_base(begun: ResolvedRun):
    spec, adapter = begun.spec, adapter_of(begun)
    layout = state_layout(spec.model.layout, spec.outer)
    state = tensors_from_checkpoint(layout, begun.blobs[spec.genesis.name].read_bytes())
    assert state_digest(layout, state) == spec.genesis.name
    held = load_file(begun.blobs[adapter.base.name])
    for name in (t.name for t in spec.model.layout.tensors):
        if ".lora_B." in name:
            assert not state[name].any()
        elif ".lora_A." in name:
            assert state[name].std() > 0.01
        else:
            assert torch.equal(state[name], held[name].float())


def test_a_run_begins_with_the_same_bits_again_and_lost_files_are_written_again(base: Path, begun: ResolvedRun):
    again = resolve(load_run(run_file(base)), base / "second", OWNER)
    assert again.spec == begun.spec
    file = begun.blobs[adapter_of(begun).base.name]
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert resolve(load_run(run_file(base)), base / "work", OWNER).blobs[adapter_of(begun).base.name] == file
    assert file.read_bytes() == data
    held = {begun.spec.genesis.name, adapter_of(begun).base.name}
    assert held.isdisjoint(resolve(load_run(run_file(base)), base / "work", OWNER, held=lambda b: b in held).blobs)


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        ('weights = "base"', "", RunFileError, "run.weights: an adapter needs a trained base"),
        ("rank = 4", "rank = 0", RunFileError, r"run.toml:\d+: model.adapter.rank"),
        ("rank = 4", "rnak = 4", RunFileError, "model.adapter.rnak: is not a field; did you mean rank"),
        ("rank = 4", 'rank = 4\ndtype = "int4"', RunFileError, "model.adapter.dtype: .*'int8' or 'nf4'"),
        ("rank = 4", 'rank = 4\ntargets = ["q_prj"]', SpecError, "no module q_prj: did you mean q_proj"),
        ("rank = 4", 'rank = 4\ntargets = ["q_proj", "Wqkv"]', SpecError, "no module Wqkv: did you mean"),
        ("rank = 4", 'rank = 4\ntargets = "lm_head"', SpecError, "lm_head is an embedding or the output layer"),
        ('"input_layernorm"', '"q_proj"', SpecError, "not a module of vectors alone"),
    ],
)
def test_a_wrong_adapter_is_refused_with_its_field(base: Path, old: str, new: str, error: type, says: str):
    with pytest.raises(error, match=says):
        resolve(load_run(run_file(base, (old, new))), base / "refused", OWNER)


def test_validate_tells_of_the_base(base: Path, begun: ResolvedRun):
    text = "\n".join(validate(run_file(base)))
    assert f"rank 4, alpha 8, on a frozen base of {adapter_of(begun).parameters:,} parameters (bfloat16)" in text
    assert "the frozen base)" in text


def test_validate_tells_which_dtype_of_the_base_suits_which_cards(base: Path, begun: ResolvedRun):
    for dtype in ("bfloat16", "nf4"):
        file = run_file(base, ("rank = 4", f'rank = 4\ndtype = "{dtype}"'), name="cards.toml")
        text = "\n".join(validate(file))
        (needed,) = re.findall(r"memory: (\S+ \S+) or more on each GPU", text)
        each = r"a GPU needs about (\S+ \S+) with bfloat16, (\S+ \S+) with int8, (\S+ \S+) with nf4\n"
        found = re.search(each, text)
        assert found is not None and found[1 if dtype == "bfloat16" else 3] == needed and len({*found.groups()}) == 3
    gpt2 = plain_config({"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 1, "n_head": 2})
    assert dtypes_line(AdapterSettings(rank=4, alpha=8), gpt2, 0).endswith(" with bfloat16")  # no linear layers


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8.5), ("nf4", 4.5)])
def test_a_base_is_quantised_once_and_used_and_merged_as_it_is_stored(
    base: Path, dtype: str, bits: float, tmp_path: Path
):
    file = run_file(base, ("rank = 4", f'rank = 4\ndtype = "{dtype}"'), name=f"{dtype}.toml")
    run = resolve(load_run(file), base / dtype, OWNER)
    assert resolve(load_run(file), tmp_path / "again", OWNER).spec == run.spec
    adapter, blob = adapter_of(run), run.blobs[adapter_of(run).base.name]
    assert blob_digest(blob.read_bytes()) == adapter.base.name
    held, model = load_file(blob), load_file(base / "base" / "model.safetensors")
    linear = {n for n in model if "_proj" in n}
    assert {n for n, t in held.items() if t.dtype == torch.uint8} == linear
    assert held.keys() == model.keys() | {n + ABSMAX for n in linear}
    assert all(torch.equal(held[n], model[n].bfloat16()) for n in model.keys() - linear)
    packed = sum(held[n].nbytes + held[n + ABSMAX].nbytes for n in linear)
    assert 8 * packed == bits * sum(model[n].numel() for n in linear)
    assert adapter.parameters == sum(t.numel() for t in model.values())
    text = "\n".join(validate(file))
    assert f"parameters ({dtype}), of which each peer fetches {byte_size(adapter.base.size)} once" in text
    assert f"{byte_size(held_bytes(run.spec.model.config, adapter, 'cuda'))} the frozen base)" in text

    path = noise(run, tmp_path / "state")
    given = (run.blobs[run.spec.tokenizer.name], origin(run, path))
    export_merged(path, run.spec.model.config, adapter, blob, *given, tmp_path / "merged")
    export_adapter(path, run.spec.model.config, adapter, *given, tmp_path / "adapter")
    assert f"parameters ({dtype})" in (tmp_path / "adapter" / "README.md").read_text()
    with torch.inference_mode():
        own = load_adapted(path, run.spec.model, blob)(input_ids=TOKENS).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(merged(input_ids=TOKENS).logits, own, rtol=1e-4, atol=1e-4)
        # On the base as it was before it was quantised, the adapter says nearly the same.
        loaded = PeftModel.from_pretrained(stored_base(base), str(tmp_path / "adapter")).eval()  # type: ignore[arg-type]
        off = (loaded(input_ids=TOKENS).logits - own).norm() / own.norm()
        assert 0 < off < (0.02 if dtype == "int8" else 0.2)


def test_credit_counts_a_frozen_parameter_for_two_thirds(begun: ResolvedRun):
    spec = begun.spec
    expected = 6 * spec.model.layout.numel + 4 * adapter_of(begun).parameters
    assert CreditRule.of(spec).flops_per_token == expected


# -- out again --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt(base: Path, begun: ResolvedRun) -> Path:
    return noise(begun, base / "round-000001")


@pytest.fixture(scope="module")
def logits(begun: ResolvedRun, learnt: Path) -> Tensor:
    """Return what the run's own model says."""
    model = load_adapted(learnt, begun.spec.model, begun.blobs[adapter_of(begun).base.name])
    with torch.inference_mode():
        return model(input_ids=TOKENS).logits


def stored_base(base: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base / "base", dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.eval()


def origin(run: ResolvedRun, state: Path) -> Origin:
    return Origin("adapted", run.spec.run_id, blob_digest(state.read_bytes()), 1, 1000)


def test_peft_loads_the_exported_adapter_and_it_says_the_same(
    base: Path, begun: ResolvedRun, learnt: Path, logits: Tensor, tmp_path: Path
):
    spec, out = begun.spec, tmp_path / "adapter"
    made = export_adapter(
        learnt, spec.model.config, adapter_of(begun), begun.blobs[spec.tokenizer.name], origin(begun, learnt), out
    )
    assert made.parameters == spec.model.layout.numel
    assert {f.name for f in out.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"
    }  # fmt: skip
    plain = stored_base(base)
    with torch.inference_mode():
        before = plain(input_ids=TOKENS).logits
        loaded = PeftModel.from_pretrained(plain, str(out)).eval()  # type: ignore[arg-type]
        torch.testing.assert_close(loaded(input_ids=TOKENS).logits, logits, rtol=1e-5, atol=1e-5)
    assert (before - logits).abs().max() > 0.1
    assert "PeftModel.from_pretrained" in (out / "README.md").read_text()


def test_a_state_is_evaluated_and_continues_prompts_on_its_base(
    base: Path, begun: ResolvedRun, learnt: Path, tmp_path: Path
):
    spec, digest = begun.spec, Digest(sha256(b"state"))
    archive = Archive(tmp_path / "archive", spec, spec_envelope=begun.spec_envelope)
    folder = archive.add(
        learnt, begun.blobs[spec.tokenizer.name], round=1, state=digest, record=digest, tokens=1
    ).folder
    shard = begun.blobs[spec.data.train[0].name]
    job = {
        "spec": spec.canonical().decode(), "folder": str(folder), "windows": 4, "most": None, "seconds": None,
        "shards": [str(shard)], "prompts": ["the fox"], "sample_tokens": 8, "temperature": 0.8, "seed": 1,
        "base": str(begun.blobs[adapter_of(begun).base.name]),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    evaluation_job.evaluate(job, spec, "cpu", rows.append)
    assert rows[0]["windows"] == 4 and [r["temperature"] for r in rows[1:]] == [0.0, 0.8]
    assert all(r["prompt"] == "the fox" and r["text"] for r in rows[1:])
    export_adapter(
        learnt, spec.model.config, adapter_of(begun), begun.blobs[spec.tokenizer.name], origin(begun, learnt),
        tmp_path / "adapter",
    )  # fmt: skip
    plain = stored_base(base)
    adapted = PeftModel.from_pretrained(stored_base(base), str(tmp_path / "adapter")).eval()  # type: ignore[arg-type]
    model = load_adapted(learnt, spec.model, begun.blobs[adapter_of(begun).base.name])
    losses = [measure(m, spec.data, [shard], max_windows=4).loss for m in (plain, adapted, model)]
    assert rows[0]["loss"] == pytest.approx(losses[1], rel=1e-4) and losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert abs(losses[0] - losses[1]) > 1e-3, "without the adapter it is another"


def test_an_exported_adapter_that_names_its_base_loads_alone(base: Path, learnt: Path, logits: Tensor, tmp_path: Path):
    out, spec = tmp_path / "adapter", base / "work" / "spec.signed"
    done = cairn("export", learnt, out, "--spec", spec)
    assert f"base    {base / 'base'}  (to publish OUT" in done.stdout, done.stderr
    assert f'AutoPeftModelForCausalLM.from_pretrained("{out}")' in done.stdout
    for kind in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        loaded: Any = kind.from_pretrained(str(out))
        with torch.inference_mode():
            off = (loaded.eval()(input_ids=TOKENS).logits - logits).norm() / logits.norm()
        assert off < 0.02  # of the base as it was before it was rounded to bfloat16
    done = cairn("export", learnt, out, "--spec", spec, "--force", "--base", "org/model-7B")
    assert "base    org/model-7B\n" in done.stdout, done.stderr
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/model-7B"
    card = (out / "README.md").read_text()
    assert (
        '\nbase_model: "org/model-7B"\n---\n' in card and 'AutoModelForCausalLM.from_pretrained("org/model-7B")' in card
    )
    assert "no folder here, and no model's name" in refused("export", learnt, out, "--base", "gone/to/rome")
    assert "exported alone" in refused("export", learnt, out, "--spec", spec, "--merge", "--base", "org/model-7B")


def test_a_merged_model_loads_alone_and_says_the_same(
    base: Path, begun: ResolvedRun, learnt: Path, logits: Tensor, tmp_path: Path
):
    spec, adapter, tokenizer = begun.spec, adapter_of(begun), begun.blobs[begun.spec.tokenizer.name]
    file = begun.blobs[adapter.base.name]
    config, out = spec.model.config, tmp_path / "merged"
    export_merged(learnt, config, adapter, file, tokenizer, origin(begun, learnt), out)
    with torch.inference_mode():
        merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        torch.testing.assert_close(merged(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
    wrong = tmp_path / "wrong"
    wrong.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ExportError, match="damaged: its digest"):
        export_merged(learnt, config, adapter, wrong, tokenizer, origin(begun, learnt), tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_state_of_another_adapter_is_not_exported(begun: ResolvedRun, learnt: Path, tmp_path: Path):
    spec = begun.spec
    other = adapter_of(begun).model_copy(update={"rank": 2})
    assert model_layout(build_adapted(spec.model.config, other)) != spec.model.layout
    with pytest.raises(ExportError, match="a checkpoint of another model"):
        export_adapter(
            learnt, spec.model.config, other, begun.blobs[spec.tokenizer.name], origin(begun, learnt), tmp_path / "out"
        )


# -- the commands -----------------------------------------------------------------------------------------------------


def test_init_writes_a_run_that_trains_an_adapter(base: Path, begun: ResolvedRun, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(base / "base", model)
    shutil.copy(begun.blobs[begun.spec.tokenizer.name], model / "tokenizer.json")
    path = tmp_path / "run.toml"
    done = cairn(
        "run", "init", "--from", model, "--out", path, "--total-tokens", "10M", "--adapter", "4", "--dtype", "float32"
    )
    assert done.returncode == 0, done.stderr
    shutil.copy(base / "documents.jsonl", tmp_path)
    path.write_text(path.read_text().replace("EDIT-ME/", "").replace("validation_every = 100", "validation_every = 5"))
    run_file = load_run(path)
    assert run_file.model.adapter == AdapterSettings(rank=4, alpha=8, dtype="float32") and run_file.weights == model
    assert resolve(run_file, tmp_path / "work", OWNER).spec.model.adapter is not None


def test_the_dtypes_of_the_command_are_those_of_the_spec():
    assert get_args(AdapterSettings.model_fields["dtype"].annotation) == DTYPES


def test_export_writes_an_adapter_or_a_merged_model(base: Path, begun: ResolvedRun, learnt: Path, tmp_path: Path):
    spec = base / "work" / "spec.signed"
    done = cairn("export", learnt, tmp_path / "adapter", "--spec", spec)
    assert done.returncode == 0 and "adapter " in done.stdout, done.stderr
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    again = cairn("export", learnt, tmp_path / "adapter", "--spec", spec)
    assert again.returncode == 1 and "--force to replace" in again.stderr
    merged = cairn("export", learnt, tmp_path / "merged", "--spec", spec, "--merge")
    assert merged.returncode == 0 and "AutoModelForCausalLM" in merged.stdout, merged.stderr
    assert (tmp_path / "merged" / "config.json").is_file()


def test_export_without_the_base_says_where_to_put_it(begun: ResolvedRun, learnt: Path, tmp_path: Path):
    (tmp_path / "spec.signed").write_bytes(begun.spec_envelope)
    shutil.copy(begun.blobs[begun.spec.tokenizer.name], tmp_path / "tokenizer.json")
    shutil.copy(learnt, tmp_path / "state.safetensors")
    done = cairn("export", tmp_path / "state.safetensors", tmp_path / "out", "--merge")
    assert done.returncode == 1 and f"{adapter_of(begun).base.digest}.safetensors" in done.stderr
    done = cairn("export", tmp_path / "state.safetensors", tmp_path / "out")
    assert done.returncode == 0 and "base    not known here, so OUT does not name it: --base" in done.stdout
    assert "PeftModel.from_pretrained(base, " in done.stdout
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    assert "base_model" not in (tmp_path / "out" / "README.md").read_text()


def test_a_volunteer_s_copy_of_a_state_finds_the_base_in_the_store(begun: ResolvedRun, learnt: Path, tmp_path: Path):
    state, base = blob_digest(learnt.read_bytes()), adapter_of(begun).base
    archive = Archive(tmp_path / "checkpoints", begun.spec, spec_envelope=begun.spec_envelope)
    archive.add(learnt, begun.blobs[begun.spec.tokenizer.name], round=1, state=state, record=state, tokens=1)
    held = blob_file(tmp_path / "store", base.name)
    held.parent.mkdir(parents=True)
    shutil.copy(begun.blobs[base.name], held)
    assert find_checkpoint(tmp_path).base == held


def test_generate_adds_an_adapter_to_its_base(begun: ResolvedRun, learnt: Path, tmp_path: Path):
    (tmp_path / "spec.signed").write_bytes(begun.spec_envelope)
    shutil.copy(begun.blobs[begun.spec.tokenizer.name], tmp_path / "tokenizer.json")
    state, base = tmp_path / "state.safetensors", adapter_of(begun).base
    shutil.copy(learnt, state)
    asked = ("--prompt", "The quick", "--tokens", "8", "--temperature", "0")
    assert f"put it beside the checkpoint as {base.digest}.safetensors" in refused("generate", state, *asked)
    shutil.copy(begun.blobs[base.name], tmp_path)
    said = cairn("generate", state, *asked)
    assert said.returncode == 0 and said.stdout.startswith("The quick"), said.stderr
    held = tmp_path / f"{base.digest}.safetensors"
    with held.open("r+b") as file:
        file.seek(-100, 2)
        file.write(bytes(50))
    assert f"{held}: damaged: its digest is" in refused("generate", state, *asked)
    shutil.copy(begun.blobs[base.name], tmp_path)
    for out, how in (("adapter", ()), ("merged", ("--merge",))):
        assert cairn("export", state, tmp_path / out, *how).returncode == 0
    assert cairn("generate", tmp_path / "merged", *asked).stdout == said.stdout
    assert "`cairn export --merge`" in refused("generate", tmp_path / "adapter", *asked)


def test_a_missing_package_is_named_with_its_command(base: Path, begun: ResolvedRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SpecError, match="needs one more package: .* -m pip install 'peft>="):
        build_adapted(begun.spec.model.config, adapter_of(begun), device="cpu")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    file = run_file(base, ("rank = 4", 'rank = 4\ndtype = "nf4"'), name="without.toml")
    for attempt in (lambda: validate(file), lambda: resolve(load_run(file), base / "without", OWNER)):
        with pytest.raises(SpecError, match="without.toml: model.adapter: .* pip install 'bitsandbytes>="):
            attempt()
