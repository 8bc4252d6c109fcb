"""`cairn peer doctor` against a real coordinator: a machine that fits and one that does not leave no trace."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from cairn import examination
from coordinator.service import Coordinator
from peer.doctor.device import device_finding, memory_finding
from peer.doctor.device_process import try_device
from peer.doctor.measurements import Trial
from peer.doctor.pace import step_finding
from peer.doctor.probes import DiskSpace
from tests.support.command_line import (
    Done,
    cairn,
    logging_as_it_was,  # noqa: F401 - a fixture
)
from tests.support.coordinator_fakes import FakeSwarm, make_spec
from tests.support.coordinator_service import running
from tests.support.node_world import address_of
from tests.support.specs import identity, spec_fields, tiny_spec
from tests.support.waiting import until

SPEC = make_spec()


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """Return the coordinator's folder."""
    folder = tmp_path / "coordinator"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


async def doctor(coordinator: Coordinator, home: Path, *options: str) -> Done:
    command = ("peer", "doctor", str(coordinator.invite()), "--home", str(home), *options)
    return await asyncio.to_thread(cairn, *command)


def nothing_is_left(coordinator: Coordinator, home: Path, temporary: Path) -> bool:
    """Return whether the coordinator knows no peer, and there is no file."""
    return not coordinator.overview().peers and no_file_is_left(home, temporary)


def no_file_is_left(home: Path, temporary: Path) -> bool:
    return not home.exists() and not list(temporary.iterdir())


