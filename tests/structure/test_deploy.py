"""`docker/` and `deploy/` start what exists: command lines of cairn, files, services, units.

No container engine is needed, so this says nothing about images that others make.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from peer.channel import SAVE_SECONDS
from peer.node.last_member import MAX_STAY_SECONDS
from peer.node.node import HARD_STOP_SECONDS
from tests.support.command_line import invite_on_stdin, parsed  # noqa: F401
from tests.support.dockerfile import context_names, parse

ROOT = Path(__file__).resolve().parents[2]
DOCKER, DEPLOY = ROOT / "docker", ROOT / "deploy"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
UNITS = [DEPLOY / "cairn-peer.service", DEPLOY / "user" / "cairn-peer.service", DEPLOY / "cairn-coordinator.service"]
COMPOSE = [DOCKER / "compose.yaml", DOCKER / "compose.monitored.yaml"]

STOP_SECONDS = 60
"""Given to a peer until it is killed."""

OURS = ("cairn-coordinator", "cairn-peer")
"""Images whose entrypoint is cairn."""


def words_for_cairn(command: str | list[str]) -> list[str]:
    """Return the arguments that cairn receives by a `command` of a service: as they are, or by a line for sh."""
    words = shlex.split(command) if isinstance(command, str) else command
    if len(words) == 1:
        words = shlex.split(words[0])
        assert words[:2] == ["exec", "cairn"], "without exec the shell receives SIGTERM, not cairn"
        words = words[2 : words.index("<")]
    return words


def services(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())["services"]


def test_a_command_line_that_cairn_does_not_have_is_found():
    for wrong in (["peer", "joyn", "-"], ["peer", "join", "-", "--devise", "cpu"], ["peer", "join"]):
        with pytest.raises((KeyError, click.UsageError)):
            parsed(wrong)


def test_a_peer_that_leaves_as_slowly_as_it_may_is_not_killed():
    assert HARD_STOP_SECONDS + SAVE_SECONDS + MAX_STAY_SECONDS + 10 <= STOP_SECONDS


def test_each_service_of_ours_runs_a_command_of_cairn():
    found = {}
    for name, service in services(DOCKER / "compose.yaml").items():
        assert service["image"] in OURS
        assert service["stop_grace_period"] == ("30s" if name == "coordinator" else f"{STOP_SECONDS}s")
        found[name] = parsed(words_for_cairn(service["command"]))
    command, _ = found.pop("coordinator")
    assert command == "coordinator serve" and len(found) >= 3
    assert {name: (command, options["name"]) for name, (command, options) in found.items()} == {
        name: ("peer join", name) for name in found
    }


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_what_a_compose_file_names_is_there(file: Path):
    whole = yaml.safe_load(file.read_text())
    known = {name for each in COMPOSE for name in services(each)}
    for service in whole["services"].values():
        for mount in service.get("volumes", ()):
            source, target = mount.split(":")[:2]
            there = (DOCKER / source).exists() if source.startswith(".") else source in whole["volumes"]
            assert there and target.startswith("/"), mount
        if build := service.get("build"):
            assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
        assert not set(service.get("depends_on", ())) - known


def test_grafana_is_given_the_dashboard_and_prometheus_the_rules():
    found = services(DOCKER / "compose.monitored.yaml")
    targets = {Path(mount.split(":")[1]) for mount in found["grafana"]["volumes"] + found["prometheus"]["volumes"]}
    (provider,) = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/cairn.yml").read_text())["providers"]
    assert Path(provider["options"]["path"]) / "cairn.json" in targets
    (source,) = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in found
    prometheus = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    assert [Path("/etc/prometheus") / rules for rules in prometheus["rule_files"]] == [
        Path("/etc/prometheus/alerts.yml")
    ]
    assert Path("/etc/prometheus/alerts.yml") in targets
    (scraped,) = prometheus["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": ["coordinator:7411"]}]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_runs_cairn_as_a_user_without_rights_and_its_steps_are_shell(file: Path):
    stages = parse(file.read_text())
    image = stages[-1]
    assert image.words("ENTRYPOINT") == ["tini", "--", "cairn"]
    command, _ = parsed(image.words("CMD"))
    assert command == ("peer join" if file.name == "peer.Dockerfile" else "coordinator serve")
    assert image.last("USER") == "10001" and image.last("VOLUME") == "/data" and image.words("HEALTHCHECK")
    for word, line in (step for stage in stages for step in stage.steps):
        if word == "RUN":
            subprocess.run(["bash", "-n"], input=line, text=True, check=True)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing_in_an_image(file: Path):
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if not hadolint:
        pytest.skip("hadolint is not here")
    # Debian removes a version when it has the next.
    done = subprocess.run([hadolint, "--ignore", "DL3008", str(file)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    "wrong",
    [
        "FROM a\nADD . /src",
        "FROM a\nUSER cairn",
        "FROM a\nUSER 0",
        "FROM a\nCOPY --chown=1 . /src",
        "FROM a\nRUN --network=none true",
        "FROM a\nRUN cat <<X",
        "FROM a\nCMD cairn",
        "FROM a\nHEALTHCHECK CMD true",
        "FROM --platform=x a",
        "RUN true",
    ],
)
def test_a_dockerfile_with_what_is_not_understood_is_refused(wrong: str):
    with pytest.raises(ValueError, match="not an instruction"):
        parse(wrong)


def test_the_engine_is_sent_the_sources():
    kept = context_names((ROOT / ".dockerignore").read_text())
    assert {"setup.py", "pyproject.toml", "cairn", "examples"} <= kept
    assert not [name for name in kept if not (ROOT / name).exists()]
    for wrong in ("*\n!cairn\n", "!cairn\n**/__pycache__\n", "*\n!cairn\nbuild\n**/__pycache__\n"):
        with pytest.raises(ValueError, match="not a .dockerignore"):
            context_names(wrong)


def started(unit: Path) -> list[str]:
    """Return the command of a unit, without the options that the user adds in a file."""
    (line,) = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.M)
    return [word for word in shlex.split(line) if word != "$OPTIONS"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.relative_to(ROOT)))
def test_a_unit_is_valid_and_starts_what_it_is_named_after(unit: Path, tmp_path: Path):
    program, *arguments = started(unit)
    assert program.endswith("/bin/cairn")
    command, seconds = {"cairn-peer": ("peer join", STOP_SECONDS), "cairn-coordinator": ("coordinator serve", 30)}[
        unit.stem
    ]
    assert parsed(arguments)[0] == command
    assert f"\nTimeoutStopSec={seconds}\n" in unit.read_text()
    # It wants the program to exist.
    verify(unit, unit.read_text().replace(program, "/bin/true"), tmp_path)


def verify(unit: Path, text: str, tmp_path: Path) -> None:
    """Have systemd check the text of a unit, if it is here."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / unit.name
    copy.write_text(text)
    command = [
        "systemd-analyze",
        *(["--user"] if "user" in unit.parts else []),
        "verify",
        "--man=no",
        "--recursive-errors=no",
        str(copy),
    ]
    done = subprocess.run(command, env={"XDG_RUNTIME_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_for_a_notice_is_valid_goes_with_the_peer_and_does_nothing_without_a_hook(tmp_path: Path):
    unit = DEPLOY / "cairn-preemption.service"
    text = unit.read_text()
    hook = re.findall(r"^ConditionFileIsExecutable=(.+)$", text, re.M)
    assert hook == re.findall(r"^ExecStart=.*'until (\S+);", text, re.M)
    assert "\nPartOf=cairn-peer.service\n" in text and "\nWantedBy=cairn-peer.service\n" in text
    verify(unit, text, tmp_path)


def test_user_data_for_cloud_init_installs_what_its_unit_starts():
    text = (DEPLOY / "cloud-init.yaml").read_text()
    assert text.startswith("#cloud-config\n")
    data = yaml.safe_load(text)
    assert data.keys() == {"package_update", "packages", "write_files", "runcmd"}
    (script,) = data["runcmd"]
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    stops, clone, venv, install, copy, *_ = map(shlex.split, script.splitlines())
    assert stops == ["set", "-e"], "nothing is enabled that was not installed"
    assert started(UNITS[0])[0] == f"{venv[-1]}/bin/cairn" and install[0] == f"{venv[-1]}/bin/pip"
    assert clone[-1] == install[-1] and (ROOT / Path(copy[1]).relative_to(clone[-1])) == UNITS[0]
    (invite,) = data["write_files"]
    assert f"StandardInput=file:{invite['path']}" in UNITS[0].read_text() and invite["permissions"] == "0600"
    if shutil.which("cloud-init"):
        command = ["cloud-init", "schema", "--config-file", str(DEPLOY / "cloud-init.yaml")]
        subprocess.run(command, check=True, timeout=60)
