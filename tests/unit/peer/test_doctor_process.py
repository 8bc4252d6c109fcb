"""The process that tries a device says what it finds in lines; however it ends, the doctor knows how."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from peer.doctor import device_process
from peer.doctor.device_process import try_device
from peer.doctor.measurements import Sample, Trial
from peer.errors import PeerError

DEVICE = (
    '{"device": {"name": "CPU", "kind": "cpu", "layout": "dp=1", "ranks": 1, "needed": 1, "free": 9, "whole": 9, '
    '"torch": "2.9", "cuda": "", "driver": "", "unused": ["T4"]}}'
)


async def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> tuple[Trial, list[str]]:
    """Return the outcome of a trial by this shell script, and what was said of its progress."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    said: list[str] = []
    return await try_device(tmp_path / "spec.json", "cpu", "auto", 1, said.append), said


async def test_a_trial_that_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = f"""echo '{DEVICE}'; echo 'a warning of torch' >&2; echo '{{"built": true}}'
    echo '{{"sample": {{"windows": 4, "gradient": 0.5, "optimizer": 0.1, "memory": 7}}}}'"""
    trial, said = await tried(tmp_path, monkeypatch, script)
    assert trial.device is not None and trial.device.unused == ("T4",)
    assert trial.samples == [Sample(4, 0.5, 0.1, 7)] and not trial.refused and not trial.waited
    assert said == ["looking at the device", "building the model on CPU", "training on random tokens, for up to 60 s"]


async def test_the_process_is_told_of_the_limits_of_a_gpu_and_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "program"
    program.write_text("""#!/bin/sh\necho "{\\"refused\\": \\"$*\\"}"; exit 1\n""")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    trial = await try_device(tmp_path / "spec.json", "cuda", "auto", 1, gpu_memory=6 * 10**9, moments="8bit", disk=7)
    assert "--gpu-memory 6000000000 --moments 8bit --disk 7" in trial.refused


async def test_a_step_that_does_not_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_process, "TRIAL_SECONDS", 0.2)
    trial, _ = await tried(tmp_path, monkeypatch, f"""echo '{DEVICE}'; echo '{{"built": true}}'; exec sleep 3600""")
    assert trial.waited == 0.2 and trial.device is not None and not trial.refused


async def test_a_device_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_process, "CHECK_SECONDS", 0.2)
    trial, _ = await tried(tmp_path, monkeypatch, "exec sleep 3600")
    assert "no answer from the device" in trial.refused and not trial.waited


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("""echo '{"refused": "there is no such device"}'; exit 1""", "there is no such device"),
        ("echo 'Traceback'; echo 'RuntimeError: \033[31mbad'; exit 3", "code 3: RuntimeError: [31mbad"),
        ("exit 4", "code 4: it said nothing"),
        ("kill -9 $$", "out of memory is the usual cause"),
    ],
)
async def test_a_trial_that_fails(script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trial, _ = await tried(tmp_path, monkeypatch, script)
    assert words in trial.refused


async def test_a_process_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(PeerError, match="cannot start a process: .*; check the limits"):
        await try_device(tmp_path / "spec.json", "cpu", "auto", 1)
