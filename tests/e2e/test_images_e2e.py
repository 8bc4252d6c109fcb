"""The images of `docker/` built step by step in a bare root, and run; the files of `deploy/` by systemd and cloud-init.

There is no engine, no CUDA and no compose file in it. `tests/support/bare_root.py` says what stands for the bases.
"""

from __future__ import annotations

import itertools
import json
import lzma
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cairn import __version__
from protocol.invite import Invite
from protocol.version import PROTOCOL
from tests.support.bare_root import OVER_CUDA, Container, Image, Layers, Roots, loopback, why_not
from tests.support.waiting import wait_until
from tests.support.wheel import copy_files

ROOT = Path(__file__).resolve().parents[2]
WHY_NOT = why_not()
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(2 * 3600),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no bare root here: {WHY_NOT}"),
]

LIMIT = 900.0
"""Seconds after which a wait for a container fails: it imports torch without what the page cache has of our own."""

MAX_COORDINATOR_BYTES = 2.1e9
"""The most that the image may add to its base. torch with CUDA would make 5 GB of it."""

MAX_EXPOSURE = {"cairn-peer": 4.0, "cairn-preemption": 4.0, "cairn-coordinator": 4.0, "user/cairn-peer": 8.0}
"""The highest that systemd's estimate may be for a unit; 10 is without any sandbox. For a user's, it counts rights that
no user has."""


@pytest.fixture(scope="module")
def roots() -> Iterator[Roots]:
    with Roots() as made:
        yield made


@pytest.fixture(scope="module")
def coordinator(roots: Roots) -> Image:
    return roots.build(ROOT / "docker" / "coordinator.Dockerfile")


@pytest.fixture(scope="module")
def peer(roots: Roots) -> Image:
    return roots.build(ROOT / "docker" / "peer.Dockerfile")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Return a folder with the example's run.toml: fewer texts, rounds that one peer soon has made, and no end."""
    folder = tmp_path / "run-file"
    folder.mkdir()
    text = (ROOT / "examples" / "sotu.toml").read_text()
    changes = {"total_tokens": "800_000_000", "target_tokens": "512", "source": '"addresses.jsonl"'}
    for name, value in changes.items():
        text, changed = re.subn(rf"^{name} = \S+$", f"{name} = {value}", text, flags=re.M)
        assert changed == 1, name
    (folder / "run.toml").write_text(text)
    with lzma.open(ROOT / "examples" / "sotu" / "addresses.jsonl.xz") as addresses:
        (folder / "addresses.jsonl").write_bytes(b"".join(itertools.islice(addresses, 24)))
    return folder


def page(served: Container, path: str) -> dict:
    """Return what the coordinator's page has there, read inside its network."""
    code = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:7411{path}', timeout=60).read().decode())"
    done = served.execute(["python", "-c", code])
    assert done.returncode == 0, done.stderr + served.log()
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["coordinator", "peer"])
def test_an_image_runs_cairn(name: str, roots: Roots, request: pytest.FixtureRequest):
    image: Image = request.getfixturevalue(name)
    with loopback() as network:
        version = f"cairn {__version__} (protocol {PROTOCOL})\n"
        for arguments, said in ((["--version"], version), (image.stage.words("CMD"), "Usage: cairn")):
            with Container(roots, image, arguments, roots.volume(image), network=network) as container:
                assert container.wait(LIMIT) == 0, container.log()
                assert container.log().startswith(said)


def test_the_coordinators_image_is_small(coordinator: Image):
    # The last folder is the bare Debian.
    sizes = subprocess.run(["du", "-sbc", *coordinator.layers.folders], capture_output=True, text=True, check=True)
    *own, base, total = (int(line.split()[0]) for line in sizes.stdout.splitlines())
    print(f"\ncairn-coordinator: {total / 1e9:.2f} GB, {base / 1e9:.2f} of which are the bare Debian")
    assert sum(own) < MAX_COORDINATOR_BYTES


