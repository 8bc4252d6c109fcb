"""The cards that suffice, by the estimate that owners and volunteers read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cairn.listed_run import frozen_bytes
from coordinator.authoring.memory import eight_bit_saving, training_memory
from protocol.adapter import add_adapter, base_file_layout, base_layout, build_adapted, held_bytes
from protocol.layout import Layout
from protocol.model import build_model, model_layout
from protocol.spec import AdapterSettings, AdapterSpec, AuditSpec, BlobRef, InnerSpec
from protocol.training_memory import model_bytes
from tests.support.coordinator_fakes import make_spec
from tests.support.peak_memory import activation_bytes

INNER = make_spec().inner
GUIDE = Path(__file__).parents[3] / "docs" / "finetuning.md"


def llama(hidden: int, intermediate: int, layers: int, vocabulary: int, *, tied: bool) -> dict:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 128, "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }  # fmt: skip


SEVEN = llama(4096, 11008, 32, 32_000, tied=False)
WINDOW = 2048
"""The longest that `cairn run init` chooses by itself."""

TWO = llama(2048, 8192, 28, 65_536, tied=True)


def whole(config: dict) -> Layout:
    return model_layout(build_model(config, device="meta"))


def with_optimizer(name: str, batch: int = 16) -> InnerSpec:
    return INNER.model_copy(update={"optimizer": name, "batch": batch})


def test_more_windows_in_a_step_need_no_more_memory():
    layout = whole(TWO)
    one, many = (training_memory(layout, TWO, with_optimizer("muon", batch), 1024) for batch in (1, 64))
    assert one == many
    assert training_memory(layout, TWO, with_optimizer("muon"), 2048) > one


def test_two_billion_parameters_train_whole_on_24_gb_with_moments_in_8_bits_and_not_without():
    layout, inner = whole(TWO), with_optimizer("muon")
    assert 1.9e9 < layout.numel < 2.2e9
    usual = training_memory(layout, TWO, inner, WINDOW)
    rounded = usual - eight_bit_saving(layout, TWO, inner, AuditSpec(), usual)
    assert usual > 24e9 > rounded and f"2B by Muon {rounded / 1e9:.1f} GB" in GUIDE.read_text()
    assert eight_bit_saving(layout, TWO, inner, AuditSpec(replayable=True), usual) == 0, "it forbids them"


@pytest.mark.parametrize("dtype", ["bfloat16", "nf4", "int8"])
def test_an_adapter_of_seven_billion_parameters_trains_on_16_gb_in_fewer_bits(dtype: str):
    base = held_bytes(SEVEN, AdapterSettings(rank=16, alpha=32, dtype=dtype), "cuda")
    settings = AdapterSettings(rank=16, alpha=32, dtype=dtype)
    adapted = build_adapted(SEVEN, settings)
    parameters, size = base_layout(adapted).numel, base_file_layout(adapted, settings).checkpoint_size
    spec = AdapterSpec(**settings.model_dump(), base=BlobRef(digest="00" * 32, size=size), parameters=parameters)
    assert frozen_bytes(spec, SEVEN, on_cpu=False) == pytest.approx(base, rel=0.02), "what `cairn runs` says of it"
    on_cpu = held_bytes(SEVEN, settings, "cpu")
    assert frozen_bytes(spec, SEVEN, on_cpu=True) == pytest.approx(on_cpu, rel=0.001)
    row = next(line for line in GUIDE.read_text().splitlines() if "a base of 7B" in line)
    (told,) = re.findall(rf"`{dtype}` ([\d.]+) GB", row)
    assert base / 1e9 == pytest.approx(float(told), abs=0.05), "the guide's table"
    # Two matrices of rank 16 for each of seven linear layers.
    shapes = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
    pairs = [((16, i), (o, 16)) for o, i in shapes * 32]
    adapter = Layout.of({f"{n:03}.{m}": shape for n, pair in enumerate(pairs) for m, shape in enumerate(pair)})
    assert 35e6 < adapter.numel < 45e6
    needed = training_memory(adapter, SEVEN, with_optimizer("adamw", 1), WINDOW, base)
    assert (needed < 16e9) == (dtype != "bfloat16")
    assert dtype == "bfloat16" or f"{needed / 1e9:.1f} GB in `{dtype}`" in GUIDE.read_text()
    larger = training_memory(adapter, SEVEN | {"vocab_size": 128_000}, with_optimizer("adamw", 1), WINDOW, base)
    assert 11 < (larger - needed) / ((128_000 - 32_000) * WINDOW) < 13, "bytes of logits"


@pytest.mark.parametrize("vocabulary", [512, 40_000])
@pytest.mark.parametrize("kind", ["gpu", "cpu", "adapter"])
def test_the_activations_that_are_told_are_those_of_a_step(kind: str, vocabulary: int):
    """The step is the trainer's, on tensors that have sizes and no values."""
    config, on_cpu = llama(512, 1376, 4, vocabulary, tied=True), kind == "cpu"
    adapter = AdapterSettings(rank=8, alpha=16, dtype="bfloat16") if kind == "adapter" else None
    model = build_model(config, device="meta")
    if adapter is not None:
        add_adapter(model, adapter)
    layout = Layout.of({n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad})
    inner = with_optimizer("adamw")
    told = training_memory(layout, config, inner, WINDOW, int(adapter is not None), on_cpu=on_cpu)
    told -= model_bytes(layout, config, inner)
    assert 0.95 * told < activation_bytes(config, WINDOW, adapter, on_cpu=on_cpu) < 1.05 * told


def test_an_adapter_of_stacked_experts_needs_copies_of_a_layers_experts():
    config = llama(512, 1376, 2, 512, tied=True) | {
        "model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
        "head_dim": 128,
    }  # fmt: skip
    window, inner = 256, with_optimizer("adamw")

    def needed(targets: list[str]) -> int:
        model = build_adapted(config, AdapterSettings(rank=8, alpha=16, targets=targets), device="meta")
        layout = Layout.of({n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad})
        return training_memory(layout, config, inner, window, 1) - model_bytes(layout, config, inner)

    experts = 3 * 32 * 512 * 512
    assert 11 * experts < needed(["all-linear"]) - needed(["q_proj"]) <= 12 * experts
