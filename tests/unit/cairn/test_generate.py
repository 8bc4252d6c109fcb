"""`cairn generate`: what it prints, also where the GPU is too small."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cairn.commands import generate
from cairn.main import main
from coordinator.checkpoints.evaluation import continue_prompt
from coordinator.export import MODEL, TOKENIZER
from protocol.errors import CairnError
from protocol.model import build_model, plain_config


def test_what_a_terminal_would_obey_is_not_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "generate_text", lambda *_, **__: "a\x1b]52;c;ZXZpbA==\x07\n  b")
    done = CliRunner().invoke(main, ["generate", str(tmp_path), "--prompt", "hello"])
    assert done.exit_code == 0 and done.output == "a]52;c;ZXZpbA==\n  b\n"


def test_the_settings_that_came_with_a_model_change_no_text():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = build_model(plain_config({"model_type": "llama", "vocab_size": 64, "max_position_embeddings": 64} | sizes))
    texts = []
    for penalty in (1.0, 5.0):
        model.generation_config.repetition_penalty = penalty
        texts.append(continue_prompt(model.eval(), [5, 6, 7], tokens=12, temperature=0, seed=0))
    assert texts[0] == texts[1]


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GPT2 = {"model_type": "gpt2", "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
OPT = {"model_type": "opt", "max_position_embeddings": 16, "ffn_dim": 16, "word_embed_proj_dim": 16} | SIZES
GPTJ = GPT2 | {"model_type": "gptj", "rotary_dim": 4}
LLAMA = {"model_type": "llama", "max_position_embeddings": 16, "intermediate_size": 16} | SIZES


def _model(config):
    special = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    return build_model(plain_config(config | special)).eval()


@pytest.mark.parametrize("config", [GPT2, OPT, GPTJ])
def test_a_model_with_a_table_of_positions_writes_no_more_than_it_has(config):
    model, prompt = _model(config), [5, 6, 7, 8]
    assert len(continue_prompt(model, prompt, tokens=13, temperature=0, seed=0)) == 17
    with pytest.raises(CairnError, match="reads 16 tokens at most.*: give --tokens 13 or fewer$"):
        continue_prompt(model, prompt, tokens=14, temperature=0, seed=0)
    with pytest.raises(CairnError, match="shorten the prompt$"):
        continue_prompt(model, [5] * 17, tokens=1, temperature=0, seed=0)


def test_a_model_that_computes_positions_goes_on_beyond_its_training():
    assert len(continue_prompt(_model(LLAMA), [5, 6, 7, 8], tokens=20, temperature=0, seed=0)) == 24


def test_a_template_that_came_with_a_model_has_a_bound_before_the_model_is_loaded(tmp_path):
    Tokenizer(WordLevel({"hello": 0}, unk_token="hello")).save(str(tmp_path / TOKENIZER))
    (tmp_path / MODEL).touch()
    (tmp_path / "chat_template.jinja").write_text("{{ 'a' * 10 ** 12 }}")
    done = CliRunner().invoke(main, ["generate", str(tmp_path), "--prompt", "hello"])
    assert done.exit_code == 1 and "the model's chat template is not usable" in done.output


@pytest.mark.parametrize("seed", ["99999999999999999999", "-1"])
def test_a_seed_that_no_generator_takes_is_refused(tmp_path, seed: str):
    done = CliRunner().invoke(main, ["generate", str(tmp_path), "--prompt", "hello", "--seed", seed])
    assert done.exit_code == 2 and "'--seed'" in done.output


def test_a_gpu_without_the_memory_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    def too_large(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(generate, "generate_text", too_large)
    done = CliRunner().invoke(main, ["generate", str(tmp_path), "--prompt", "hello"])
    assert done.exit_code == 1 and "leave out --device to use the CPU" in done.output and "CUDA out" not in done.output


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_model_that_has_diverged_is_said_to_have(temperature: float):
    model = _model(LLAMA)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(CairnError, match="the model has diverged"):
        continue_prompt(model, [5, 6, 7], tokens=2, temperature=temperature, seed=0)


def test_a_prompt_that_is_no_text_is_refused(tmp_path):
    done = CliRunner().invoke(main, ["generate", str(tmp_path), "--prompt", "caf\udce9"])
    assert done.exit_code == 1 and "--prompt: not UTF-8 text" in done.output
