"""A trainer of a run that trains a LoRA adapter on a frozen base."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from coordinator.authoring.weights import read
from peer.channel import Apply
from peer.errors import TrainingError
from peer.training import layers, trial
from peer.training.flops import flops_per_token
from peer.training.inner_optimizer import MUON_MOMENTS
from peer.training.layers import LayerOptions, Layers
from peer.training.parallel import plans, setup
from peer.training.parallel.model import build_rank_model, make_mesh
from peer.training.parallel.parallel_dims import ParallelDims
from peer.training.parallel.setup import resolve
from peer.training.single_process import SingleProcessBackend
from protocol.adapter import (
    base_file_layout,
    base_layout,
    base_parameters,
    build_adapted,
    build_run_model,
    held_bytes,
    load_base,
)
from protocol.errors import MalformedError, SpecError
from protocol.model import build_model, model_layout, parameters_of, plain_config
from protocol.quantised import ABSMAX, QuantisedLinear
from protocol.spec import AdapterSettings, CodecSpec, RunSpec
from protocol.training_memory import model_bytes, round_bytes
from tests.support.local_trainer import born, closed, copied, loaded, train, update  # noqa: F401
from tests.support.long_cases import long_cases
from tests.support.parallel_world import join
from tests.support.specs import EXPERTS
from tests.support.trainer_world import BATCH, World, accepted_round, apply

ADAPTER = AdapterSettings(rank=4, alpha=8, train=["input_layernorm"])
ADAPTER_OF_ALL = AdapterSettings(rank=2, alpha=2)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path, adapter=ADAPTER, codec=CodecSpec(kind="sign"))


@pytest.fixture(params=["bfloat16", "int8", "nf4"])
def of_each_dtype(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    return World.make(
        tmp_path, adapter=ADAPTER.model_copy(update={"dtype": request.param}), codec=CodecSpec(kind="sign")
    )


def frozen(trainer) -> dict[str, Tensor]:
    """Return the frozen tensors by their names in the base's file."""
    model = trainer.backend.inner.model
    trained, held = parameters_of(model), base_parameters(model)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantisedLinear):
            weight = name.removesuffix(".base_layer") + ".weight"
            held |= {weight: layer.codes, weight + ABSMAX: layer.absmax}
    return {n: t for n, t in held.items() if n not in trained}


def test_two_peers_train_one_adapter_and_neither_moves_the_base(of_each_dtype, tmp_path):
    world = of_each_dtype
    a, b = loaded(world, 1), loaded(world, 2)
    before, base = copied(a.backend.outer.base), copied(frozen(a))
    assert set(before) == {t.name for t in world.spec.model.layout.tensors} | {"outer_reference_norms"}
    train(a, 3)
    train(b, 2)
    made = [(1, update(a, tmp_path / "a")), (2, update(b, tmp_path / "b"))]
    accepted = accepted_round(0, *made)
    first, second = (
        apply(t, Apply(accepted, (), next_window=m.end_window, accepted_windows=20))
        for t, (_, m) in zip((a, b), made, strict=True)
    )
    assert first.state_digest == second.state_digest
    assert any(not torch.equal(before[n], a.backend.outer.base[n]) for n in before if ".lora_B." in n)
    for trainer in (a, b):
        assert all(torch.equal(t, base[n]) for n, t in frozen(trainer).items())


def test_the_base_in_the_model_has_the_values_of_its_file(of_each_dtype):
    world, file = of_each_dtype, of_each_dtype.start(1).base
    trainer, spec = loaded(world), world.spec.model
    assert spec.adapter is not None and file is not None
    assert all(torch.equal(t, load_file(file)[n].to(t.dtype)) for n, t in frozen(trainer).items())
    quantised = {n for n, t in frozen(trainer).items() if t.dtype == torch.uint8}
    assert len(quantised) == (7 if spec.adapter.quantised else 0) and "lm_head.weight" not in quantised
    stored = {n: t.bfloat16().float() for n, t in parameters_of(build_model(spec.config, seed=1)).items()}
    in_fp32 = build_adapted(spec.config, spec.adapter, device="cpu")
    load_base(in_fp32, spec.adapter, file.read_bytes())
    for name, tensor in base_parameters(in_fp32).items():
        off = {"bfloat16": 0, "int8": 0.01, "nf4": 0.12}[spec.adapter.dtype] if name in quantised else 0
        assert (tensor - stored[name]).norm() <= off * stored[name].norm()
    assert torch.equal(
        trainer.backend.outer.base["model.layers.0.input_layernorm.weight"],
        stored["model.layers.0.input_layernorm.weight"],
    )


