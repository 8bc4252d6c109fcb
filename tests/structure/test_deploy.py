"""`docker/` and `deploy/` start what exists: command lines of cairn, files, services, units.

No container engine is needed, so this says nothing about images that others make.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from cairn.day_traffic import FILE as TRAFFIC
from peer.channel import SAVE_SECONDS
from peer.node.last_member import MAX_STAY_SECONDS
from peer.node.node import HARD_STOP_SECONDS
from peer.node.snapshot import FILE as STATUS
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


@pytest.mark.parametrize("name", [STATUS, TRAFFIC])
def test_a_peers_container_is_healthy_while_it_writes_its_status_or_waits_for_the_next_day(tmp_path: Path, name: str):
    image = parse((DOCKER / "peer.Dockerfile").read_text())[-1].words("HEALTHCHECK")
    assert services(DOCKER / "compose.yaml")["ada"]["healthcheck"]["test"] == image[-1]
    check = [word.replace("/data", str(tmp_path)) for word in image]
    written = tmp_path / "runs" / "abab" / name
    written.parent.mkdir(parents=True)
    (written.parent / "peer.log").touch()
    assert subprocess.run(check).returncode == 1
    written.touch()
    assert subprocess.run(check).returncode == 0
    os.utime(written, (time.time() - 180,) * 2)
    assert subprocess.run(check).returncode == 1


def test_the_page_runs_the_peers_image_as_the_readme_does():
    page = (ROOT / "coordinator/page/static/js/join.js").read_text()
    (options, command) = re.findall(r'"(docker run .+) cairn-peer (.+)"', page)[0]
    assert f"{options} \\\n" in (DOCKER / "README.md").read_text()
    name, chosen = parsed(shlex.split(command))
    assert (name, chosen["device"]) == ("peer join", "cuda")


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


def test_a_users_unit_has_the_part_of_the_sandbox_that_needs_no_rights():
    """With `NoNewPrivileges` the helper for CUDA's module works only outside, by a +."""
    names = r"NoNewPrivileges|Restrict[A-Z]\w+|LockPersonality|SystemCall\w+|ExecStartPre"
    system, user = (set(re.findall(f"^(?:{names})=.+$", unit.read_text(), re.M)) for unit in UNITS[:2])
    assert system == user and len(user) == 8


def test_the_unit_for_a_notice_is_valid_goes_with_the_peer_and_does_nothing_without_a_hook(tmp_path: Path):
    unit = DEPLOY / "cairn-preemption.service"
    text = unit.read_text()
    hook = re.findall(r"^ConditionFileIsExecutable=(.+)$", text, re.M)
    assert hook == re.findall(r"^ExecStart=.*'until (\S+);", text, re.M)
    assert "\nPartOf=cairn-peer.service\n" in text and "\nWantedBy=cairn-peer.service\n" in text
    verify(unit, text, tmp_path)


