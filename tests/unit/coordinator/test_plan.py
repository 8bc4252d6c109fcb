"""The advice of `cairn run plan` keeps its promises, and its template is a valid run.toml."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from pathlib import Path
from typing import get_args

import pytest
import torch
from click.testing import CliRunner
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from cairn.commands.options import parse_count
from cairn.main import main
from cairn.plan_view import lines
from coordinator.authoring import measurements
from coordinator.authoring.measurements import MEASURED, MeasuredSetting
from coordinator.authoring.model_config import (
    LEAST_PARAMETERS,
    ModelFileError,
    llama_of,
    parameters_of_table,
    read_model,
)
from coordinator.authoring.plan import FINE_TUNING_TOKENS, PlanError, PlanInputs, RunPlan, plan
from coordinator.authoring.runfile import RunFile, load_run
from coordinator.authoring.template import fill
from coordinator.authoring.toml_file import tomllib
from protocol.codec import make_codec
from protocol.errors import CairnError
from protocol.layout import BLOCK, Layout
from protocol.model import build_model, model_layout, plain_config
from protocol.spec import CodecSpec, OuterSpec
from protocol.units import byte_size

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "sotu.toml"

questions = st.builds(
    PlanInputs,
    model=st.integers(10**6, 10**11),
    peers=st.integers(2, 300),
    uplink=st.floats(1, 10_000),
    downlink=st.none() | st.floats(1, 10_000),
    rtt=st.floats(0, 1000),
    tokens_per_second=st.floats(100, 1e7),
    window=st.sampled_from([64, 512, 4096]),
    batch=st.integers(1, 256),
    total_tokens=st.just(10**14),
    share=st.floats(0.001, 1),
    relays=st.booleans(),
)


def sparse(k: int, inner_steps: int, loss: float) -> MeasuredSetting:
    return MeasuredSetting(CodecSpec(kind="sparse", k=k), inner_steps, loss)


def made(inputs: PlanInputs) -> RunPlan:
    """Return the plan, and skip inputs whose rounds are absurdly long."""
    try:
        return plan(inputs)
    except PlanError as e:
        assume(e.field != "tokens_per_second")
        raise


# -- the rule ------------------------------------------------------------------------------------------------


@given(questions)
def test_the_exchange_keeps_its_share_or_the_plan_says_that_it_does_not(inputs: PlanInputs):
    p = made(inputs)
    assert p.fits == (p.cost.exchange_seconds <= inputs.share * p.cost.training_seconds)
    assert p.fits == (p.remedies is None)
    assert p.setting in MEASURED


@given(questions)
def test_no_measured_setting_that_fits_has_less_loss(inputs: PlanInputs):
    p = made(inputs)
    for m in MEASURED:
        seconds = inputs.exchange_seconds(inputs.update_bytes(m.codec))
        share = seconds / inputs.training_seconds(m.inner_steps)
        if share <= inputs.share:
            assert p.fits and p.cost.loss <= m.loss * (1 + measurements.OVERLAP_LOSS * share)


@given(questions, st.floats(1, 50))
def test_a_faster_uplink_never_means_more_loss(inputs: PlanInputs, faster: float):
    slow, fast = made(inputs), made(dataclasses.replace(inputs, uplink=inputs.uplink * faster))
    assert fast.fits or not slow.fits
    if slow.fits:
        assert fast.cost.loss <= slow.cost.loss


@example(
    PlanInputs(model=224415314, peers=300, uplink=1.0, downlink=None, rtt=160.0, tokens_per_second=374.0, window=4096,
             batch=256, total_tokens=10**14, share=0.03125, relays=False)
)  # fmt: skip
@given(questions)
def test_the_uplink_that_is_said_to_be_enough_is_enough_and_less_is_not(inputs: PlanInputs):
    p = made(inputs)
    for cost in filter(None, (p.better, p.cost)):
        if cost.uplink_needed == math.inf or not 0.01 < cost.uplink_needed < 1e5:
            continue
        for factor, fits in ((1.001, True), (0.999, False)):
            link = dataclasses.replace(inputs, uplink=cost.uplink_needed * factor)
            again = plan(link, [cost.setting])
            # Receiving over a slower downlink of its own can bind before sending does.
            assert again.fits == fits or (not fits and inputs.downlink is not None and again.fits)
    if p.better:
        assert p.better.setting.loss < p.setting.loss and p.better.uplink_needed > inputs.uplink * 0.999


@given(questions)
def test_each_remedy_alone_makes_the_plan_fit(inputs: PlanInputs):
    p = made(inputs)
    assume(p.remedies is not None)
    assert p.remedies is not None
    inputs = dataclasses.replace(inputs, batch=inputs.windows)
    if p.remedies.inner_steps:
        seconds = inputs.exchange_seconds(p.cost.update_bytes)
        assert seconds <= inputs.share * inputs.training_seconds(p.remedies.inner_steps) * (1 + 1e-9)
        shorter = inputs.training_seconds(p.remedies.inner_steps - 1)
        assert seconds > inputs.share * shorter * (1 - 1e-9)
    if p.remedies.share:
        assert plan(dataclasses.replace(inputs, share=min(1, p.remedies.share))).fits
    if p.remedies.peers:
        fewer = dataclasses.replace(inputs, peers=p.remedies.peers, share=min(1, inputs.share * (1 + 1e-9)))
        assert plan(fewer, [p.setting]).fits


@given(questions)
def test_one_peer_more_than_the_most_does_not_fit(inputs: PlanInputs):
    needed = plan(dataclasses.replace(inputs, rtt=0, downlink=None, tokens_per_second=1e5)).cost.uplink_needed
    inputs = dataclasses.replace(inputs, rtt=0, tokens_per_second=1e5, uplink=min(4e5, max(1, 1.3 * needed)))
    inputs = dataclasses.replace(inputs, downlink=inputs.downlink and 2 * inputs.uplink)
    p = made(inputs)
    assume(p.most_peers is not None and p.most_peers < 4096)
    assert p.most_peers is not None
    for peers, fits in ((p.most_peers, True), (p.most_peers + 1, False)):
        factor = 1 + (1e-9 if fits else -1e-9)  # rounding
        nearly = dataclasses.replace(
            inputs, peers=peers, uplink=inputs.uplink * factor, downlink=inputs.downlink and inputs.downlink * factor
        )
        assert plan(nearly, [p.setting]).fits == fits


def test_ties_go_to_the_fewer_bytes():
    tied = [sparse(256, 20, 1.05), sparse(64, 20, 1.05), sparse(64, 30, 1.05), sparse(512, 30, 1.06)]
    assert plan(PlanInputs(10**9, uplink=10_000), tied).setting == sparse(64, 30, 1.05)


def test_a_round_is_the_planned_inner_steps_of_all_peers():
    p = plan(PlanInputs(10**9, peers=10, batch=8, window=1024))
    assert p.target_tokens == p.setting.inner_steps * 10 * 8 * 1024
    assert (p.rounds - 1) * p.target_tokens < 20 * 10**9 <= p.rounds * p.target_tokens


def test_a_question_without_a_speed_takes_the_stated_gpu():
    q = PlanInputs(10**9)
    assert q.speed == pytest.approx(0.4 * 100e12 / (6 * 10**9))
    assert PlanInputs(10**9, tokens_per_second=5).speed == 5


def test_a_batch_that_is_not_given_leaves_the_run_enough_steps():
    for n in (10**6, 10**8, 10**9, 7 * 10**9):
        q = PlanInputs(n)
        assert q.windows == 1 or q.total / q.step_tokens >= 4000
        assert q.windows == 64 or q.total / (2 * q.step_tokens) < 4000


def test_updates_are_sent_to_all_others_unless_members_relay():
    q = PlanInputs(10**9, peers=9, downlink=10_000)
    relayed = dataclasses.replace(q, relays=True)
    p, r = plan(q, [sparse(256, 17, 1.1)]), plan(relayed, [sparse(256, 17, 1.1)])
    assert p.up_bytes == 8 * p.cost.update_bytes and r.up_bytes == r.cost.update_bytes
    assert p.down_bytes == r.down_bytes == 8 * p.cost.update_bytes
    assert p.cost.exchange_seconds == pytest.approx(8 * p.cost.update_bytes * 8 / 100e6 + 0.2)
    assert r.cost.exchange_seconds == pytest.approx(p.cost.update_bytes * 8 / 100e6 + 0.2)


def test_a_relay_does_not_widen_a_downlink():
    q = PlanInputs(10**9)
    assert plan(dataclasses.replace(q, relays=True)).cost.exchange_seconds == plan(q).cost.exchange_seconds


# -- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measured", MEASURED, ids=str)
def test_planned_bytes_are_the_bytes_of_a_real_update(measured: MeasuredSetting):
    config = plain_config({"model_type": "llama", **_small(), "vocab_size": 300})
    layout = model_layout(build_model(config, device="meta"))
    codec = make_codec(measured.codec, layout)
    blob = codec.encode({t.name: torch.randn(t.shape) for t in layout.tensors})
    assert PlanInputs(layout, tokens_per_second=1000).update_bytes(measured.codec) == codec.size == len(blob)


def test_bytes_of_a_number_of_parameters_are_those_of_full_blocks():
    layout = Layout.of({"a": (BLOCK, 10), "b": (3, BLOCK)})
    assert PlanInputs(layout.numel).update_bytes(CodecSpec()) == make_codec(CodecSpec(), layout).size
    assert PlanInputs(layout.numel - 1).update_bytes(CodecSpec()) == PlanInputs(layout.numel).update_bytes(CodecSpec())


def test_data_parallel_bytes_are_two_bf16_gradients_a_step_less_the_ring_s_share():
    p = plan(PlanInputs(10**6, peers=4, batch=2, window=50, total_tokens=400 * 1000, tokens_per_second=100))
    assert p.data_parallel_bytes == 1000 * 2 * 3 * 2 * 10**6 // 4


# -- findings ------------------------------------------------------------------------------------------------


def test_each_finding_is_one_that_a_run_can_have():
    assert len({str(m) for m in MEASURED}) == len(MEASURED)
    for m in MEASURED:
        assert m.inner_steps >= 1 and 0.9 < m.loss < 2


def test_findings_have_their_source_in_the_project():
    assert (ROOT / measurements.SOURCE).exists() and (ROOT / measurements.FINE_TUNING).exists()


ROWS = {
    "sign, H 9": ("rounds", "H 9"),
    "sign, H 18": ("rounds", "H 18"),
    "sign, H 36": ("main", "Cairn sign, Muon, H 36, Nesterov 0.5"),
    "sign, H 54": ("main", "Cairn sign, Muon, H 54, outer rate 1.4"),
    "sign, H 72": ("rounds", "H 72"),
    "sparse k 256, H 17": ("main", "Cairn sparse k 256, Muon, H 17"),
    "sparse k 64, H 10": ("sparse", "the 64 largest, H 10, beta 0.7"),
    "sparse k 64, H 36": ("sparse", "the 64 largest, H 36, beta 0.7"),
}
"""The row of docs/results/convergence.json that records a setting: its table and label."""


@pytest.mark.parametrize("m", MEASURED, ids=str)
def test_each_finding_is_recorded_with_its_outer_step(m: MeasuredSetting):
    found = json.loads((ROOT / "docs/results/convergence.json").read_text())
    table, label = ROWS[str(m)]
    (row,) = [r for r in found[table] if r["label"] == label]
    (alone,) = [r["losses"] for r in found["main"] if r["label"] == "data-parallel Muon, bf16"]
    options = row["options"]
    assert (options["inner"], options["h"], options["beta"]) == ("muon", m.inner_steps, m.codec.beta)
    assert m.codec.kind == "sign" or options["k"] == m.codec.k
    assert OuterSpec(**options.get("outer") or {"lr": options.get("outer_lr", 1.0)}) == m.outer
    assert f"{statistics.fmean(loss / alone[seed] for seed, loss in row['losses'].items()):.3f}" == f"{m.loss:.3f}"


def test_the_loss_of_more_peers_is_the_recorded_one():
    def above(name: str) -> float:
        muon, ours = json.loads((ROOT / f"docs/results/{name}.json").read_text())["gap"][:2]
        return statistics.fmean(ours["losses"][s] / loss for s, loss in muon["losses"].items()) - 1

    (few,) = [m for m in MEASURED if str(m) == "sign, H 36"]
    assert measurements.MORE_PEERS.startswith(
        f"after 21 rounds 16 that shared the batch of 4 ended {above('convergence_many'):.0%} above data-parallel "
        f"Muon, and 4 ended {few.loss - 1:.0%} above; after 84 rounds {above('convergence_manylong'):.0%} and "
        f"{above('convergence_long'):.0%} "
    )


def test_what_is_written_for_fine_tuning_has_the_least_loss_that_is_recorded():
    found = json.loads((ROOT / "docs/results/finetune.json").read_text())

    def best(*row: str) -> tuple[float, float]:
        """Return the best rate of the first seed, and the mean loss with it."""
        runs = [r for r in found["runs"] if (r["what"], r["way"], r["optimizer"]) == row]
        runs = [r for r in runs if (r["steps"], r["peers"]) == (found["setting"]["steps"], found["sizes"][0])]
        rate = min((r for r in runs if r["seed"] == found["seeds"][0]), key=lambda r: r["loss"])["lr"]
        return rate, statistics.fmean(r["loss"] for r in runs if r["lr"] == rate)

    (rate, adamw), (_, muon) = best("adapter", "together", "adamw"), best("adapter", "together", "muon")
    assert (found["setting"]["parameters"], rate) == measurements.ADAPTER_LR_AT
    assert adamw < muon and all(f"{loss:.3f}" in measurements.ADAPTER_INNER.why for loss in (adamw, muon))
    for what, optimizer in (("whole", "muon"), ("adapter", "adamw")):
        more = best(what, "together, Nesterov", optimizer)[1] / best(what, "together", optimizer)[1] - 1
        assert more > 0 and f"{more:.1%}" in measurements.PLAIN_WHY


def test_the_outer_step_is_the_default_and_a_plain_one_for_fine_tuning():
    sign, tuned = MEASURED[:1], {"conversations": True}
    inputs = PlanInputs(10**9, uplink=10_000)
    assert plan(inputs, sign).outer == measurements.NESTEROV
    for more in (tuned, {"frozen": 10**9}):
        p = plan(dataclasses.replace(inputs, **more), sign)
        assert p.outer == measurements.PLAIN
    # Sparse updates need a rate of 1.
    assert plan(dataclasses.replace(inputs, **tuned), [sparse(64, 10, 1.1)]).outer == OuterSpec()


def test_the_rate_of_an_adapter_falls_with_the_size_of_its_base():
    parameters, rate = measurements.ADAPTER_LR_AT
    rates = [plan(PlanInputs(10**5, frozen=n)).lr for n in (parameters, 16 * parameters, 7 * 10**9)]
    assert rates[:2] == [rate, rate / 2] and 5e-4 < rates[2] < 1e-3


# -- the template --------------------------------------------------------------------------------------------


def _small() -> dict:
    return {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "tie_word_embeddings": True, "max_position_embeddings": 64,
    }  # fmt: skip


def _filled(inputs: PlanInputs) -> str:
    table = llama_of(inputs.parameters, inputs.window)
    return fill(plan(inputs), table, table["vocab_size"], "A note.")


def _fields(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Return every field that an owner can write outside [model], as (table, ..., field)."""
    found: set[tuple[str, ...]] = set()
    for name, field in model.model_fields.items():
        inner = [a for a in (field.annotation, *get_args(field.annotation)) if isinstance(a, type)]
        section = next((a for a in inner if issubclass(a, BaseModel)), None)
        if section:
            found |= _fields(section, (*prefix, name))
        elif prefix[:1] != ("model",):
            found.add((*prefix, name))
    return found


