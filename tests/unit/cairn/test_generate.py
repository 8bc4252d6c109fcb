"""`cairn generate` where the GPU is too small."""

from __future__ import annotations

import torch
from click.testing import CliRunner

from cairn.commands import generate
from cairn.main import main


def test_a_gpu_without_the_memory_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    def too_large(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(generate, "generate_text", too_large)
    done = CliRunner().invoke(main, ["generate", str(tmp_path), "--prompt", "hello"])
    assert done.exit_code == 1 and "leave out --device to use the CPU" in done.output and "CUDA out" not in done.output