def test_a_run_is_served_joined_left_and_served_again(coordinator: Image, peer: Image, roots: Roots, run_file: Path):
    volume, peers_volume = roots.volume(coordinator), roots.volume(peer)
    invite = volume / "coordinated" / "sotu" / "invite"
    serve = ["coordinator", "serve", "/run-file/run.toml", "--public", "127.0.0.1", "--evaluate-every", "0"]
    mounts = {"/run-file:ro": run_file}
    with loopback() as network:
        with Container(roots, coordinator, serve, volume, network=network, mounts=mounts) as served:
            wait_until(served.healthy, "the coordinator's health", seconds=LIMIT, every=2.0)
            wait_until(invite.exists, "the invite", seconds=LIMIT)
            join = ["peer", "join", invite.read_text().strip(), "--name", "ada", "--device", "cpu", "--plain"]
            with Container(roots, peer, join, peers_volume, network=network) as joined:
                wait_until(joined.healthy, "the peer's health", seconds=LIMIT, every=2.0)
                wait_until(lambda: page(served, "/api/status")["round"] > 1, "a round", seconds=LIMIT, every=2.0)
                assert joined.running and served.healthy(), joined.log() + served.log()
                assert joined.stop(LIMIT) == 0, joined.log()
                assert "leaving" in joined.log()
                assert not joined.place.files_written()
            round_ = page(served, "/api/status")["round"]
            assert served.stop(LIMIT) == 0, served.log()
            assert not served.place.files_written()
        before = Invite.parse(invite.read_text())
        with Container(roots, coordinator, serve, volume, network=network, mounts=mounts) as again:
            wait_until(again.healthy, "the coordinator's health again", seconds=LIMIT, every=2.0)
            assert page(again, "/api/status")["round"] >= round_
            after = Invite.parse(invite.read_text())
            assert replace(after, addresses=()) == replace(before, addresses=())  # it names whoever is there
            assert again.stop(LIMIT) == 0, again.log()


def test_the_start_script_installs_and_stops_where_the_doctor_says_no(peer: Image, roots: Roots, tmp_path: Path):
    copy_files(tmp_path)  # installing leaves files there
    script = "sh /clone/deploy/start.sh cairn1:none && exit 1; test ! -e /etc/cairn"
    _, shown = roots.run(peer.layers, ["sh", "-ec", script], {"/clone": tmp_path})
    assert "Successfully installed cairn-swarm" in shown and "not joined" in shown


@pytest.fixture(scope="module")
def tools(roots: Roots) -> Layers:
    """Return a Debian with systemd and cloud-init."""
    install = "apt-get update && apt-get install -y --no-install-recommends systemd cloud-init"
    return roots.run(roots.debian(OVER_CUDA), ["sh", "-c", install])[0]


def test_systemd_takes_the_units_and_finds_them_sandboxed(tools: Layers, roots: Roots):
    script = """
        mkdir -p /opt/cairn/bin /root/.local/bin /run/user/0
        ln -s /bin/true /opt/cairn/bin/cairn && ln -s /bin/true /root/.local/bin/cairn
        export XDG_RUNTIME_DIR=/run/user/0
        for unit; do
            case $unit in user/*) manager=--user ;; *) manager=--system ;; esac
            systemd-analyze $manager verify --man=no --recursive-errors=no /deploy/$unit.service
            systemd-analyze $manager security --offline=true --no-pager /deploy/$unit.service
        done
    """
    command = ["sh", "-ec", script, "sh", *MAX_EXPOSURE]
    _, shown = roots.run(tools, command, {"/deploy:ro": ROOT / "deploy"})
    found = re.findall(r"Overall exposure level for (.+).service: ([\d.]+)", shown)
    assert [name for name, _ in found] == [Path(unit).name for unit in MAX_EXPOSURE], shown
    for (name, exposure), most in zip(found, MAX_EXPOSURE.values(), strict=True):
        print(f"\n{name}: {exposure}")
        assert float(exposure) <= most, shown


def test_cloud_init_takes_the_user_data(tools: Layers, roots: Roots):
    command = ["cloud-init", "schema", "--config-file", "/deploy/cloud-init.yaml"]
    _, shown = roots.run(tools, command, {"/deploy:ro": ROOT / "deploy"})
    assert "Valid" in shown