def test_what_is_saved_and_resumed_is_the_adapter(of_each_dtype):
    world = of_each_dtype
    a = loaded(world)
    train(a, 3)
    a.checkpointer.save_now()
    learnt = copied(parameters_of(a.backend.inner.model))
    a.close()
    again = loaded(world)
    for name, tensor in parameters_of(again.backend.inner.model).items():
        torch.testing.assert_close(tensor, learnt[name], rtol=0, atol=1e-6)
        assert not torch.equal(tensor, again.backend.outer.base[name])
    files = (world.folder / "peer1" / "trainer").glob("trainer-*.safetensors")
    names = {key.partition("/")[2] for file in files for key in load_file(file)}
    assert names == {tensor.name for tensor in world.spec.model.layout.tensors}


def test_the_loss_goes_down_on_a_base_of_each_dtype(tmp_path):
    ends = {}
    for dtype in ("bfloat16", "int8", "nf4"):
        adapter = ADAPTER.model_copy(update={"dtype": dtype})
        (tmp_path / dtype).mkdir()
        trainer = loaded(World.make(tmp_path / dtype, adapter=adapter, lr=0.02))
        made = [trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter)) for _ in range(30)]
        first, *_, ends[dtype] = [step.loss for step in made if step is not None]
        assert ends[dtype] < first - 0.2
    assert len(set(ends.values())) == 3
    assert abs(ends["int8"] - ends["bfloat16"]) < 0.01 and abs(ends["nf4"] - ends["bfloat16"]) < 0.1


def test_a_damaged_base_or_another_one_is_refused(of_each_dtype):
    world, file = of_each_dtype, of_each_dtype.start(1).base
    assert file is not None
    data = file.read_bytes()
    for wrong, why in ((data[:-1], "bytes, not"), (data[:-1] + bytes([data[-1] ^ 1]), "the digest")):
        file.write_bytes(wrong)
        with pytest.raises(MalformedError, match=why):
            born(world)
        with pytest.raises(MalformedError, match=why):
            born(world, parallel="dp=2")  # refused before any other rank starts
    with pytest.raises(TrainingError, match="base model is not here"):
        born(world, base=None)
    file.write_bytes(data)
    assert loaded(world).base.record is not None


def test_a_base_of_another_model_is_refused_whatever_its_digest(of_each_dtype):
    world = of_each_dtype
    spec, file = world.spec.model, world.start(1).base
    assert spec.adapter is not None and file is not None
    model = build_adapted(dict(spec.config, num_hidden_layers=2), spec.adapter, device="cpu")
    with pytest.raises(MalformedError, match="parameters, and the spec says"):
        load_base(model, spec.adapter, file.read_bytes())
    model = build_run_model(spec)
    for dtype in {"bfloat16", "float32", "int8", "nf4"} - {spec.adapter.dtype}:
        with pytest.raises(MalformedError, match="for this model it has"):
            load_base(model, spec.adapter.model_copy(update={"dtype": dtype}), file.read_bytes())
    other = file.read_bytes().replace(b'"model.norm.weight"', b'"model.mron.weight"')
    with pytest.raises(MalformedError, match="of another model, or its header"):
        load_base(model, spec.adapter, other)


def test_a_base_held_in_bf16_or_quantised_gives_the_same_bits_under_autocast(of_each_dtype):
    spec, file = of_each_dtype.spec.model, of_each_dtype.start(1).base
    assert spec.adapter is not None and file is not None
    found = []
    for quantised, held in product({False, spec.adapter.quantised}, (torch.float32, torch.bfloat16)):
        model = build_adapted(spec.config, spec.adapter, device="cpu", held=held, quantised=quantised)
        load_base(model, spec.adapter, file.read_bytes())
        found.append(passes(model))
    first, *others = found
    assert len(first) > 1 and len(others) == (3 if spec.adapter.quantised else 1)
    assert all(torch.equal(a, b) for again in others for a, b in zip(first, again, strict=True))


