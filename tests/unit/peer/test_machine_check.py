"""A machine that cannot take part in a run is refused before its peer is admitted and fetches anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from peer.doctor.device_process import Report
from peer.doctor.disk import to_save
from peer.doctor.measurements import Device
from peer.errors import PeerError
from peer.node import machine_check
from peer.node.machine_check import check_devices, check_disk
from peer.node.options import NodeOptions
from peer.store import Store
from tests.support.long_cases import long_cases
from tests.support.specs import tiny_spec

SPEC = tiny_spec()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
@pytest.mark.parametrize(
    "named",
    [
        {"device": "cuda"},
        *long_cases({"audit_device": "cuda:1"}, {"device": "cuda", "auditor": True}),
    ],
)
async def test_a_device_that_is_not_there_is_named(tmp_path: Path, named: dict):
    with pytest.raises(PeerError, match="sees no CUDA device.*--device cpu"):
        await check_devices(SPEC, replace(NodeOptions(tmp_path), **named))


async def test_a_layout_that_the_model_does_not_allow_is_named_with_those_that_work(tmp_path: Path):
    with pytest.raises(PeerError, match="--parallel tp=8 .* these work: dp=4,tp=2"):
        await check_devices(SPEC, NodeOptions(tmp_path, device="cpu", parallel="tp=8"))


async def test_what_cannot_fail_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that loads torch costs seconds."""
    monkeypatch.setattr("asyncio.create_subprocess_exec", None)
    await check_devices(SPEC, NodeOptions(tmp_path, device="cpu", parallel="dp=1"))
    await check_devices(SPEC, NodeOptions(tmp_path))


@pytest.mark.parametrize(
    ("kind", "needed", "remedy"),
    [
        ("cuda", 11, "add --moments 8bit, which needs bitsandbytes and 6.0 GB"),
        ("cuda", 9, ""),  # another program has the memory now
        ("cuda", 8, ""),
        ("cpu", 11, ""),
    ],
)
async def test_a_gpu_that_is_too_small_for_a_large_model_is_refused_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, needed: int, remedy: str
):
    monkeypatch.setattr(machine_check, "LARGE", 1)
    gb, told = 10**9, list[tuple[str, ...]]()

    async def run_check(spec: Path, words: Sequence[str], report: Report) -> str:
        told.append(tuple(words))
        device = Device("GPU", kind, "dp=1", 1, needed * gb, 8.5 * gb, 10 * gb, "2.9.0", savable=5 * gb)
        report({"device": asdict(device)})
        return ""

    monkeypatch.setattr(machine_check, "run_check", run_check)
    options = NodeOptions(tmp_path, gpu_memory=lambda: 10 * gb)
    if remedy:
        with pytest.raises(PeerError, match=f"training needs 11.0 GB .* of a GPU's 10.0 GB are free.*: {remedy}"):
            await check_devices(SPEC, options, 7)
    else:
        await check_devices(SPEC, options, 7)
    limits = ("--gpu-memory", str(10 * gb), "--moments", "fp32", "--disk", "7")
    assert told == [("--parallel", "auto", "--device", "auto", *limits)]
    await check_devices(SPEC, NodeOptions(tmp_path, device="cpu"))
    assert len(told) == 1, "nothing to look at"


async def test_the_check_of_a_large_model_runs_as_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found, check = list[dict[str, object]](), machine_check.run_check

    async def run_check(spec: Path, words: Sequence[str], report: Report) -> str:
        return await check(spec, words, lambda each: (found.append(each), report(each))[1])

    monkeypatch.setattr(machine_check, "LARGE", 1)
    monkeypatch.setattr(machine_check, "run_check", run_check)
    await check_devices(SPEC, NodeOptions(tmp_path))
    (report,) = found
    device = Device.of(report["device"])
    assert device.needed > 0 and device.kind == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_disk_must_hold_what_every_peer_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = NodeOptions(tmp_path)
    with Store(tmp_path / "small", 20_000) as store:
        with pytest.raises(PeerError, match="--disk allows 20.0 kB: allow more with --disk"):
            check_disk(SPEC, options, store)
    with Store(tmp_path / "large", 10**9) as store:
        check_disk(SPEC, options, store)
        monkeypatch.setattr("shutil.disk_usage", lambda folder: type("", (), {"free": 1000}))
        with pytest.raises(PeerError, match="1.0 kB are free where .*large is: .*--home"):
            check_disk(SPEC, options, store)


def test_what_a_peer_has_already_needs_no_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    once = to_save(SPEC, tmp_path) // 2
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "trainer-1.safetensors").write_bytes(bytes(once))
    free = once
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("", (), {"free": free}))
    with Store(tmp_path / "store", 10**9) as store:
        store.put(bytes(10**6))
        check_disk(SPEC, NodeOptions(tmp_path), store)
        free = 0
        with pytest.raises(PeerError, match="for what the trainer saves"):
            check_disk(SPEC, NodeOptions(tmp_path), store)
        check_disk(SPEC, NodeOptions(tmp_path, auditor=True), store)