def _written(text: str) -> dict[tuple[str, ...], list[str]]:
    """Return the fields in a run file outside [model], set or behind a #, each with the comment lines above it."""
    table, prose, found = (), [], {}
    for line in text.splitlines():
        if heading := re.fullmatch(r"\[([a-z.]+)\]", line):
            table, prose = tuple(heading[1].split(".")), []
        elif field := re.match(r"#?([a-z_]+) = ", line):
            if table != ("model",):
                found[(*table, field[1])] = prose
            prose = []
        elif line.startswith("# "):
            prose = [*prose, line]
        elif not line:
            prose = []
    return found


def test_the_template_has_every_field_that_an_owner_can_write_with_its_meaning():
    written = _written(_filled(PlanInputs(10**9)))
    # A table whose presence says what the documents are: `cairn run init --sft` writes it.
    wanted = {field for field in _fields(RunFile) if field[:2] != ("data", "conversations")}
    assert ("inner", "schedule", "kind") in wanted and ("data", "source") in wanted and len(wanted) > 45
    assert not wanted - written.keys()
    assert not written.keys() - wanted
    assert not [field for field in wanted if not written[field]]


def test_the_template_s_comments_name_the_defaults_of_the_spec():
    for field, prose in _written(_filled(PlanInputs(10**9))).items():
        model: type[BaseModel] = RunFile
        for part in field[:-1]:
            annotation = model.model_fields[part].annotation
            assert isinstance(annotation, type)
            model = annotation
        default = model.model_fields[field[-1]].get_default()
        said = re.search(r"Default(?:: .* else)? ([^ ]+?(?:, [0-9.]+\])?)\.(?= |$)", " ".join(prose))
        if said:
            value = tomllib.loads(f"x = {said[1]}")["x"]
            assert tuple(value) == default if isinstance(default, tuple) else value == default, field
        else:
            undecided = {"source", "prepared", "window", "vocabulary", "tokenizer", "end_of_text", "name"}
            assert field[-1] in undecided | {"target_tokens", "max_update_tokens", "total_tokens"}, field


