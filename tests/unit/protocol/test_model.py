"""Models from configs: pure, strict, and clear about what is wrong."""

import json

import pytest
import rfc8785
import torch

from protocol.errors import SpecError
from protocol.model import build_model, load_state, model_layout, parameters_of, plain_config

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_config_in_a_spec_survives_canonical_json_and_builds_the_same_model(config):
    plain = plain_config(config)
    again = json.loads(rfc8785.dumps(plain))
    assert plain_config(again) == plain
    assert not {"transformers_version", "_name_or_path", "architectures"} & plain.keys()
    a, b = build_model(config, seed=3), build_model(again, seed=3)
    assert model_layout(a) == model_layout(b) == model_layout(build_model(again, device="meta"))
    for x, y in zip(parameters_of(a).values(), parameters_of(b).values(), strict=True):
        assert torch.equal(x, y)


def test_building_is_a_function_of_the_seed_and_leaves_the_random_state_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one, two = parameters_of(build_model(LLAMA, seed=1)), parameters_of(build_model(LLAMA, seed=2))
    assert torch.equal(torch.rand(3), expected)
    assert any(not torch.equal(one[n], two[n]) for n in one)


def test_a_tied_parameter_is_listed_once():
    names = [t.name for t in model_layout(build_model(LLAMA)).tensors]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    untied = [t.name for t in model_layout(build_model(LLAMA | {"tie_word_embeddings": False})).tensors]
    assert "lm_head.weight" in untied


def test_a_loaded_state_is_what_the_model_computes_with():
    source, target = build_model(LLAMA, seed=1), build_model(LLAMA, seed=2)
    load_state(target, {n: p.clone() for n, p in parameters_of(source).items()})
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(source(input_ids=ids).logits, target(input_ids=ids).logits)


def test_a_field_that_only_the_model_s_code_reads_is_kept_and_decides_shapes():
    config = {
        "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    }  # fmt: skip
    plain = json.loads(rfc8785.dumps(plain_config(config)))
    assert plain["head_dim"] == 16 and plain_config(plain) == plain
    shapes = {t.name: t.shape for t in model_layout(build_model(plain, device="meta")).tensors}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4 * 16, 32)


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    model = build_model(LLAMA)
    before = {n: p.clone() for n, p in parameters_of(model).items()}
    with pytest.raises(SpecError, match="does not fit"):
        load_state(model, {n: p for n, p in before.items() if "norm" not in n})
    wrong = {n: torch.zeros(1) if n == "model.norm.weight" else p + 1 for n, p in before.items()}
    with pytest.raises(SpecError, match=r"model\.norm\.weight is \[1\], not \[32\]"):
        load_state(model, wrong)
    assert all(torch.equal(p, before[n]) for n, p in parameters_of(model).items())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "lama"}, "'lama'.*llama"),
        ({"model_type": "vit"}, "no causal language model"),
        ({}, "model_type"),
        (LLAMA | {"hiden_size": 3}, "hiden_size.*did you mean hidden_size"),
        ({"model_type": "qwen3_moe", "head_dims": 16}, "head_dims: qwen3_moe has no such field"),
        ({"model_type": "gpt_neox", "head_dim": 16}, "head_dim: gpt_neox has no such field"),
        (LLAMA | {"hidden_size": "wide"}, "hidden_size"),
        (LLAMA | {"num_attention_heads": 5}, "attention heads"),
        (LLAMA | {"num_hidden_layers": -1}, "layers is -1"),
        (LLAMA | {"num_hidden_layers": 10**9}, "layers is 1000000000"),
        (LLAMA | {"hidden_act": "nonesuch"}, "llama cannot be built.*nonesuch"),
        (LLAMA | {"auto_map": {}}, "auto_map.*own code"),
    ],
)
def test_a_bad_config_is_one_line_that_names_the_field(config, says):
    with pytest.raises(SpecError, match=says) as e:
        build_model(config, device="meta")
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


def test_a_model_with_state_outside_its_parameters_is_refused_by_name():
    class WithBuffer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.norm = torch.nn.BatchNorm1d(2)

    with pytest.raises(SpecError, match=r"norm\.running_mean"):
        model_layout(WithBuffer())
