"""How the command starts: which packages it and its processes load, and the version that it tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cairn
from cairn.demo.report import Judged, LossPoint, plot
from cairn.main import refuse_packages_here
from protocol.errors import CairnError
from protocol.version import PROTOCOL
from tests.support import command_line


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Return a folder with another project's `protocol`."""
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol" / "__init__.py").write_text("raise ImportError('another project')")
    return tmp_path


def test_processes_load_the_packages_of_this_cairn_and_not_those_of_the_current_folder(foreign: Path):
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no PYTHONSAFEPATH; the command refuses to start there instead")
    root = os.pathsep.join([str(foreign), str(cairn.ROOT)])
    child = "import subprocess, sys, cairn; subprocess.run([sys.executable, '-m', 'protocol.invite'], check=True)"
    plain = subprocess.run([sys.executable, "-m", "protocol.invite"], cwd=foreign, env=_environment(root))
    assert plain.returncode != 0
    subprocess.run([sys.executable, "-c", child], cwd=foreign, env=_environment(root), check=True, timeout=120)


def _environment(path: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {"PYTHONPATH": path}


def test_a_package_here_that_would_be_loaded_is_named(foreign: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(cairn.ROOT)
    refuse_packages_here()
    monkeypatch.chdir(foreign)
    with pytest.raises(CairnError, match=r"protocol/__init__\.py has the name of a part of Cairn.*another folder"):
        refuse_packages_here()
    (foreign / "protocol" / "__init__.py").unlink()
    refuse_packages_here()  # a folder without modules is loaded only if nothing else has its name


def test_the_version_of_a_checkout_has_its_commit():
    if not (cairn.ROOT / ".git").exists():
        pytest.skip("these sources are no git checkout")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=cairn.ROOT, capture_output=True, text=True, check=True)
    done = command_line.cairn("--version")
    assert done.stdout.startswith(f"cairn {cairn.__version__} (protocol {PROTOCOL}, commit {head.stdout[:10]}")


def test_without_git_the_version_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git does not tell its commit" in command_line.cairn("--version").stdout


def test_the_demo_without_matplotlib_says_why_there_is_no_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    curve, judged = [LossPoint(0, 1000, 5.0)], Judged(6.0, 4.0, "", "")
    assert plot(curve, judged, tmp_path / "with.png", [(500, "ada joins")]) == ""
    assert (tmp_path / "with.png").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = plot(curve, judged, tmp_path / "without.png", [])
    assert said.startswith(f"none, since matplotlib is not installed: {sys.executable} -m pip install 'matplotlib")
    assert not (tmp_path / "without.png").exists()