@pytest.mark.parametrize("inputs", [PlanInputs(10**9), PlanInputs(LEAST_PARAMETERS, window=64), PlanInputs(7 * 10**10)])
def test_what_stands_behind_a_hash_changes_nothing(tmp_path: Path, inputs: PlanInputs):
    text = _filled(inputs)
    # A field that excludes another one stays behind its hash.
    uncommented, count = re.subn(
        r"^#(?!prepared|tokenizer|end_of_text|validation )([a-z_]+ = )", r"\1", text, flags=re.M
    )
    assert count > 20
    (tmp_path / "a.toml").write_text(text)
    (tmp_path / "b.toml").write_text(uncommented)
    assert load_run(tmp_path / "a.toml").model_dump() == load_run(tmp_path / "b.toml").model_dump()


@settings(max_examples=30)
@given(questions)
def test_every_plan_fills_a_valid_run_file(tmp_path_factory: pytest.TempPathFactory, inputs: PlanInputs):
    p = made(inputs)
    path = tmp_path_factory.mktemp("plan") / "run.toml"
    table = llama_of(inputs.parameters, inputs.window)
    path.write_text(fill(p, table, table["vocab_size"], "A note."))
    run_file = load_run(path)
    assert run_file.codec == p.setting.codec and run_file.inner.optimizer == measurements.INNER.value
    assert run_file.outer == p.outer
    assert run_file.round.target_tokens == p.target_tokens and run_file.run.total_tokens == inputs.total
    assert run_file.round.exchange_seconds >= min(p.cost.exchange_seconds, 7 * 86_400)
    assert run_file.round.max_seconds >= p.cost.training_seconds
    assert run_file.round.max_members >= inputs.peers and run_file.model.config == table


