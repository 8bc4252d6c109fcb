"""The signals of a service manager and of a closed terminal end a command like Ctrl-C, so that it tidies up."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import pytest

from cairn import examination
from cairn.stop_signals import sigterm_as_ctrl_c
from protocol.ids import Digest
from protocol.invite import HostPort, Invite
from tests.support.command_line import cairn, logging_as_it_was  # noqa: F401 - a fixture
from tests.support.specs import tiny_spec
from tests.support.waiting import NEVER

SIGNALS = pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a terminal of the tests from being taken for the one that closes."""
    monkeypatch.setattr(os, "isatty", lambda _: False)


@SIGNALS
def test_it_is_ctrl_c_within_the_block_alone(sent: signal.Signals):
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        signal.raise_signal(sent)
    assert signal.getsignal(sent) is signal.SIG_DFL


def test_a_command_that_ignores_closed_terminals_goes_on(monkeypatch: pytest.MonkeyPatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with sigterm_as_ctrl_c():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@SIGNALS
def test_a_doctor_that_is_stopped_removes_its_folder(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def examine(*_: object) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(sent)
            await asyncio.sleep(NEVER)

    monkeypatch.setattr(examination, "examine", examine)
    invite = str(Invite(tiny_spec().run_id, Digest(bytes(32)), (HostPort("127.0.0.1", 1),), "", ()))
    done = cairn("peer", "doctor", invite, "--home", str(tmp_path))
    assert done.returncode == 130 and "stopped" in done.stderr and not list(tmp_path.iterdir())
