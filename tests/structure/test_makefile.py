"""`make` sets itself up, also after an attempt that failed or was stopped."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SYSTEM_PYTHON = """#!/bin/sh
# Debian's without python3-venv (no file `venv` beside it): `-m venv` leaves a python without pip.
for folder; do :; done
mkdir -p $folder/bin
[ -e $folder/bin/python ] || cp $(dirname $0)/without-pip $folder/bin/python
[ -e $(dirname $0)/venv ] && cp $(dirname $0)/with-pip $folder/bin/python
"""
WITH_PIP = """#!/bin/sh
case "$*" in *--editable*) [ ! -e ../refuses ] && touch ../installed ;; esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with our Makefile, and beside it a Python that writes what it does."""
    folder = tmp_path / "clone"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    programs = {"python3": SYSTEM_PYTHON, "without-pip": "#!/bin/sh\nexit 1\n", "with-pip": WITH_PIP}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("pyproject.toml", "setup.py"):
        (folder / name).touch()
    return folder


def _make(clone: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "install", f"PYTHON={clone.parent / 'python3'}"]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=60)


def test_an_environment_without_pip_gets_it_once_python_can_and_nothing_goes(clone: Path):
    assert _make(clone).returncode != 0 and (clone / ".venv/bin/python").exists()
    (clone.parent / "venv").touch()
    (clone / ".venv/left").touch()
    done = _make(clone)
    assert done.returncode == 0, done.stderr
    assert (clone.parent / "installed").exists() and (clone / ".venv/left").exists()


def test_an_environment_with_pip_is_kept(clone: Path):
    (clone.parent / "venv").touch()
    assert _make(clone).returncode == 0
    (clone / ".venv/kept").touch()
    (clone / ".venv/.installed").unlink()
    assert _make(clone).returncode == 0
    assert (clone / ".venv/kept").exists()


def test_an_installation_that_fails_says_what_to_do_and_is_tried_again(clone: Path):
    (clone.parent / "venv").touch()
    (clone.parent / "refuses").touch()
    done = _make(clone)
    assert done.returncode != 0
    assert "run make again. For another Python: make clean, then make PYTHON=python3.11\n" in done.stderr
    (clone.parent / "refuses").unlink()
    assert _make(clone).returncode == 0 and (clone.parent / "installed").exists()