@pytest.mark.parametrize("n", [10**6, 5 * 10**6, 2 * 10**7, 13 * 10**7, 10**9, 7 * 10**9, 7 * 10**10])
def test_a_llama_of_so_many_parameters_has_about_so_many(n: int):
    table = llama_of(n, 1024)
    layout = model_layout(build_model(plain_config(table), device="meta"))
    assert layout.numel == parameters_of_table(table)
    assert abs(layout.numel / n - 1) < 0.05


# -- models --------------------------------------------------------------------------------------------------


def test_a_config_json_becomes_a_model_table_that_gives_the_same_model(tmp_path: Path):
    config = {
        "model_type": "llama", **_small(), "vocab_size": 320, "architectures": ["LlamaForCausalLM"], "use_cache": True,
        "pad_token_id": None, "bos_token_id": 1, "rms_norm_eps": 1e-06, "torch_dtype": "bfloat16",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = read_model(path)
    assert model.vocabulary == 320 and model.positions == 64
    inputs = PlanInputs(model.layout, window=64, tokens_per_second=100)
    (tmp_path / "run.toml").write_text(fill(plan(inputs), model.table, model.vocabulary, "From config.json."))
    run_file = load_run(tmp_path / "run.toml")
    ids = ("bos_token_id", "eos_token_id")
    a, b = plain_config(config), plain_config(run_file.model.config)
    assert {k: v for k, v in a.items() if k not in ids} == {k: v for k, v in b.items() if k not in ids}
    assert not run_file.model.config.keys() & {*ids, "architectures", "torch_dtype"}


def test_a_plan_of_an_adapter_counts_its_frozen_base_and_is_written_with_it(tmp_path: Path):
    path = tmp_path / "run.toml"
    table = "\n".join(f"{k} = {v}" for k, v in (_small() | {"vocab_size": 512}).items()).replace("True", "true")
    path.write_text(f'[model]\nmodel_type = "llama"\n{table}\n[model.adapter]\nrank = 2\nalpha = 4\n')
    model = read_model(path)
    assert model.adapter is not None and model.frozen == model.whole.numel
    assert all(".lora_" in t.name for t in model.layout.tensors)
    inputs = PlanInputs(model.layout, frozen=model.frozen, frozen_bytes=model.frozen_bytes, window=64)
    assert inputs.speed * (6 * model.layout.numel + 4 * model.frozen) == pytest.approx(40e12)
    assert inputs.total == FINE_TUNING_TOKENS
    p = plan(inputs)
    said = "\n".join(lines(p))
    assert (
        f"on a frozen base of {model.frozen:,}" in said and f"({byte_size(model.frozen_bytes)} the frozen base" in said
    )
    assert "fsdp divides both among a peer's GPUs" in said
    printed = CliRunner().invoke(main, ["run", "plan", "--model", str(path)]).output
    assert re.search(r"^cards: .* needs about \S+ [kMG]?B with bfloat16, \S+ [kMG]?B with int8, ", printed, re.M), (
        printed
    )
    weights = {"weights": 'weights = "base"'}
    path.write_text(fill(p, model.table, model.vocabulary, "A note.", weights, model.adapter))
    run_file = load_run(path)
    assert run_file.model.adapter == model.adapter and run_file.inner.lr == p.lr
    assert run_file.inner.optimizer == "adamw" and run_file.outer == measurements.PLAIN
    assert "momentum made the loss 2.2% higher" in said and f"of adapters see {measurements.FINE_TUNING}" in said
    path.write_text(path.read_text().replace("rank = 2", "rank = 0"))
    with pytest.raises(ModelFileError, match=r"model\.adapter: rank: Input should be greater"):
        read_model(path)


def test_a_run_file_s_model_takes_its_vocabulary_from_the_data():
    model = read_model(EXAMPLE)
    assert model.vocabulary == 1024 and model.positions == 256 and "vocab_size" not in model.table


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "{", "not JSON"),
        ("config.json", "[" * 100_000, "not JSON"),
        ("config.json", "{}", "model_type"),
        ("config.json", '{"model_type": "lama"}', "llama"),
        ("config.json", '{"model_type": "llama", "hiden_size": 3}', "hidden_size"),
        ("config.json", '{"model_type": "llama", "vocab_size": 10, "hidden_size": 64, "num_hidden_layers": 1}', "10"),
        ("config.json", '{"model_type": "llama", "rms_norm_eps": NaN}', "error"),
        ("config.json", '{"model_type": "mistral", "num_hidden_layers": 1, "sliding_window": null}', "sliding_window"),
        ("run.toml", "[run]\nname = 3", "[model]"),
        ("run.toml", "model = ", "not TOML"),
        ("config.json", "\x00\x01", "not JSON"),
    ],
)
def test_a_file_without_a_model_is_refused_by_name(tmp_path: Path, name: str, text: str, said: str):
    (tmp_path / name).write_text(text)
    error = refused("--model", str(tmp_path / name))
    assert said in error and name in error


