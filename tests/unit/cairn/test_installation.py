"""How Cairn was installed decides what `cairn peer upgrade` runs, or which command it says to run instead."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest

from cairn import ROOT
from cairn.commands import upgrade
from cairn.installation import Facts, plan, processes_of
from protocol.errors import CairnError
from protocol.python_command import python_command

PIP = Facts("/env/bin/python")
FOLDER = {"url": "file:///home/ada/my%20cairn", "dir_info": {}}
EDITABLE = FOLDER | {"dir_info": {"editable": True}}
GIT = {"url": "https://git.example/cairn.git", "vcs_info": {"vcs": "git", "commit_id": "c" * 40}}
UV = replace(PIP, uv="/bin/uv")
UNKNOWN = r"source is not known: install it again from your clone \(`git pull`, then `pipx install --force \.`\)"


def commands(facts: Facts) -> list[str]:
    return [" ".join(command) for command in plan(facts).commands]


@pytest.mark.parametrize("facts", [PIP, replace(UV, installer="uv"), replace(UV, is_tool_of_uv=True)])
def test_nothing_is_installed_by_its_name_which_nobody_owns_on_an_index(facts: Facts):
    with pytest.raises(CairnError, match=UNKNOWN):
        plan(facts)


@pytest.mark.parametrize(
    ("facts_of_it", "says"),
    [
        ({".git": "gitdir: elsewhere"}, "from its sources in {}: run `git -C {} pull`"),
        (
            {"cairn_swarm.egg-info/direct_url.json": json.dumps(EDITABLE)},
            "from its sources in {}: run `git -C {} pull`",
        ),
        ({}, UNKNOWN),
    ],
)
def test_sources_with_an_egg_info_beside_them_are_no_package(tmp_path: Path, facts_of_it: dict[str, str], says: str):
    """pip and setuptools leave one in a checkout, and Python takes it for an installed package."""
    for name in ("cairn", "protocol"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = {"cairn_swarm.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: cairn-swarm\nVersion: 0.1.0\n"}
    for name, text in (files | facts_of_it).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code = "from cairn.installation import find_facts, plan; print(plan(find_facts()))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert re.search(says.replace("{}", re.escape(str(tmp_path))), done.stderr), done


@pytest.mark.parametrize(
    ("direct_url", "source"),
    [
        (FOLDER, "/home/ada/my cairn"),
        (GIT, "git+https://git.example/cairn.git"),
        (
            GIT | {"vcs_info": GIT["vcs_info"] | {"requested_revision": "main"}, "subdirectory": "src"},
            "git+https://git.example/cairn.git@main#subdirectory=src",
        ),
    ],
)
def test_from_a_folder_or_repository_it_is_installed_again_and_nothing_else(direct_url: Any, source: str):
    """Twice: for new dependencies, and since pip leaves a package whose version is the same as it is."""
    pip = "/env/bin/python -m pip install"
    assert commands(replace(UV, direct_url=direct_url)) == [
        f"{pip} --upgrade {source}", f"{pip} --force-reinstall --no-deps {source}"
    ]  # fmt: skip
    assert commands(replace(UV, direct_url=direct_url, has_pip=False)) == [
        "/bin/uv pip install --python /env/bin/python --upgrade-package cairn-swarm --reinstall-package cairn-swarm "
        + source
    ]


@pytest.mark.parametrize("direct_url", [FOLDER, GIT])
def test_a_tool_of_uv_remembers_where_it_is_from(direct_url: Any):
    assert commands(replace(UV, is_tool_of_uv=True, direct_url=direct_url)) == [
        "/bin/uv tool upgrade --reinstall-package cairn-swarm cairn-swarm"
    ]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (replace(PIP, checkout=Path("/src/cairn")), "from its sources in /src/cairn: run `git -C /src/cairn pull`"),
        (replace(PIP, checkout=Path("/a b")), "run `git -C '/a b' pull`"),
        (replace(PIP, image="cairn-peer", checkout=Path("/src")), "the image cairn-peer.*a newer image.*same volume"),
        (replace(PIP, direct_url=FOLDER, has_source=False), "installed from /home/ada/my cairn, which is gone"),
        (replace(PIP, direct_url={"url": "file:///x.whl", "archive_info": {}}), "the file file:///x.whl.*a newer file"),
        (replace(PIP, direct_url={}), "does not change"),
        (
            replace(PIP, is_tool_of_uv=True, direct_url=GIT),
            "uv, which .*`uv tool upgrade --reinstall-package cairn-swarm cairn-swarm`",
        ),
        (replace(PIP, installer="uv", direct_url=GIT), "run `uv pip install --python /env/bin/python"),
    ],
)
def test_where_it_cannot_upgrade_it_says_what_to_run(facts: Facts, says: str):
    with pytest.raises(CairnError, match=says):
        plan(facts)


def test_what_runs_from_an_environment_is_found_by_its_python():
    python, other = "/env/bin/python3", "/environment/bin/python3"
    processes = {
        1: [python, "/home/ada/.local/bin/cairn", "peer", "join", "cairn1:secret"],
        2: [python, "-u", "-m", "cairn", "coordinator", "serve", "run.toml"],
        3: [python, "-m", "peer.training", "--fd", "22"],
        4: [other, "/environment/bin/cairn", "peer", "join"],
        5: [python, "-m", "http.server"],
        6: [python, "notes-on-cairn.py"],
        7: [python, "-m"],
        8: [python],
        9: [],
        10: ["/bin/grep", "cairn"],
        11: [python, *python_command("peer.auditor")[1:], "--parent", "1"],
    }
    assert processes_of(Path("/env"), processes.items()) == {1: "cairn peer join", 2: "cairn coordinator serve"}
    assert processes_of(Path("/env"), [(3, processes[3])]) == {3: "peer.training"}
    assert processes_of(Path("/env"), [(11, processes[11])]) == {11: "peer.auditor"}


def test_a_version_that_is_not_told_in_time_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str], timeout: float, **_: Any):
        raise TimeoutExpired(command, timeout)

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(CairnError, match="did not tell its version within 120 s"):
        upgrade.installed_version()
