"""`cairn demo --liars 2` as a person runs it: real processes, minutes of training, audits and two convictions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_a_demo_with_two_liars_convicts_both_and_nobody_else(tmp_path: Path):
    command = [sys.executable, "-m", "cairn", "demo", "--liars", "2", "--plain", "--folder", str(tmp_path / "demo")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-8000:]
    for liar in ("mallory", "trudy"):
        (told,) = [line for line in ended.stdout.splitlines() if f"{liar} is convicted" in line]
        assert "of signs agree, 97% needed" in told
    assert "every liar was convicted and keeps nothing" in ended.stdout and "FAILED" not in ended.stdout
