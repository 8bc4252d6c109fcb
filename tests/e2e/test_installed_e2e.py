"""A wheel in an environment of somebody else's: away from the checkout, without extras, amid packages of our names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cairn import __version__
from cairn.demo.processes import free_ports
from cairn.demo.report import loss_curve
from protocol.errors import CairnError
from protocol.version import PROTOCOL
from tests.support.command_line import TINY_RUN
from tests.support.waiting import LIMIT, wait_until
from tests.support.wheel import Installed, build_wheel, install

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

OURS = ("peer", "coordinator", "protocol")
FOREIGN = "raise ImportError('this package is another project')\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return an installed Cairn. Other projects have its packages' names: among its neighbours, on PYTHONPATH, here."""
    folder = tmp_path_factory.mktemp("installed")
    made = install(build_wheel(folder), folder, hidden=("matplotlib", "psycopg", "pyarrow"))
    places = [made.packages, folder / "path"]
    if sys.version_info >= (3, 11):  # before that the command refuses to start there
        places.append(made.cwd)
    for place in places:
        for name in OURS:
            (place / name).mkdir(parents=True)
            (place / name / "__init__.py").write_text(FOREIGN)
    lines = (json.dumps({"text": f"the quick brown fox {i} jumps over lazy dogs"}) for i in range(400))
    (made.cwd / "text.jsonl").write_text("\n".join(lines))
    (made.cwd / "run.toml").write_text(
        TINY_RUN.replace('source = "text.txt"', 'source = "text.jsonl"\nvalidation_every = 10')
    )
    return made


@contextmanager
def running(installed: Installed, output: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the background; at the end of the block it is interrupted as by Ctrl-C, and waited for."""
    path = str(installed.folder.parent / "path")
    with open(output, "wb") as out:
        process = subprocess.Popen(
            installed.command(*arguments), cwd=installed.cwd, env=installed.environment(PYTHONPATH=path),
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT)
    finally:
        process.kill()
        process.wait()


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read()


@pytest.mark.parametrize("name", OURS)
def test_other_projects_keep_the_names(installed: Installed, name: str):
    with pytest.raises(AssertionError, match="this package is another project"):
        installed.python(f"import {name}")
    place = installed.python(f"import cairn, {name}; print({name}.__file__)").strip()
    assert place == str(installed.packages / "cairn" / "packages" / name / "__init__.py")


def test_it_tells_its_version_and_that_of_no_checkout(installed: Installed):
    assert installed.cairn("--version") == f"cairn {__version__} (protocol {PROTOCOL})\n"
    assert "cairn peer join INVITE" in installed.cairn("--help")


def test_run_files_are_planned_and_checked(installed: Installed, tmp_path: Path):
    planned = tmp_path / "planned.toml"
    installed.cairn("run", "plan", "--parameters", "10M", "--out", planned)
    assert "[model]" in planned.read_text()
    example = installed.packages / "cairn" / "packages" / "examples" / "sotu.toml"
    assert "is a valid run file" in installed.cairn("run", "validate", example)
    assert "is a valid run file" in installed.cairn("run", "validate", "run.toml")


def test_a_run_is_served_with_its_page(installed: Installed, tmp_path: Path):
    grpc, port, swarm = free_ports(3)
    page, home, output = f"http://127.0.0.1:{port}", tmp_path / "home", tmp_path / "output.txt"
    arguments = ["--grpc", f"127.0.0.1:{grpc}", "--page", f"127.0.0.1:{port}", "--swarm", f"/ip4/127.0.0.1/tcp/{swarm}"]
    with running(installed, output, "coordinator", "serve", "run.toml", "--home", str(home), *arguments) as served:
        invite = home / "coordinated" / "tiny" / "invite"
        wait_until(lambda: invite.exists() or served.poll() is not None, "the invite")
        assert served.poll() is None, output.read_text()
        # A process of its own evaluates the first state.
        evaluations = invite.with_name("evaluations.jsonl")
        wait_until(lambda: evaluations.exists() and evaluations.read_text(), "an evaluated state")
        assert b"cairn_validation_loss" in fetch(f"{page}/metrics")
        named = re.findall(r'(?:src|href)="(/?static/[^"]+)"', fetch(page).decode())
        assert len(named) > 3
        for file in named:
            assert len(fetch(f"{page}/{file.lstrip('/')}")) > 100, file
        status = installed.cairn("status", invite.read_text().strip())
        assert "tiny" in status
    assert served.returncode == 0, output.read_text()


def test_the_demo_trains(installed: Installed, tmp_path: Path):
    output = tmp_path / "output.txt"
    with running(installed, output, "demo", "--plain", "--folder", str(tmp_path / "demo")) as demo:

        def page() -> str:
            assert demo.poll() is None, output.read_text()
            found = re.search(r"page: (http\S+)", output.read_text())
            return found[1] if found else ""

        def rounds() -> int:
            assert demo.poll() is None, output.read_text()
            try:
                return len(loss_curve(address))
            except CairnError:
                return 0

        address = wait_until(page, "the page's address", seconds=2 * LIMIT)
        wait_until(rounds, "a round of four peers", seconds=4 * LIMIT, every=1.0)
    assert demo.returncode == 130
    for pid in (int(p) for p in os.listdir("/proc") if p.isdigit()):
        assert not _runs_in(pid, installed.folder), f"process {pid} has outlived the demo"


def _runs_in(pid: int, folder: Path) -> bool:
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
