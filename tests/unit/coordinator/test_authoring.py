"""From run.toml to a signed spec: the same run every time, and a sentence for everything that can be wrong."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coordinator.authoring.errors import AuthoringError, DataInputError, RunChangedError, RunFileError
from coordinator.authoring.prepare import prepare
from coordinator.authoring.resolve import resolve
from coordinator.authoring.runfile import load_run
from coordinator.authoring.summary import validate
from peer.training.data import WindowReader
from protocol.codec import make_codec
from protocol.errors import SpecError
from protocol.identity import Identity
from protocol.layout import MOMENTUM, REFERENCE_NORMS
from protocol.merkle import blob_digest
from protocol.model import build_model, load_state, model_layout, parameters_of
from protocol.spec import CheckpointSpec, CreditSpec, open_spec
from protocol.state import state_digest, state_layout, tensors_from_checkpoint

OWNER = Identity(b"o" * 32)
RUN = """
[run]
name = "little"
seed = 3
total_tokens = 100_000

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
validation_every = 5

[inner]
lr = 0.002
batch = 4

[round]
target_tokens = 1_000
"""


@pytest.fixture
def write(tmp_path):
    """Writes the run file, with (pattern, replacement) edits; gives its path."""
    texts = [f"Document {i}: the quick brown fox jumps over {i * i} lazy dogs." for i in range(40)]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))

    def write(*edits: tuple[str, str], text: str = RUN) -> Path:
        for pattern, replacement in edits:
            assert re.search(pattern, text), pattern
            text = re.sub(pattern, lambda _, r=replacement: r, text)
        (tmp_path / "run.toml").write_text(text)
        return tmp_path / "run.toml"

    return write


def test_a_resolved_run_is_signed_and_every_blob_that_it_names_is_there(write, tmp_path):
    run = resolve(load_run(write()), tmp_path / "work", OWNER)
    spec = open_spec(run.spec_envelope, run.spec.run_id)
    assert spec == run.spec and spec.owner_key == OWNER.key and spec.name == "little"
    named = [spec.genesis, spec.tokenizer, *spec.data.train, *spec.data.validation]
    assert set(run.blobs) == {ref.name for ref in named}
    for ref in named:
        data = run.blobs[ref.name].read_bytes()
        assert len(data) == ref.size and blob_digest(data) == ref.name
    assert spec.model.config["vocab_size"] == 300 and spec.model.config["eos_token_id"] == 0
    assert spec.inner.schedule.total_tokens == 100_000 and spec.round.max_update_tokens == 2_000


def test_the_genesis_is_the_models_seeded_state_and_loads_as_safetensors(write, tmp_path):
    plain = write((r"\[round\]", '[outer]\noptimizer = "plain"\n[round]'))
    run = resolve(load_run(plain), tmp_path / "work", OWNER)
    model = build_model(run.spec.model.config, seed=99)
    assert model_layout(model) == run.spec.model.layout
    layout = state_layout(run.spec.model.layout, run.spec.outer)
    path = run.blobs[run.spec.genesis.name]
    tensors = tensors_from_checkpoint(layout, path.read_bytes())
    assert state_digest(layout, tensors) == run.spec.genesis.name
    load_state(model, {n: t for n, t in tensors.items() if n != REFERENCE_NORMS})
    same = parameters_of(build_model(run.spec.model.config, seed=3))
    assert all(torch.equal(p, same[n]) for n, p in parameters_of(model).items())
    assert all(torch.equal(t, tensors[n]) for n, t in load_file(path).items())


def test_the_data_of_a_resolved_run_can_be_read_and_is_what_the_model_expects(write, tmp_path):
    run = resolve(load_run(write()), tmp_path / "work", OWNER)
    reader = WindowReader(run.spec.data, run.blobs, vocabulary=run.spec.model.config["vocab_size"])
    windows = reader.read(range(reader.total))
    assert reader.total == run.spec.data.train_windows > 10
    logits = build_model(run.spec.model.config)(input_ids=windows[:2, :-1]).logits
    assert logits.shape == (2, 16, 300)
    assert WindowReader(run.spec.data, run.blobs, part="validation").total > 0


def test_an_outer_optimizer_with_momentum_has_it_in_the_genesis(write, tmp_path):
    run = resolve(load_run(write((r"\[round\]", '[outer]\noptimizer = "nesterov"\n[round]'))), tmp_path / "work", OWNER)
    layout = state_layout(run.spec.model.layout, run.spec.outer)
    tensors = tensors_from_checkpoint(layout, run.blobs[run.spec.genesis.name].read_bytes())
    momentum = [t for n, t in tensors.items() if n.startswith(MOMENTUM)]
    assert len(momentum) == len(tensors) // 2 and not any(t.any() for t in momentum)
    assert tensors[REFERENCE_NORMS].shape == (len(momentum),) and not tensors[REFERENCE_NORMS].any()


def test_resolving_again_gives_the_same_run_and_the_same_in_another_folder(write, tmp_path):
    path = write()
    first = resolve(load_run(path), tmp_path / "work", OWNER)
    again = resolve(load_run(path), tmp_path / "work", OWNER)
    assert again == first and first.begins and not again.begins
    assert resolve(load_run(path), tmp_path / "other", OWNER).spec.run_id == first.spec.run_id


@pytest.mark.parametrize(
    ("tables", "optimizer", "lr", "momentum"),
    [
        ("", "nesterov", 1.0, 0.5),
        ('[codec]\nkind = "sparse"\n', "plain", 1.0, 0.9),
        ('[codec]\nkind = "sparse"\n[outer]\noptimizer = "nesterov"\n', "nesterov", 1.0, 0.9),
        ('[outer]\noptimizer = "plain"\n', "plain", 1.8, 0.9),
        ('[outer]\noptimizer = "plain"\nlr = 0.5\n', "plain", 0.5, 0.9),
        ("[outer]\nlr = 0.5\nmomentum = 0.25\n", "nesterov", 0.5, 0.25),
    ],
)
def test_what_is_left_out_of_the_outer_step_follows_the_codec(write, tables, optimizer, lr, momentum):
    outer = load_run(write((r"\[round\]", f"{tables}[round]"))).outer
    assert (outer.optimizer, outer.lr, outer.momentum) == (optimizer, lr, momentum)


def test_comments_and_spelled_out_defaults_change_nothing(write, tmp_path):
    first = resolve(load_run(write()), tmp_path / "work", OWNER)
    spelled_out = '[codec]\nkind = "sign"\n[outer]\noptimizer = "nesterov"\nlr = 1.0\nmomentum = 0.5\n[round]'
    again = write((r"lr = 0\.002", "lr = 2e-3  # as before"), (r"\[round\]", spelled_out))
    assert resolve(load_run(again), tmp_path / "work", OWNER) == first


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ((r"lr = 0\.002", "lr = 0.003"), "inner.lr was 0.002, is now 0.003"),
        ((r"hidden_size = 32", "hidden_size = 64"), "model.hidden_size was 32, is now 64"),
        ((r"seed = 3\n", ""), "run.seed was 3, is now 0"),
        ((r"tie_word_embeddings = true\n", ""), "model.tie_word_embeddings was True, is now not set"),
        ((r"vocabulary = 300", "vocabulary = 310"), "data.vocabulary was 300, is now 310"),
    ],
)
def test_a_run_file_that_changed_after_the_run_began_is_refused_field_by_field(write, tmp_path, edit, says):
    resolve(load_run(write()), tmp_path / "work", OWNER)
    with pytest.raises(RunChangedError, match=re.escape(says) + ".*put it back, or give the run a new name"):
        resolve(load_run(write(edit)), tmp_path / "work", OWNER)
    resolve(load_run(write()), tmp_path / "work", OWNER)  # put back: nothing was spoiled


def test_documents_that_changed_after_the_run_began_are_refused(write, tmp_path):
    path = write()
    resolve(load_run(path), tmp_path / "work", OWNER)
    with (tmp_path / "documents.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(RunChangedError, match=r"documents\.jsonl changed"):
        resolve(load_run(path), tmp_path / "work", OWNER)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_run_that_has_begun_goes_on_without_its_documents(write, tmp_path, prepared):
    path = write()
    if prepared:
        prepare(["documents.jsonl"], tmp_path / "ready", vocabulary=300, base=tmp_path)
        path = write(
            (r'source = "documents.jsonl"', 'prepared = "ready"'), (r"vocabulary = 300\nvalidation_every = 5\n", "")
        )
    first = resolve(load_run(path), tmp_path / "work", OWNER)
    (tmp_path / ("ready" if prepared else "documents.jsonl")).rename(tmp_path / "away")
    said: list[str] = []
    again = resolve(load_run(path), tmp_path / "work", OWNER, said.append, held=first.blobs.__contains__)
    assert (again.spec, again.spec_envelope) == (first.spec, first.spec_envelope)
    assert len(said) == 1 and "ready" if prepared else "documents.jsonl: no such file" in said[0]
    lost = next(iter(first.blobs))
    for held in (lambda blob: False, lambda blob: blob != lost):
        with pytest.raises(DataInputError, match=r"run\.toml: data: "):
            resolve(load_run(path), tmp_path / "work", OWNER, held=held)


def test_another_owner_cannot_go_on_with_a_run(write, tmp_path):
    path = write()
    resolve(load_run(path), tmp_path / "work", OWNER)
    with pytest.raises(RunChangedError, match="owner's key file"):
        resolve(load_run(path), tmp_path / "work", Identity(b"x" * 32))


def test_lost_files_of_a_run_are_made_again_or_named(write, tmp_path):
    path = write()
    first = resolve(load_run(path), tmp_path / "work", OWNER)
    genesis = tmp_path / "work" / "genesis.safetensors"
    genesis.write_bytes(genesis.read_bytes()[:-1] + b"x")
    shutil.rmtree(tmp_path / "work" / "data")
    assert resolve(load_run(path), tmp_path / "work", OWNER) == first
    assert blob_digest(genesis.read_bytes()) == first.spec.genesis.name
    (tmp_path / "work" / "spec.signed").write_bytes(b"rubbish")
    with pytest.raises(AuthoringError, match=r"spec\.signed.*from a copy"):
        resolve(load_run(path), tmp_path / "work", OWNER)


def test_a_folder_prepared_before_can_be_named(write, tmp_path):
    made = prepare(["documents.jsonl"], tmp_path / "ready", vocabulary=300, validation_every=5, base=tmp_path)
    path = write(
        (r'source = "documents.jsonl"', 'prepared = "ready"'), (r"vocabulary = 300\nvalidation_every = 5\n", "")
    )
    run = resolve(load_run(path), tmp_path / "work", OWNER)
    assert run.spec.data.train == made.manifest.train.shards and not (tmp_path / "work" / "data").exists()
    said = validate(path)
    assert any("windows to train on" in line and "about" not in line for line in said)
    bytes_of_a_state = (tmp_path / "work" / "genesis.safetensors").stat().st_size  # with the outer step's memory
    assert any(line.endswith(f"a checkpoint is {bytes_of_a_state / 1000:.3g} kB") for line in said)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ((r"target_tokens = 1_000", ""), r"run\.toml:\d+: round\.target_tokens: is missing: `cairn run plan"),
        ((r"lr = 0\.002", "lrr = 0.002"), r"run\.toml:23: inner\.lrr: is not a field; did you mean lr\?"),
        ((r"lr = 0\.002", "learning_rate = 0.002"), r"inner\.learning_rate: is not a field; did you mean lr\?"),
        ((r"batch = 4", "batch_size = 4"), r"inner\.batch_size: is not a field; did you mean batch\?"),
        (
            (r"lr = 0\.002", "total_tokens = 2"),
            r"inner\.total_tokens: is not a field; did you mean run\.total_tokens\?",
        ),
        ((r"lr = 0\.002", "zzz = 2"), r"inner\.zzz: is not a field: remove it"),
        ((r"lr = 0\.002", "lr = -1"), r"run\.toml:23: inner\.lr: .*greater than 0 \(found '-1'\)"),
        ((r"lr = 0\.002", "lr = nan"), r"inner\.lr: .*finite"),
        ((r"\[inner\]", "[iner]"), r"run\.toml:22: iner: is not a field; did you mean inner\?"),
        ((r'name = "little"', 'name = ""'), r"run\.toml:3: run\.name: "),
        ((r"window = 16", 'window = "16 tokens"'), r"data\.window: .*integer"),
        (
            (r"window = 16", "window = 16\nshard_tokens = 16"),
            r"data: shard_tokens: a window of 16 tokens .* write more",
        ),
        ((r"total_tokens = 100_000", ""), r"run\.total_tokens: a schedule that decays needs an end"),
        ((r'model_type = "llama"', ""), r"model\.model_type: is missing"),
        ((r"vocabulary = 300", ""), r"data: write either vocabulary"),
        ((r'source = "documents.jsonl"', ""), r"data: write either source"),
        ((r'source = "documents.jsonl"', 'prepared = "x"'), r"vocabulary, validation_every: fixed when"),
        ((r"target_tokens = 1_000", "target_tokens = 1_000\nmax_update_tokens = 8"), r"round\.max_update_tokens: must"),
        (
            (r"\[round\]", "[codec]\nbeta = 0.5\n[audit]\nreplayable = true\n[round]"),
            r"run\.toml:\d+: audit\.replayable: needs codec\.beta = 0: set that, or audit\.replayable = false",
        ),
        (
            (r"\[round\]", '[audit]\nreplayable = true\n[round]\nexchange = "auto"'),
            r'audit\.replayable: needs round\.exchange = "gather"',
        ),
        ((r"\[inner\]", "[inner.schedule]\nkind = 'steep'\n[inner]"), r"inner\.schedule\.kind: .*'cosine'"),
        (
            (r"window = 16", 'window = 16\naddresses = ["ssh://h/x"]'),
            r"data: addresses: 'ssh://h/x' is no address of data",
        ),
        ((r"\[run\]", "[run"), r"run\.toml: not TOML: .*line 2"),
        ((r"seed = 3", "seed = 3\nseed = 4"), r"not TOML: .*line 5"),
    ],
)
def test_a_bad_run_file_names_file_line_field_and_remedy(write, edit, says):
    with pytest.raises(RunFileError, match=says) as e:
        load_run(write(edit))
    assert len(str(e.value).splitlines()) == 1, "a second problem is reported that is none"


@pytest.mark.parametrize(
    ("edit", "error", "says"),
    [
        (
            (r"hidden_size = 32", "hiden_size = 32"),
            SpecError,
            r"run\.toml: model: hiden_size: .*did you mean hidden_size",
        ),
        ((r'"llama"', '"lama"'), SpecError, r"run\.toml: model: model_type is 'lama'.*llama"),
        ((r"num_attention_heads = 4", "num_attention_heads = 5"), SpecError, r"run\.toml: model: .*attention heads"),
        ((r"\[data\]", "vocab_size = 200\n[data]"), RunFileError, r"model\.vocab_size: 200 is less than .* 300"),
        ((r"window = 16", "window = 128"), RunFileError, r"do not fit model\.max_position_embeddings = 64"),
        ((r"documents\.jsonl", "none.jsonl"), DataInputError, r"run\.toml: data: none\.jsonl: no such file"),
        ((r"window = 16", 'window = 16\nfield = "body"'), DataInputError, r"line 1: no field 'body': there is 'text'"),
        (
            (r"window = 16", "window = 8_192"),
            RunFileError,
            r"data\.window: 8192 tokens, but the documents have only \d+",
        ),
        ((r"every = 5", "every = 50"), DataInputError, r"validation_every = 50, but there are only 40 documents"),
        (
            (r"validation_every = 5", 'validation = ["documents.jsonl"]'),
            DataInputError,
            r"documents\.jsonl is both for training and for validation",
        ),
    ],
)
def test_what_is_wrong_with_model_or_data_is_refused_by_both_commands_and_begins_nothing(
    write, tmp_path, edit, error, says
):
    path = write(edit)
    for command in (lambda: resolve(load_run(path), tmp_path / "work", OWNER), lambda: validate(path)):
        with pytest.raises(error, match=says) as e:
            command()
        assert "\n" not in str(e.value)
    assert not (tmp_path / "work" / "spec.signed").exists()


def test_a_vocabulary_beyond_the_models_is_refused_before_documents_are_prepared(write, tmp_path):
    with pytest.raises(RunFileError, match=r"model\.vocab_size: 200 is less than"):
        resolve(load_run(write((r"\[data\]", "vocab_size = 200\n[data]"))), tmp_path / "work", OWNER)
    assert not (tmp_path / "work" / "data").exists()


def test_many_passes_over_the_text_are_a_warning_when_the_run_is_planned_and_when_it_begins(write, tmp_path):
    said: list[str] = []
    path = write((r"total_tokens = 100_000", "total_tokens = 1_000_000"))
    run = resolve(load_run(path), tmp_path / "work", OWNER, said.append)
    tokens = sum(s.tokens for s in run.spec.data.train)
    warning = f"warning: 1,000,000 tokens planned on {tokens:,} tokens of text: {1_000_000 / tokens:.0f} passes."
    for lines in (said, validate(path)):
        assert len([line for line in lines if line.startswith(warning)]) == 1
    said.clear()
    resolve(load_run(path), tmp_path / "work", OWNER, said.append)
    assert not said
    few = validate(write((r"total_tokens = 100_000", f"total_tokens = {4 * tokens}")))
    assert "tokens planned on" not in "\n".join(few)


def test_few_rounds_are_a_warning(write):
    few = validate(write((r"total_tokens = 100_000", "total_tokens = 10_000")))
    assert [line for line in few if line.startswith("warning: only 10 rounds: ")]
    assert "warning: only" not in "\n".join(validate(write()))


def test_special_tokens_spelled_out_are_one_warning_also_of_a_corpus_that_is_only_sampled(write, tmp_path, monkeypatch):
    path = write((r"documents.jsonl", "*.jsonl"))
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "a turn<|endoftext|>and another"}) + "\n")
    said: list[str] = []
    run = resolve(load_run(path), tmp_path / "work", OWNER, said.append)
    counted = validate(path)
    shutil.copy(run.blobs[run.spec.tokenizer.name], tmp_path / "given.json")
    monkeypatch.setattr("coordinator.authoring.summary.COUNTED", 0)
    sampled = validate(write((r"documents.jsonl", "*.jsonl"), (r"vocabulary = 300", 'tokenizer = "given.json"')))
    for lines in (said, counted, sampled):
        warning = "warning: 1 of 41 documents spell out '<|endoftext|>'"
        assert len([line for line in lines if line.startswith(warning)]) == 1


def test_a_mistake_mended_before_the_run_began_leaves_no_trace(write, tmp_path):
    with pytest.raises(SpecError):
        resolve(load_run(write((r"hidden_size = 32", "hiden_size = 32"))), tmp_path / "work", OWNER)
    resolve(load_run(write((r"vocabulary = 300", "vocabulary = 290"))), tmp_path / "work", OWNER)


def test_a_run_file_may_begin_with_a_byte_order_mark(write):
    path = write()
    before = load_run(path)
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert load_run(path) == before


@pytest.mark.parametrize("counted", [2**20, 0], ids=["prepared", "sampled"])
def test_the_summary_says_which_files_of_a_folder_are_left_out(write, tmp_path, monkeypatch, counted):
    monkeypatch.setattr("coordinator.authoring.summary.COUNTED", counted)
    (tmp_path / "set").mkdir()
    (tmp_path / "documents.jsonl").rename(tmp_path / "set" / "train.jsonl")
    (tmp_path / "set" / "README.md").write_text("A card.")
    lines = validate(write((r'"documents\.jsonl"', '"set"')))
    assert [line for line in lines if line.startswith("set: it has JSONL or Parquet") and "'README.md'" in line]


def test_a_run_file_that_is_not_there_or_not_text_is_named(tmp_path):
    with pytest.raises(RunFileError, match=r"no such file: `cairn run plan"):
        load_run(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RunFileError, match="UTF-8"):
        load_run(tmp_path / "x.toml")
    with pytest.raises(RunFileError, match="cannot be read"):
        load_run(tmp_path)


def test_the_summary_states_what_the_spec_will_say(write, tmp_path):
    path = write((r"\[round\]", '[codec]\nkind = "sparse"\n[round]'))
    text = "\n".join(validate(path))
    spec = resolve(load_run(path), tmp_path / "work", OWNER).spec
    assert f"{spec.model.layout.numel:,} parameters" in text
    size = make_codec(spec.codec, spec.model.layout).size
    assert f"update: {size} B" in text
    assert f"{spec.data.train_windows} windows to train on" in text
    assert "about 100 rounds" in text


def test_replayable_updates_have_no_error_feedback_and_the_summary_says_what_they_cost(write, tmp_path):
    assert [line for line in validate(write()) if line.startswith("audits: none that convict")]
    path = write((r"\[round\]", "[audit]\nreplayable = true\n[round]"))
    spec = resolve(load_run(path), tmp_path / "work", OWNER).spec
    assert spec.audit.replayable and spec.codec.beta == 0
    assert [line for line in validate(path) if line.startswith("audits: updates are replayable")]


def test_an_owner_is_warned_of_claims_too_large_to_replay(write):
    audit = (r"\[round\]", "[audit]\nreplayable = true\n[round]")
    target = load_run(write()).round.target_tokens

    def warnings(most: int) -> list[str]:
        path = write(audit, (r"target_tokens", f"max_update_tokens = {most}\ntarget_tokens"))
        return [line for line in validate(path) if line.startswith("warning: one update may claim")]

    assert "2.0 times" in warnings(2 * target)[0] and not warnings(target - 1)


def audit_warnings(path: Path) -> list[str]:
    return [line for line in validate(path) if re.match("warning: (credit|members)", line)]


@pytest.mark.parametrize(
    "own, hold, every, keep, warned",
    [
        ("", 32, 5, 7, ()),
        ("[credit]\nhold_rounds = 48\n", 48, 5, 10, ()),
        ("[credit]\nhold_rounds = 31\n", 31, 5, 7, ("credit settles after 31 rounds",)),
        ("[credit]\nhold_rounds = 8\n", 8, 5, 2, ("credit settles after 8 rounds",)),
        ("keep = 6\n", 32, 5, 6, ("a replay needs for 30 rounds, and credit is held for 32",)),
        ("keep = 1\n[credit]\nhold_rounds = 6\n", 6, 5, 1, ("credit settles", "a replay needs for 5 rounds")),
    ],
)
def test_a_replayable_run_holds_credit_and_checkpoints_until_who_does_half_is_convicted(
    write, own, hold, every, keep, warned
):
    """An owner's own values win, with a warning where audits cannot work in them."""
    found = load_run(path := write((r"\Z", f"\n[audit]\nreplayable = true\n[checkpoint]\nevery = {every}\n{own}")))
    assert (found.credit.hold_rounds, found.checkpoint.every, found.checkpoint.keep) == (hold, every, keep)
    warnings = audit_warnings(path)
    assert len(warnings) == len(warned) and all(w in line for w, line in zip(warned, warnings, strict=True))


def test_a_run_without_replays_has_the_defaults_of_the_spec_and_no_warning_of_them(write):
    found = load_run(path := write())
    assert (found.credit, found.checkpoint) == (CreditSpec(), CheckpointSpec())
    assert audit_warnings(path) == []


@pytest.mark.parametrize("mode, cost", [("open", "no cost"), ("invite", "the code"), ("allow", "only the 2 keys")])
def test_an_owner_reads_what_an_admission_mode_costs_an_attacker(write, mode, cost):
    keys = ", ".join(f'"{n:064x}"' for n in (1, 2))
    path = write((r"\[round\]", f'[admission]\nmode = "{mode}"\nallow = [{keys if mode == "allow" else ""}]\n[round]'))
    assert cost in validate(path)[-1] and validate(path)[-1].startswith("admission")


def test_the_example_that_is_shipped_is_valid():
    lines = validate(Path(__file__).resolve().parents[3] / "examples" / "sotu.toml")
    assert lines[-1].startswith("admission open: anybody gets in at no cost, with many keys: 64 a day")
    assert "sotu" in lines[0]