# -- the command ---------------------------------------------------------------------------------------------


def cairn(*arguments: str):
    result = CliRunner().invoke(main, ["run", *arguments], prog_name="cairn")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments: str) -> str:
    result = cairn("plan", *arguments)
    assert result.exit_code != 0, result.stdout
    assert sum(line.lower().startswith("error") for line in result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def test_a_plan_says_what_to_write_why_and_what_it_costs():
    said = cairn("plan", "--peers", "4", "--uplink", "400").stdout
    for word in (
        "codec.kind",
        "inner.optimizer",
        "round.target_tokens",
        measurements.SOURCE,
        "assumed: 40%",
        "rounds",
        "data-parallel",
        "Mbit/s",
    ):
        assert word in said
    assert "TOO SLOW" not in said
    assert f"{measurements.SOURCE}, with outer rate 1.4)" in said, "not the loss of the outer step that is written"


def test_a_plan_has_one_loss_in_print_and_in_the_file_and_says_what_is_computed(tmp_path: Path):
    wide = cairn("plan", "--peers", "4", "--uplink", "400", "--out", str(tmp_path / "wide.toml")).stdout
    words = re.search(r"([0-9.]+) x data-parallel's as measured, ([0-9.]+) x with [^(]+\(by calculation\)", wide)
    assert words and float(words[1]) < float(words[2])
    assert words[0] in (tmp_path / "wide.toml").read_text().replace("\n# ", " ")
    longest = cairn("plan", "--uplink", "5", "--parameters", "7B").stdout
    assert "(by calculation, beyond what was measured)" in longest


def test_a_plan_for_more_peers_than_were_measured_says_so():
    measured = measurements.MEASURED_PEERS
    assert f"measured with {measured} peers" in cairn("plan", "--peers", str(measured + 1)).stdout
    assert f"measured with {measured} peers" not in cairn("plan", "--peers", str(measured)).stdout


def test_links_too_slow_for_any_setting_are_said_to_be_with_remedies():
    result = cairn("plan", "--uplink", "5", "--parameters", "7B")
    assert result.exit_code == 0
    assert "TOO SLOW" in result.stdout and "target_tokens = " in result.stdout
    assert "--share" not in result.stdout.split("TOO SLOW")[0]
    share = re.search(r"--share ([0-9.]+)", result.stdout)
    assert share and "TOO SLOW" not in cairn("plan", "--uplink", "5", "--parameters", "7B", "--share", share[1]).stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--parameters", "many"), ("--parameters", "-1B"), ("--parameters", "nan"), ("--parameters", "10"),
        ("--parameters", "9e15"), ("--parameters", "9" * 400), ("--peers", "1"), ("--peers", "100000"),
        ("--peers", "x"), ("--uplink", "0"), ("--uplink", "nan"), ("--uplink", "inf"), ("--uplink", "-3"),
        ("--downlink", "0"), ("--rtt", "-1"), ("--rtt", "nan"), ("--tokens-per-second", "0"),
        ("--tokens-per-second", "1"), ("--window", "1"), ("--window", "99999999"), ("--batch", "0"),
        ("--batch", "65537"), ("--total-tokens", "12"), ("--total-tokens", "1e15"), ("--share", "0"),
        ("--share", "1.5"), ("--share", "nan"), ("--model", "/nowhere/config.json"),
    ],
)  # fmt: skip
def test_a_number_that_will_not_do_is_named_with_its_option(option: str, value: str):
    error = refused(option, value)
    assert option in error or value in error