def passes(model: torch.nn.Module, *, autocast: bool = True) -> list[Tensor]:
    """Return the output, and the gradients of an adapter that has the same random values each time."""
    for name, parameter in parameters_of(model).items():
        with torch.random.fork_rng():
            torch.manual_seed(len(name))
            parameter.normal_(std=0.1)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = model(input_ids=torch.arange(2 * 16).reshape(2, 16) % 64).logits
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("dtype", "targets"), [("bfloat16", ["q_proj", "o_proj"]), ("bfloat16", ["all-linear"]), ("nf4", ["all-linear"])]
)
def test_stacked_experts_are_held_in_bf16_and_compute_the_same(dtype, targets, tmp_path):
    world = World.make(tmp_path, adapter=AdapterSettings(rank=4, alpha=8, targets=targets, dtype=dtype), config=EXPERTS)
    spec, file = world.spec.model, world.start(1).base
    adapter = spec.adapter
    assert adapter is not None and file is not None
    plain = build_adapted(spec.config, AdapterSettings(rank=4, alpha=8, targets=targets, dtype="float32"), device="cpu")
    fp32, bf16 = (
        build_adapted(spec.config, adapter, device="cpu", held=held, quantised=adapter.quantised)
        for held in (torch.float32, torch.bfloat16)
    )
    for model in (plain, fp32, bf16):
        load_base(model, adapter, file.read_bytes())
    codes = [b for n, b in bf16.named_buffers() if n.endswith((".codes", ".absmax"))]
    held = sum(t.nbytes for t in [*codes, *(p for p in bf16.parameters() if not p.requires_grad)])
    assert held_bytes(spec.config, adapter, "cuda") == held
    alone, ours, same = passes(plain), passes(fp32), passes(bf16)
    assert len(ours) > 1 and all(map(torch.equal, ours, same))
    # Only the experts without an adapter compute otherwise than in transformers alone: in bf16 as linear layers do.
    adapted = any(".experts." in name for name in parameters_of(bf16))
    most = 0 if adapted else 0.1
    assert all((a.float() - o.float()).norm() <= most * a.float().norm() for a, o in zip(alone, ours, strict=True))
    assert torch.equal(passes(plain, autocast=False)[0], passes(fp32, autocast=False)[0])
    stored = load_file(file)
    experts = {name: t for name, t in base_parameters(bf16).items() if ".experts." in name}
    assert len(experts) == 2
    for name, tensor in experts.items():
        assert tensor.dtype == stored[name].dtype == torch.bfloat16 and torch.equal(tensor, stored[name])


def test_compiled_layers_train_an_adapter_of_experts(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    model = build_run_model(World.make(tmp_path, adapter=ADAPTER_OF_ALL, config=EXPERTS).spec.model)
    before = passes(model)
    made = Layers(model, LayerOptions(compiled=True))
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(before, passes(model), strict=True))
    assert made.compiled


def test_an_auditor_measures_with_the_base_in_fp32(world):
    backend = SingleProcessBackend(world.spec, torch.device("cpu"), lambda: None, base=world.start(1).base, exact=True)
    assert {p.dtype for p in backend.inner.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("parallel", "dtype"), [("fsdp=2", "bfloat16"), *long_cases(("dp=2", "nf4"))])
