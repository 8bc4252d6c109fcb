"""How the command starts: which packages it and its processes load, and the version that it tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cairn
from cairn.demo.report import Judged, LossPoint, plot
from protocol.python_command import python_command
from protocol.version import PROTOCOL
from tests.support import command_line


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Return a folder with another project's `protocol`, and a module of the standard library's name."""
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol" / "__init__.py").write_text("raise ImportError('another project')")
    (tmp_path / "colorsys.py").write_text("raise ImportError('a stranger')")
    return tmp_path


def test_processes_load_no_code_from_the_current_folder(foreign: Path):
    """Without PYTHONSAFEPATH, as with Python 3.10. `tests` is found by the PYTHONPATH of the user."""
    environment = _environment(str(cairn.ROOT))
    plain = subprocess.run([sys.executable, "-m", "colorsys"], cwd=foreign, env=environment, check=False)
    assert plain.returncode != 0
    for module in ("colorsys", "protocol.invite", "tests.support.command_line"):
        subprocess.run(python_command(module), cwd=foreign, env=environment, check=True, timeout=120)


def test_a_process_is_started_as_python_does_it(tmp_path: Path):
    (tmp_path / "shown.py").write_text("import sys; print(__name__, sys.modules['__main__'].__spec__.name, sys.argv)")
    done = subprocess.run(
        python_command("shown", "a", "-b"), env=_environment(str(tmp_path)), capture_output=True, text=True, check=True
    )
    assert done.stdout.split(" ", 2) == ["__main__", "shown", f"{[str(tmp_path / 'shown.py'), 'a', '-b']}\n"]


def test_every_process_of_ours_is_started_so():
    others = {"cairn/commands/upgrade.py", "cairn/installation.py", "protocol/extras.py"}  # these run pip, or elsewhere
    for package in ("cairn", "coordinator", "peer", "protocol"):
        for path in (cairn.ROOT / package).rglob("*.py"):
            name = path.relative_to(cairn.ROOT).as_posix()
            assert name in others or 'sys.executable, "-m"' not in path.read_text(), name


def test_processes_load_the_packages_of_this_cairn_and_not_others_on_the_path(foreign: Path):
    (foreign / "colorsys.py").unlink()
    root = os.pathsep.join([str(foreign), str(cairn.ROOT)])
    child = f"import cairn, subprocess; subprocess.run({python_command('protocol.invite')}, check=True)"
    plain = subprocess.run(python_command("protocol.invite"), cwd=foreign, env=_environment(root), check=False)
    assert plain.returncode != 0
    subprocess.run([sys.executable, "-c", child], cwd=foreign, env=_environment(root), check=True, timeout=120)


def _environment(path: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {"PYTHONPATH": path}


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
