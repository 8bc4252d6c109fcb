"""The committed wire stubs are what the schemas say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WIRE = ROOT / "protocol" / "wire"
GENERATED = {
    "swarm.proto": ["swarm_pb2.py", "swarm_pb2.pyi"],
    "ledger.proto": ["ledger_pb2.py", "ledger_pb2.pyi"],
    "coordinator.proto": ["coordinator_pb2.py", "coordinator_pb2.pyi", "coordinator_pb2_grpc.py"],
}


def test_every_schema_and_stub_is_listed_here():
    assert {p.name for p in WIRE.glob("*.proto")} == GENERATED.keys()
    assert {p.name for p in WIRE.glob("*_pb2*")} == {name for names in GENERATED.values() for name in names}


@pytest.mark.parametrize("schema", GENERATED)
def test_committed_stubs_are_what_the_schema_gives(schema: str, tmp_path: Path):
    names = GENERATED[schema]
    out = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    if any(name.endswith("_pb2_grpc.py") for name in names):
        out.append(f"--grpc_python_out={tmp_path}")
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *out, f"protocol/wire/{schema}"],
        cwd=ROOT, check=True, timeout=120,
    )  # fmt: skip
    made = {p.name: p.read_text() for p in (tmp_path / "protocol" / "wire").iterdir()}
    assert made.keys() == set(names)
    for name in names:
        assert (WIRE / name).read_text() == made[name], f"{name} is out of date: run `make stubs`"