def test_many_ranks_make_the_states_of_one_process_and_what_they_save_fits_it(parallel, dtype, tmp_path):
    world = World.make(tmp_path, adapter=ADAPTER.model_copy(update={"dtype": dtype}), codec=CodecSpec(kind="sign"))
    many, heard = born(world, 1, parallel=parallel)
    one, _ = born(world, 1)
    one.folder.folder = tmp_path / "twin"
    try:
        assert {t.load(world.load()).state_digest for t in (many, one)} == {world.spec.genesis.name}
        for name, tensor in parameters_of(one.backend.inner.model).items():
            shard = many.backend.worker.built.local(name)  # rank 0's: the first rows
            assert len(shard) <= len(tensor) and torch.equal(shard, tensor[: len(shard)])
        for trainer in (many, one):
            train(trainer, 2)
        made, other = update(many, tmp_path / "many"), update(one, tmp_path / "one")
        assert made.loss == pytest.approx(other.loss, rel=1e-4)
        train(many, 1)
        record = accepted_round(0, (1, made))
        ask = Apply(record, (), next_window=made.end_window, accepted_windows=2 * BATCH)
        digests = {apply(trainer, ask).state_digest for trainer in (many, one)}
        assert len(digests) == 1
        many.checkpointer.save_now()
        assert [kind for _, kind, _ in heard] == ["parallel"]
    finally:
        many.close(in_order=True)
    again, heard = born(world, 1)
    assert again.load(world.load(record, next_window=made.end_window)).state_digest in digests and not heard
    assert again.windows.counter == 3 * BATCH and again.backend.optimizer_steps == 3


def test_a_rank_holds_and_computes_what_one_process_does(of_each_dtype, tmp_path):
    spec, file = of_each_dtype.spec.model, of_each_dtype.start(1).base
    assert spec.adapter is not None and file is not None
    join(0, 1, tmp_path / "meet")
    try:
        cpu, dims = torch.device("cpu"), ParallelDims()
        rank = build_rank_model(spec.config, dims, make_mesh(dims, cpu), cpu, spec.adapter).body
    finally:
        dist.destroy_process_group()
    windows, found = torch.arange(2 * 16).reshape(2, 16), []
    for model in (build_run_model(spec), rank):
        load_base(model, spec.adapter, file.read_bytes())
        for parameter in parameters_of(model).values():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
        model(input_ids=windows).logits.square().mean().backward()
        gradients = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append(dict(model.named_parameters()) | dict(model.named_buffers()) | gradients)
    one, other = found
    assert one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())
    assert other.keys() > {f"{t.name}.grad" for t in spec.layout.tensors}
    assert sum(name.endswith(".codes") for name in other) == (7 if spec.adapter.quantised else 0)


def test_tp_and_pp_are_refused_with_what_can_be(world):
    for parallel in ("tp=2", "pp=2"):
        why = "is not for a run that trains an adapter on a frozen base; on 2 ranks these work: dp=2; fsdp=2$"
        with pytest.raises(TrainingError, match=why):
            resolve(parallel, "cpu", world.spec)
    assert resolve("auto", "cpu", world.spec)[0] == ParallelDims()
    assert resolve("dp=2,fsdp=2", "cpu", world.spec)[0] == ParallelDims(dp=2, fsdp=2)


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_fsdp_of_a_quantised_base_is_refused_and_auto_never_takes_it(dtype, tmp_path, monkeypatch):
    spec = World.make(tmp_path, adapter=ADAPTER.model_copy(update={"dtype": dtype})).spec
    for parallel in ("fsdp=2", "fsdp=2,zero=2"):
        why = f"cannot divide this run's frozen base, whose {dtype} codes each GPU holds whole; .* these work: dp=2$"
        with pytest.raises(TrainingError, match=why):
            resolve(parallel, "cpu", spec)
    assert resolve_7b(monkeypatch, spec, 2, 24)[0] == ParallelDims(dp=2)
    with pytest.raises(TrainingError, match=r"13\.0 GiB a GPU is the least .* \(with dp=2\), .* use larger GPUs"):
        resolve_7b(monkeypatch, spec, 2, 12)


def test_the_doctor_knows_what_a_base_in_nf4_saves_and_who_holds_it_whole(of_each_dtype: World):
    spec = of_each_dtype.spec
    adapter = spec.model.adapter
    assert adapter is not None
    found = trial.look(spec, "cpu", "cpu", ParallelDims())
    smallest = held_bytes(spec.model.config, adapter.model_copy(update={"dtype": "nf4"}), "cpu")
    assert found.base_savable == held_bytes(spec.model.config, adapter, "cpu") - smallest
    assert (found.base_savable > 0) == (adapter.dtype != "nf4")
    assert found.holds_whole == (adapter.dtype != "bfloat16")
    assert trial.look(spec, "cpu", "cpu", ParallelDims(dp=2)).base_savable == 0


