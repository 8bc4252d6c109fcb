"""`make demo-finetune` as a person runs it: a base model, four real peers, a kill, an adapter that peft loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_four_peers_make_an_assistant_of_a_base_model_and_survive_a_kill(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.finetune.demo", "--folder", str(tmp_path / "demo")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-8000:]
    assert "edsger is killed" in ended.stdout and "FAILED" not in ended.stdout
    assert (tmp_path / "demo" / "adapter" / "adapter_model.safetensors").stat().st_size > 10_000
