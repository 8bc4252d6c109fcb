"""`cairn peer upgrade` as a process in an environment of its own, whose pip is a stand-in that notes its arguments."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

import cairn
from protocol.version import PROTOCOL, RELEASE
from tests.support.waiting import LIMIT, wait_until

FAKE_PIP = """
import pathlib, sys
site = pathlib.Path(__file__).resolve().parents[1]
with open(site / "asked", "a") as file:
    print(*sys.argv[1:], file=file)
if (site / "fails").exists():
    sys.exit("ERROR: no matching distribution")
version = site / "cairn/packages/protocol/version.py"
if (site / "newer").exists():
    text = version.read_text().replace('RELEASE = "{old}"', 'RELEASE = "9.9.9"')
    version.write_text(text.replace("PROTOCOL = {number}\\n", "PROTOCOL = 9\\n"))
""".replace("{old}", RELEASE).replace("{number}", str(PROTOCOL))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment that has Cairn as a wheel lays it out, from a folder, and the stand-in for pip."""
    folder = tmp_path_factory.mktemp("upgrade") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=LIMIT)
    site, unwanted = packages(folder), shutil.ignore_patterns("__pycache__")
    shutil.copytree(cairn.ROOT / "cairn", site / "cairn", ignore=unwanted)
    for name in ("peer", "coordinator", "protocol"):
        shutil.copytree(cairn.ROOT / name, site / "cairn" / "packages" / name, ignore=unwanted)
    described = site / f"cairn_swarm-{RELEASE}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cairn-swarm\nVersion: {RELEASE}\n")
    (described / "INSTALLER").write_text("pip\n")
    (described / "direct_url.json").write_text(json.dumps({"url": folder.as_uri(), "dir_info": {}}))
    (site / "pip").mkdir()
    (site / "pip" / "__init__.py").touch()
    (site / "pip" / "__main__.py").write_text(FAKE_PIP)
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return folder


def packages(folder: Path) -> Path:
    (found,) = (folder / "lib").glob("python*/site-packages")
    return found


@pytest.fixture(autouse=True)
def as_it_was(environment: Path) -> Iterator[None]:
    version = packages(environment) / "cairn" / "packages" / "protocol" / "version.py"
    text = version.read_text()
    yield
    version.write_text(text)
    shutil.rmtree(version.parent / "__pycache__", ignore_errors=True)  # of the same second and size, so not seen as old
    for name in ("asked", "fails", "newer"):
        (packages(environment) / name).unlink(missing_ok=True)


def upgrade(environment: Path, cwd: Path) -> tuple[int, str]:
    """Return the exit code and the output of the command, run in a folder that has another Cairn's sources."""
    (cwd / "cairn").mkdir()
    (cwd / "cairn" / "__init__.py").write_text("raise ImportError('another checkout')")
    script = environment / "bin" / "cairn"
    script.write_text(f"#!{environment}/bin/python\nfrom cairn.main import main\nmain()\n")
    script.chmod(0o755)
    done = subprocess.run(
        [str(script), "peer", "upgrade"], cwd=cwd, env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=4 * LIMIT,
    )  # fmt: skip
    return done.returncode, done.stdout


def asked(environment: Path) -> list[str]:
    file = packages(environment) / "asked"
    return file.read_text().splitlines() if file.exists() else []


def test_it_installs_again_from_the_same_folder_and_shows_what_changed(environment: Path, tmp_path: Path):
    (packages(environment) / "newer").touch()
    code, said = upgrade(environment, tmp_path)
    assert code == 0, said
    assert asked(environment) == [
        f"install --upgrade {environment}",
        f"install --force-reinstall --no-deps {environment}",
    ]
    assert f"now      cairn {RELEASE} (protocol {PROTOCOL})\nfrom     {environment}\n" in said
    assert said.endswith(f"upgraded cairn {RELEASE} (protocol {PROTOCOL}) -> cairn 9.9.9 (protocol 9)\n")


def test_of_the_same_version_it_says_that_newer_sources_come_by_git_alone(environment: Path, tmp_path: Path):
    code, said = upgrade(environment, tmp_path)
    last = (
        f"{environment}: cairn {RELEASE} (protocol {PROTOCOL}). Newer sources come only by `git -C {environment} pull`"
    )
    assert code == 0 and said.endswith(f"installed again from {last} before\n"), said


def test_a_failure_of_the_installer_is_a_failure(environment: Path, tmp_path: Path):
    (packages(environment) / "fails").touch()
    code, said = upgrade(environment, tmp_path)
    assert code == 1 and "error: python ended with code 1: its lines above say why" in said
    assert len(asked(environment)) == 1


def test_nothing_is_installed_under_a_peer_that_runs(environment: Path, tmp_path: Path):
    script = environment / "bin" / "cairn"
    runs = tmp_path / "runs"  # until it does, the script may not be read, and `upgrade` writes another one
    script.write_text(f"#!{environment}/bin/python\nimport time\nopen('{runs}', 'w')\ntime.sleep(3600)\n")
    script.chmod(0o755)
    peer = subprocess.Popen([str(script), "peer", "join", "cairn1:an-invite"])
    try:
        wait_until(runs.exists, "the peer's process")
        code, said = upgrade(environment, tmp_path)
    finally:
        peer.kill()
        peer.wait()
    assert code == 1 and f"{peer.pid} (cairn peer join)" in said and f"`kill {peer.pid}`" in said, said
    assert "an-invite" not in said and asked(environment) == []