def resolve_7b(monkeypatch, spec: RunSpec, gpus: int, gib: int) -> tuple[ParallelDims, str, str]:
    """Return what auto takes on GPUs of this much memory, if the base has 7B parameters and 14 GB."""
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=gib << 30),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(setup, "link", lambda: "pcie")
    monkeypatch.setattr(plans, "held_bytes", lambda *_: 14_000_000_000)
    adapter = spec.model.adapter.model_copy(update={"parameters": 7_000_000_000})
    sizes = {"hidden_size": 4096, "vocab_size": 32_000, "num_hidden_layers": 32, "tie_word_embeddings": False}
    model = spec.model.model_copy(update={"adapter": adapter, "config": spec.model.config | sizes})
    return resolve("auto", "auto", spec.model_copy(update={"model": model}))[:3]


@pytest.mark.parametrize(
    ("gpus", "gib", "chosen", "why"),
    [
        (2, 24, "dp=2", "the model fits on each of 2 ranks"),
        (2, 12, "fsdp=2", "dp=2 would need 13.0 GiB of 9.6 GiB on each"),
        (4, 12, "dp=2,fsdp=2", "dp=4 would need"),
        (8, 24, "dp=4", "; 4 of 8 GPUs used, since inner.batch is 4"),
    ],
)
def test_auto_divides_a_base_only_if_it_fits_no_gpu(world, monkeypatch, gpus, gib, chosen, why):
    dims, kind, text = resolve_7b(monkeypatch, world.spec, gpus, gib)
    assert (str(dims), kind) == (chosen, "cuda") and why in text


def test_what_a_gpu_gathers_of_a_divided_base_must_fit_beside_its_share(world, monkeypatch):
    """Half of the base are 7.0 GB. Embeddings, output layer and one layer take 0.9 GB more, of 7.7 GB."""
    with pytest.raises(TrainingError, match=r"7\.4 GiB a GPU is the least that .* need on 2 of them"):
        resolve_7b(monkeypatch, world.spec, 2, 9)


def test_auto_takes_one_gpu_for_steps_of_one_window_and_says_so(world, monkeypatch):
    spec = world.spec.model_copy(update={"inner": world.spec.inner.model_copy(update={"batch": 1})})
    found = resolve_7b(monkeypatch, spec, 2, 12)
    assert found == (ParallelDims(), "cuda", "1 of 2 GPUs used, since inner.batch is 1")


def test_memory_counts_the_base_as_it_is_held(of_each_dtype):
    spec, base = of_each_dtype.spec, frozen(loaded(of_each_dtype))
    adapter, layout, config = spec.model.adapter, spec.model.layout, spec.model.config
    assert adapter is not None
    held = sum(t.nbytes for t in base.values())
    assert held_bytes(config, adapter, "cpu") == held
    # On a GPU linear layers are in bf16: here the output layer, and those that are not quantised.
    linear = sum(
        t.numel()
        for name, t in base.items()
        if t.dtype == torch.float32 and name.endswith(("_proj.weight", "lm_head.weight"))
    )
    assert held_bytes(config, adapter, "cuda") == held - 2 * linear
    needed = model_bytes(layout, config, spec.inner) + round_bytes(layout, spec.outer)
    assert trial.look(spec, "cpu", "cpu", ParallelDims()).needed == needed + held
    largest = 8 * max(t.numel for t in layout.tensors)
    for dims in (ParallelDims(dp=2), ParallelDims(fsdp=2)):
        if not (adapter.quantised and dims.fsdp > 1):
            halved = needed + held if dims.fsdp > 1 else round_bytes(layout, spec.outer)
            gathered = plans.limits(spec, "cpu", offloads=False).base_at_once if dims.fsdp > 1 else 0
            assert trial.look(spec, "cpu", "cpu", dims).needed == needed + held - halved // 2 + largest + gathered
    layer = sum(t.numel() for name, t in base.items() if ".layers.0." in name)
    outer = sum(t.numel() for name, t in base.items() if "embed_tokens" in name or "lm_head" in name)
    at_once = plans.limits(spec, "cpu", offloads=False).base_at_once
    assert adapter.quantised or at_once == pytest.approx(2 * (layer + outer), rel=0.02), "but for the last norm"


