"""`cairn generate`: what it prints, also where the GPU is too small."""

from __future__ import annotations

import torch
from click.testing import CliRunner

from cairn.commands import generate
from cairn.main import main
from coordinator.checkpoints.evaluation import continue_prompt
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


def test_a_gpu_without_the_memory_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    def too_large(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(generate, "generate_text", too_large)
    done = CliRunner().invoke(main, ["generate", str(tmp_path), "--prompt", "hello"])
    assert done.exit_code == 1 and "leave out --device to use the CPU" in done.output and "CUDA out" not in done.output