def test_a_model_and_a_number_of_parameters_are_one_too_many():
    assert "--parameters" in refused("--model", str(EXAMPLE), "--parameters", "1B")


def test_a_window_that_the_model_does_not_take_is_refused():
    assert "--window" in refused("--model", str(EXAMPLE), "--window", "512")


@pytest.mark.parametrize(
    ("text", "number"),
    [("130M", 130_000_000), ("1B", 10**9), ("1b", 10**9), ("7e9", 7 * 10**9), ("1.5K", 1500), ("20_000", 20_000)],
)
def test_numbers_may_be_written_as_people_do(text: str, number: int):
    assert parse_count(text, "--parameters") == number


@pytest.mark.parametrize("model", [None, EXAMPLE])
def test_the_written_template_validates_once_its_data_are_named(tmp_path: Path, model: Path | None):
    out = tmp_path / "run.toml"
    given_model = ("--model", str(model)) if model else ("--parameters", "20M")
    result = cairn("plan", *given_model, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    unfilled = cairn("validate", str(out))
    assert unfilled.exit_code == 1 and "EDIT-ME" in unfilled.stderr and "data" in unfilled.stderr
    document = json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 20})
    (tmp_path / "text.jsonl").write_text(f"{document}\n" * 150)
    out.write_text(out.read_text().replace("EDIT-ME/documents.jsonl", "text.jsonl"))
    filled = cairn("validate", str(out))
    assert filled.exit_code == 0, filled.stderr
    planned = re.search(r"length +([0-9,]+) rounds", result.stdout)
    assert planned and f"about {planned[1]} rounds" in filled.stdout


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path):
    out = tmp_path / "run.toml"
    out.write_text("mine")
    assert "--force" in refused("--out", str(out))
    assert out.read_text() == "mine"
    assert cairn("plan", "--out", str(out), "--force").exit_code == 0
    assert "[codec]" in out.read_text() and [p.name for p in tmp_path.iterdir()] == ["run.toml"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    assert "gone" in refused("--out", str(tmp_path / "gone" / "run.toml"))


def test_what_is_wrong_with_a_question_is_an_error_of_the_project():
    with pytest.raises(CairnError, match="uplink"):
        PlanInputs(10**9, uplink=math.nan)
