"""The wheel holds the whole project and nothing else; the command line starts without its heavy parts."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from coordinator.authoring.toml_file import tomllib
from protocol import extras
from tests.support.wheel import build_wheel

ROOT = Path(__file__).resolve().parents[2]
INSIDE = ("peer", "coordinator", "protocol", "examples")
"""Folders of the repository that a wheel has in `cairn/packages`."""

HEAVY = {"torch", "transformers", "hivemind", "numpy", "grpc", "starlette", "uvicorn", "matplotlib", "pydantic"}

INSTALLED_BY_NAME = re.compile(r"pip install '?cairn")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of the files in a wheel."""
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as archive:
        return set(archive.namelist())


def _files(folder: str) -> set[str]:
    return {
        str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }


def test_the_wheel_has_every_module_schema_page_table_and_example_and_nothing_else(wheel: set[str]):
    inside = {name for folder in INSIDE for name in _files(folder)}
    assert {"protocol/wire/swarm.proto", "coordinator/page/static/index.html", "examples/sotu.toml"} <= inside
    want = _files("cairn") | {f"cairn/packages/{name}" for name in inside}
    own = {name for name in wheel if ".dist-info/" in name}
    assert sorted(want - wheel) == [], "name its suffix in pyproject.toml, [tool.setuptools.package-data]"
    assert sorted(wheel - want - own) == []


def test_no_name_but_our_own_is_taken_in_an_environment(wheel: set[str]):
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"cairn"}


def test_the_wheel_installs_the_command(wheel: set[str]):
    assert any(name.endswith(".dist-info/entry_points.txt") for name in wheel)
    assert {"cairn/main.py", "cairn/__main__.py"} <= wheel


def test_on_windows_the_install_says_where_cairn_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "argv", ["setup.py", "--version"])
    with pytest.raises(SystemExit, match="does not run on Windows.*WSL2"):
        runpy.run_path(str(ROOT / "setup.py"))


def _not_permitted(path: Path) -> None:
    raise PermissionError(path)


@pytest.mark.parametrize("left", ["build", "build/lib", "cairn_swarm.egg-info", "build/lib/cairn"])
def test_what_another_user_built_is_named_with_the_command_that_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
):
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / left).mkdir(parents=True)
    named = tmp_path / left
    if left == "build/lib/cairn":
        named = tmp_path / "build"
        monkeypatch.setattr(shutil, "rmtree", _not_permitted)
    else:
        monkeypatch.setattr(os, "access", lambda path, _: path != named)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--version"])
    with pytest.raises(SystemExit, match=f"^{named} has to be replaced.*sudo rm -rf {named}$"):
        runpy.run_path(str(tmp_path / "setup.py"))
    assert (tmp_path / left).exists()


def test_remedies_name_packages_and_not_a_distribution_that_is_on_no_index():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == extras.DISTRIBUTION
    assert extras.REQUIREMENTS == {name: project["optional-dependencies"][name][-1] for name in extras.REQUIREMENTS}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docker").glob("*.md")]
    sources = [
        path for folder in ("cairn", "coordinator", "peer", "protocol") for path in (ROOT / folder).rglob("*.py")
    ]
    assert not [path for path in [*pages, *sources] if INSTALLED_BY_NAME.search(path.read_text())]


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
    assert not (HEAVY | {"importlib.metadata"}) & set(done.stdout.split())


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_the_first_answers_come_without_heavy_parts(argument: str):
    done = _cairn(argument)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "cairn" in done.stdout.lower()
    assert not HEAVY & _imported(done.stderr)


@pytest.mark.parametrize("command", ["peer join", "coordinator serve"])
def test_the_help_of_a_command_loads_few_modules(command: str):
    """Hold what takes the time, and not the time, which depends on the load: 343 modules take 0.16 to 0.24 s."""
    code = f"""
import sys
from click.testing import CliRunner
from cairn.main import main
print(CliRunner().invoke(main, "{command} --help".split()).exit_code, len(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    exit_code, modules = map(int, done.stdout.split())
    assert exit_code == 0 and modules < 400


def test_the_help_of_every_command_comes_without_heavy_parts():
    code = f"""
import sys
from click.testing import CliRunner
from cairn.commands.group import commands
from cairn.main import main
for path, _ in commands(main):
    done = CliRunner().invoke(main, [*path, "--help"], prog_name="cairn")
    heavy = {HEAVY!r} & {{name.partition(".")[0] for name in sys.modules}}
    print(*path, done.exit_code, *heavy, sep=",")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert len(done.stdout.splitlines()) > 30 and "peer,join,0" in done.stdout
    assert [line for line in done.stdout.splitlines() if not line.endswith(",0")] == []