def test_flops_count_the_base(world):
    config, window = world.spec.model.config, world.spec.data.window
    whole = flops_per_token(build_model(config, device="meta"), window)
    plain = build_adapted(config, AdapterSettings(rank=4, alpha=8))
    counted = flops_per_token(plain, window)
    assert whole is not None and counted is not None
    attention = 12 * 32 * window
    lora = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    assert counted == (whole - attention) * 4 // 6 + 6 * lora + attention


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "llama", "gpt2"])
def test_the_base_under_an_adapter_has_the_names_and_the_counted_memory_of_the_plain_model(kind, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "num_experts": 2,
             "num_local_experts": 2, "num_experts_per_tok": 1, "n_embd": 32, "n_layer": 1, "n_head": 2}  # fmt: skip
    known = CONFIG_MAPPING[kind]().to_dict()
    config = plain_config({"model_type": kind} | {k: v for k, v in sizes.items() if k in known})
    adapted, plain = build_adapted(config, ADAPTER_OF_ALL), build_model(config, device="meta")
    assert base_layout(adapted) == model_layout(plain)
    held = build_adapted(config, ADAPTER_OF_ALL, device="cpu", held=torch.bfloat16)
    counted = held_bytes(config, ADAPTER_OF_ALL, "cuda")
    assert counted == sum(p.nbytes for p in held.parameters() if not p.requires_grad)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)  # somebody who looks for a run has not installed it
        assert held_bytes(config, ADAPTER_OF_ALL, "cuda") == counted
    of_nf4 = AdapterSettings(rank=2, alpha=2, dtype="nf4")
    if kind == "gpt2":
        with pytest.raises(SpecError, match="gpt2 has no linear layers of torch"):
            base_file_layout(adapted, of_nf4)
        return
    quantised = build_adapted(config, of_nf4, device="cpu", quantised=True)
    assert base_layout(quantised) == model_layout(plain)
    found = base_file_layout(quantised, of_nf4)
    assert found == base_file_layout(adapted, of_nf4)
    assert {t.name for t in found.tensors if t.kind == "U8"} >= {
        f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkvo"
    }


def test_tensors_that_a_model_loads_in_fp32_all_the_same_become_bf16_in_the_base(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
             "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4,
             "num_experts_per_tok": 2, "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": None,
             "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}  # fmt: skip
    config = plain_config({"model_type": "deepseek_v2"} | sizes)
    build_model(config).to(torch.bfloat16).save_pretrained(tmp_path)
    assert {t.dtype for t in read(tmp_path, config, torch.bfloat16).values()} == {torch.bfloat16}


def test_no_linear_module_that_is_meant_is_left_out_without_a_word():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "num_experts": 4,
             "num_experts_per_tok": 2, "mlp_only_layers": [0]}  # fmt: skip
    config = plain_config({"model_type": "qwen3_moe"} | sizes)
    for targets in (["all-linear"], ["q_proj", "gate_proj", "up_proj", "down_proj"]):
        with pytest.raises(SpecError, match=r"3 of these linear modules would .*, as model\.layers\.0\.mlp"):
            build_adapted(config, AdapterSettings(rank=4, alpha=8, targets=targets))
    build_adapted(config, AdapterSettings(rank=4, alpha=8, targets=["q_proj", "v_proj"]))


def test_a_trial_needs_no_base(world):
    trainer = trial.build(world.folder / "spec.json", "cpu", ParallelDims(), 1)
    samples = list(trial.steps(trainer, ParallelDims(), 0.2))
    assert samples and samples[0].windows == 1


def test_muon_steps_the_adapters_matrices(tmp_path):
    trainer = loaded(World.make(tmp_path, adapter=ADAPTER, optimizer="muon"))
    train(trainer, 1)
    by_muon = {n.partition("/")[2] for n in trainer.backend.inner.moments()[1] if n.partition("/")[0] in MUON_MOMENTS}
    assert by_muon == {t.name for t in trainer.spec.model.layout.tensors if ".lora_" in t.name}