async def test_a_machine_that_fits(tmp_path: Path, served: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch):
    home, swarm, folders = tmp_path / "home", FakeSwarm(SPEC), []

    async def noted(spec: Path, *words: Any) -> Trial:
        folders.append(spec.parent.parent)
        return await try_device(spec, *words)

    monkeypatch.setattr(examination, "try_device", noted)
    member = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = member.sockets[0].getsockname()[1]
    swarm.addresses = lambda: [address_of(identity("observer").key).replace("4001", str(port))]
    async with running(served, SPEC, swarm) as (coordinator, _), member:
        done = await doctor(coordinator, home, "--device", "cpu", "--disk", "100M", "--json")
        assert nothing_is_left(coordinator, home, temporary)
    assert folders == [tmp_path]  # files of the trainer have room there
    report = json.loads(done.stdout)
    verdicts = {finding["name"]: finding["verdict"] for finding in report["findings"]}
    assert done.returncode == 0 and report["run"] == str(SPEC.run_id), report
    assert [verdicts[name] for name in ("run", "clock", "members", "disk", "device", "memory")] == ["ok"] * 6, report
    # On a machine that is busy enough a step of this tiny model may take longer than a round.
    assert verdicts["step"] in ("ok", "warning")
    assert {verdicts[name] for name in ("versions", "traffic", "link", "credits", "seen")} == {"note"}
    figures = report["figures"]
    assert figures["tokens_per_second"] == pytest.approx(64 / figures["step_seconds"])
    assert figures["micro_credits_an_hour"] > 0 and figures["bytes_in_an_hour"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
async def test_a_machine_that_does_not_fit(
    tmp_path: Path, served: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    home = tmp_path / "home"
    full = tmp_path / "no file can be made here"
    monkeypatch.setattr(examination, "disk_space", lambda store: DiskSpace(full, True, 0, 1000))
    async with running(served, SPEC, now=lambda: time.time() - 3600) as (coordinator, _):
        done = await doctor(coordinator, home, "--device", "cuda")
        assert nothing_is_left(coordinator, home, temporary)
    assert done.returncode == 1
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    refused = {line.split()[1] for line in lines if line.startswith("no ")}
    text = " ".join(lines)
    assert refused == {"clock", "disk", "device"}, done.stdout
    assert "clock is 3600 s ahead of the coordinator's" in text and "-> set it (for example with NTP)" in text
    assert "1.0 kB are free" in text and "on another disk with --home" in text
    assert "sees no CUDA device" in text and "or train with --device cpu" in text
    assert lines[-1] == "no: 3 of these must be fixed before this machine can take part"
    # A path is not broken, and this machine's may be long.
    assert max(len(line) for line in done.stdout.splitlines() if "/" not in line) <= 80


async def test_without_room_for_a_trial_all_else_is_told(
    tmp_path: Path, served: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(examination, "disk_space", lambda store: DiskSpace(tmp_path, True, 0, 1000))
    async with running(served, SPEC) as (coordinator, _):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
        done = await doctor(coordinator, tmp_path / "home", "--json")
        assert nothing_is_left(coordinator, tmp_path / "home", temporary)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and findings["disk"]["verdict"] == findings["device"]["verdict"] == "no"
    assert "not tried" in findings["device"]["found"] and str(tmp_path / "full") in findings["device"]["found"]
    assert "free some of that disk" in findings["device"]["found"] and "seen" in findings


async def test_for_a_run_that_is_over_no_machine_is_examined(tmp_path: Path, served: Path, temporary: Path):
    home, spec = tmp_path / "home", make_spec(total_tokens=20 * SPEC.data.window)
    async with running(served, spec=spec) as (coordinator, swarm):
        swarm.round({1: 10, 2: 10})
        await until(lambda: coordinator.overview().health == "finished", "the run has reached its total")
        done = await doctor(coordinator, home)
    assert done.returncode == 1 and no_file_is_left(home, temporary)
    findings = [line.split()[:2] for line in done.stdout.splitlines() if line[:1] not in ("", " ")]
    assert findings == [["note", "versions"], ["no", "run"], ["no:", "this"]]
    assert "there is nothing to train" in done.stdout and done.stdout.rstrip().endswith("no: this run is over")


@pytest.mark.long
async def test_a_model_that_no_memory_holds_is_not_built(tmp_path: Path):
    config = spec_fields()["model"]["config"]
    spec = tiny_spec(model={"config": config, "tensors": [("model.embed_tokens.weight", [2**18, 2**19])]})
    (tmp_path / "spec.json").write_bytes(spec.canonical())
    trial = await try_device(tmp_path / "spec.json", "cpu", "auto", 1)
    assert device_finding(trial).verdict == "ok" and not trial.samples
    memory, step = memory_finding(trial, 0), step_finding(spec, trial, None)
    assert memory is not None and memory.verdict == "no" and "3.3 TB" in memory.found and "a GPU" in memory.remedy
    assert step is not None and "does not fit" in step.found


@pytest.mark.long
async def test_training_that_fails_is_a_finding(tmp_path: Path):
    """The model that the spec's config gives is not that of its layout, as with an older transformers."""
    config = spec_fields()["model"]["config"]
    spec = tiny_spec(model={"config": config, "tensors": [("model.embed_tokens.weight", [256, 32])]})
    (tmp_path / "spec.json").write_bytes(spec.canonical())
    trial = await try_device(tmp_path / "spec.json", "cpu", "auto", 1)
    finding = step_finding(spec, trial, None)
    assert finding is not None and finding.verdict == "no" and "pip install --upgrade transformers" in finding.found


async def test_a_coordinator_that_does_not_answer_is_a_finding(tmp_path: Path, served: Path, temporary: Path):
    async with running(served, SPEC) as (coordinator, _):
        invite = coordinator.invite()
    home = tmp_path / "home"
    done = await asyncio.to_thread(cairn, "peer", "doctor", str(invite), "--home", str(home), "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["verdict"] == "no"
    assert "does not answer" in report["findings"][-1]["found"]
    assert no_file_is_left(home, temporary)


class Page(BaseHTTPRequestHandler):
    """A page with a checkpoint of `size` bytes."""

    size = 0

    def do_GET(self) -> None:
        found = self.path == "/checkpoints/round-000003/model.safetensors"
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(self.size))
        self.end_headers()
        self.wfile.write(bytes(self.size))

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(("size", "round", "tells"), [(4_000_000, 3, True), (500_000, 3, False), (4_000_000, 4, False)])
async def test_a_download_tells_a_rate_if_enough_of_it_came(
    size: int, round: int, tells: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Page, "size", size)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        found = await examination.measure_download(f"http://127.0.0.1:{server.server_port}/", round)
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
    assert (found is not None) == tells
    assert found is None or (found.mbits > 0 and 3_000_000 < found.size < 4_000_000)


async def test_a_page_that_stalls_holds_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(examination, "DOWNLOAD_SECONDS", 0.5)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await examination.measure_download(f"http://127.0.0.1:{port}/", 3) is None
