"""A machine that cannot take part in a run is refused before its peer is admitted and fetches anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peer.errors import PeerError
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
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("", (), {"free": 1000}))
    with Store(tmp_path / "store", 10**9) as store:
        store.put(bytes(10**6))
        check_disk(SPEC, NodeOptions(tmp_path), store)
