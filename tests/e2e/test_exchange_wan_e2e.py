"""The benchmark of exchanges over a WAN, played for real: Cairn's rows need what a run's first state holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wan import why_not

WHY_NOT = why_not(nat=True)

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(WHY_NOT), reason=f"no emulated internet here: {WHY_NOT}")]


def test_rounds_over_an_emulated_wan_end_with_one_state(tmp_path: Path):
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.exchange_wan", "--quick", "--no-goals", "--json", str(file)]
    subprocess.run(command, check=True, timeout=600)
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["sparse", "sign"]
    assert all(r["right"] for row in rows for r in row["rounds"])
