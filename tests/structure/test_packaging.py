"""The wheel holds the whole project and nothing else; the command line starts without its heavy parts."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cairn", "peer", "coordinator", "protocol")
DATA = {".proto", ".pyi", ".sql", ".html", ".css", ".js", ".svg", ".txt", ".typed"}
HEAVY = {"torch", "transformers", "hivemind", "numpy", "grpc", "starlette", "uvicorn", "matplotlib", "pydantic"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of the files in a wheel, built from a copy of the files that git tracks or would add."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    # A copy: building leaves `build` and `*.egg-info` behind, whose files would be in the next wheel.
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), "."],
        cwd=source, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    (made,) = out.glob("cairn-*.whl")
    with zipfile.ZipFile(made) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_module(wheel: set[str]):
    want = {str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    assert len(want) > 20
    assert not want - wheel


def test_the_wheel_has_every_schema_page_and_table(wheel: set[str]):
    want = {
        str(p.relative_to(ROOT))
        for package in PACKAGES
        for p in (ROOT / package).rglob("*")
        if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".py"
    }
    assert {"protocol/wire/swarm.proto", "protocol/wire/coordinator.proto"} <= want
    assert not want - wheel, "name its suffix in pyproject.toml, [tool.setuptools.package-data]"


def test_the_wheel_has_nothing_else(wheel: set[str]):
    strange = {
        name
        for name in wheel
        if name.split("/")[0] not in PACKAGES and not name.startswith("cairn-")  # the wheel's own metadata
        or "__pycache__" in name
    }  # fmt: skip
    assert not strange


def test_the_wheel_installs_the_command(wheel: set[str]):
    assert any(name.endswith(".dist-info/entry_points.txt") for name in wheel)
    assert {"cairn/main.py", "cairn/__main__.py"} <= wheel


def _cairn(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "cairn", *arguments],
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def _imported(importtime: str) -> set[str]:
    return {
        line.split("|")[-1].strip().split(".")[0] for line in importtime.splitlines() if line.startswith("import time:")
    }


def test_the_command_line_answers_without_its_heavy_parts():
    code = "import cairn.main, sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "cairn.main" in done.stdout.split()
    assert not HEAVY & set(done.stdout.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["peer", "--help"],
        ["peer", "join", "--help"],
        ["coordinator", "serve", "--help"],
        ["status", "--help"],
    ],
    ids=" ".join,
)
def test_help_answers_without_heavy_parts(arguments: list[str]):
    done = _cairn(*arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "cairn" in done.stdout.lower()
    assert not HEAVY & _imported(done.stderr)