class BareMachine:
    """A folder for the roots of start.sh, with a clone in it, and programs that write down their arguments."""

    PACKAGES = "gcc libc6-dev python3-dev python3-venv"
    PROGRAMS = {
        "id": "echo ${USER_ID:-0}",
        "dpkg": 'for name in "$@"; do [ "$name" = -s ] || [ -e {root}/$name ] || exit 1; done',
        "apt-get": 'for name in "$@"; do touch {root}/$name; done',
        "python3": "mkdir -p $3/bin; cp {root}/bin/pip {root}/bin/cairn $3/bin",
        "pip": "",
        "chown": "",
        "cairn": "cat > {root}/asked; echo $CAIRN_HOME >> {root}/asked",
        "systemctl": "",
        "sleep": "",
    }

    def __init__(self, root: Path):
        self.root, self.clone = root, root / "clone"
        shutil.copytree(DEPLOY, self.clone / "deploy")
        self.script = self.clone / "deploy" / "start.sh"
        self.script.write_text(re.sub(r"(?<![\w.])/(?=(?:etc|opt|var)/)", f"{root}/", self.script.read_text()))
        (root / "bin").mkdir()
        (root / "etc/systemd/system").mkdir(parents=True)
        for name, work in self.PROGRAMS.items():
            lines = ["#!/bin/sh", f'echo "{name} $*" >> {root}/log', f'[ "$FAILS" != {name} ] || exit 1']
            (root / "bin" / name).write_text("\n".join([*lines, work.replace("{root}", str(root))]) + "\n")
            (root / "bin" / name).chmod(0o755)

    def start(self, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        (self.root / "log").write_text("")
        return subprocess.run(
            ["sh", str(self.script), *arguments], input=stdin, capture_output=True, text=True, timeout=60,
            env={"PATH": f"{self.root}/bin:/usr/bin:/bin", "FAILS": "", **environment},
        )  # fmt: skip

    def steps(self) -> list[str]:
        """Return what the last start called, without looking at the user."""
        lines = (self.root / "log").read_text().replace(f"{self.root}/", "/").splitlines()
        return [line for line in lines if line != "id -u"]


@pytest.fixture
def machine(tmp_path: Path) -> BareMachine:
    return BareMachine(tmp_path)


def test_one_line_installs_checks_and_joins_and_another_does_so_again(machine: BareMachine):
    root, needed = machine.root, machine.PACKAGES
    done = machine.start("cairn1:first")
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.steps() == [
        f"dpkg -s {needed}",
        "apt-get update",
        f"apt-get -o DPkg::Lock::Timeout=600 install -y --no-install-recommends {needed}",
        "python3 -m venv /opt/cairn",
        "pip install --no-cache-dir /clone",
        "cairn peer doctor -",
        "systemctl daemon-reload",
        "systemctl enable --now cairn-peer",
    ]
    invite, unit = root / "etc/cairn/invite", root / "etc/systemd/system/cairn-peer.service"
    assert (root / "asked").read_text() == f"cairn1:first\n{root}/var/lib/cairn\n", "the service's home, not root's"
    assert invite.read_text() == "cairn1:first\n" and invite.stat().st_mode & 0o777 == 0o600
    assert unit.read_bytes() == UNITS[0].read_bytes()

    (root / "curl").touch()
    invite.chmod(0o644)
    done = machine.start("-", "gcp", stdin="cairn1:second\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.steps() == [
        f"dpkg -s {needed} curl",
        "systemctl stop cairn-peer",
        "pip install --no-cache-dir /clone",
        "cairn peer doctor -",
        "systemctl daemon-reload",
        "systemctl enable cairn-preemption",
        "systemctl enable --now cairn-peer",
    ]
    assert invite.read_text() == "cairn1:second\n" and invite.stat().st_mode & 0o777 == 0o600
    hook = root / "etc/cairn/preempted"
    assert hook.read_bytes() == (DEPLOY / "preempted/gcp.sh").read_bytes() and hook.stat().st_mode & 0o777 == 0o755
    assert (unit.parent / "cairn-preemption.service").exists()


def test_the_places_of_the_start_script_are_those_of_the_unit():
    script, unit = (DEPLOY / "start.sh").read_text(), UNITS[0].read_text()
    assert f"{started(UNITS[0])[0]} peer doctor" in script
    assert "StandardInput=file:/etc/cairn/invite\n" in unit and "/etc/cairn/invite\n" in script
    assert "Environment=CAIRN_HOME=%S/cairn " in unit and "CAIRN_HOME=/var/lib/cairn " in script


@pytest.mark.parametrize("fails", ["apt-get", "python3", "pip", "cairn"])
def test_nothing_joins_after_a_step_that_failed(machine: BareMachine, fails: str):
    done = machine.start("cairn1:first", FAILS=fails)
    assert done.returncode == 1 and not [step for step in machine.steps() if step.startswith("systemctl")]
    assert not (machine.root / "etc/cairn/invite").exists()
    assert ("not joined" in done.stderr) is (fails == "cairn"), "the doctor's line has the remedy"


@pytest.mark.parametrize("fails", ["", "pip"])
def test_what_pip_built_in_the_clone_is_not_left_to_root(machine: BareMachine, fails: str):
    for left in ("build", "cairn.egg-info"):
        (machine.clone / left).mkdir()
    done = machine.start("cairn1:first", FAILS=fails)
    assert ("pip's error above: do what it says" in done.stderr) is bool(fails)
    after = machine.steps()[machine.steps().index("pip install --no-cache-dir /clone") + 1 :]
    assert after[:2] == [f"chown -R --reference=/clone /clone/{left}" for left in ("build", "cairn.egg-info")]


@pytest.mark.parametrize("fails", ["pip", "cairn"])
def test_a_peer_goes_on_after_a_later_start_that_failed(machine: BareMachine, fails: str):
    assert machine.start("cairn1:first").returncode == 0
    assert machine.start("cairn1:second", FAILS=fails).returncode == 1
    called = [step for step in machine.steps() if step.startswith("systemctl")]
    assert called == ["systemctl stop cairn-peer", "systemctl start cairn-peer"]
    assert (machine.root / "etc/cairn/invite").read_text() == "cairn1:first\n"


def test_a_start_with_wrong_arguments_or_without_root_does_nothing(machine: BareMachine):
    for wrong in ((), ("cairn1:first", "azure"), ("cairn1:first", "aws", "gcp"), ("cairn1:first", "")):
        done = machine.start(*wrong)
        assert done.returncode == 2 and "INVITE [aws|gcp|file]" in done.stderr and not machine.steps()
    done = machine.start("cairn1:first", USER_ID="1000")
    assert done.returncode == 1 and "sudo" in done.stderr and not machine.steps()


def test_user_data_for_cloud_init_gives_the_invite_to_the_start_script():
    text = (DEPLOY / "cloud-init.yaml").read_text()
    assert text.startswith("#cloud-config\n")
    data = yaml.safe_load(text)
    assert data.keys() == {"package_update", "packages", "write_files", "runcmd"}
    (script,) = data["runcmd"]
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    stops, clone, start = map(shlex.split, script.splitlines())
    assert stops == ["set", "-e"] and clone[:2] == ["git", "clone"]
    (invite,) = data["write_files"]
    assert invite["permissions"] == "0600"
    assert start == ["sh", f"{clone[-1]}/deploy/start.sh", "-", "<", invite["path"]]
    if shutil.which("cloud-init"):
        command = ["cloud-init", "schema", "--config-file", str(DEPLOY / "cloud-init.yaml")]
        subprocess.run(command, check=True, timeout=60)
