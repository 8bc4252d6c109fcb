"""The hooks of `deploy/preempted` find a provider's notice, by servers of this test; the unit's loop stops the peer."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
HOOKS = DEPLOY / "preempted"

TOKEN, ACTION = "PUT /latest/api/token", "GET /latest/meta-data/spot/instance-action"
PREEMPTED = "GET /computeMetadata/v1/instance/preempted"
NOTICE = '{"action": "terminate", "time": "2026-11-25T08:22:00Z"}'

needs_curl = pytest.mark.skipif(not shutil.which("curl"), reason="curl is not here: make curl")


class Metadata(BaseHTTPRequestHandler):
    """A provider's metadata server: `answers` by request, each with the header that it has to have."""

    answers: dict[str, tuple[int, str, str]]

    def do_GET(self) -> None:
        code, header, body = self.answers.get(f"{self.command} {self.path}", (404, "", ""))
        name, _, value = header.partition(": ")
        if header and self.headers.get(name) != value:
            code = 401
        self.send_response(code)
        self.send_header("Location", "/latest/api/token")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def is_notice(hook: str, address: str) -> bool:
    # A proxy for the internet does not lead to the metadata.
    environment = {"PATH": "/usr/bin:/bin", "CAIRN_METADATA": address, "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(["sh", str(HOOKS / hook)], env=environment, capture_output=True, text=True, timeout=20)
    assert done.stdout == ""
    return done.returncode == 0


def token(code: int = 200) -> tuple[int, str, str]:
    return (code, "X-aws-ec2-metadata-token-ttl-seconds: 60", "secret")


def action(code: int = 200) -> tuple[int, str, str]:
    return (code, "X-aws-ec2-metadata-token: secret", NOTICE)


@needs_curl
@pytest.mark.parametrize(
    ("answers", "notice"),
    [
        ({TOKEN: token(), ACTION: action()}, True),
        ({TOKEN: token()}, False),
        ({TOKEN: token(403), ACTION: (200, "", NOTICE)}, False),
        ({TOKEN: token(), ACTION: action(302)}, False),
        ({TOKEN: token(), ACTION: action(500)}, False),
        ({}, False),
    ],
    ids=["notice", "none", "token refused", "moved", "broken", "another provider"],
)
def test_aws_has_announced_it_if_the_action_is_there(address, monkeypatch, answers, notice):
    monkeypatch.setattr(Metadata, "answers", answers, raising=False)
    assert is_notice("aws.sh", address) is notice


@needs_curl
@pytest.mark.parametrize(
    ("answer", "notice"),
    [
        ((200, "Metadata-Flavor: Google", "TRUE"), True),
        ((200, "Metadata-Flavor: Google", "FALSE"), False),
        ((503, "Metadata-Flavor: Google", "TRUE"), False),
        ((404, "", "TRUE"), False),
    ],
    ids=["notice", "none", "broken", "another provider"],
)
def test_google_has_announced_it_if_it_says_true(address, monkeypatch, answer, notice):
    monkeypatch.setattr(Metadata, "answers", {PREEMPTED: answer}, raising=False)
    assert is_notice("gcp.sh", address) is notice


@needs_curl
@pytest.mark.parametrize("hook", ["aws.sh", "gcp.sh"])
def test_a_server_that_is_away_or_silent_announces_nothing(hook):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_notice(hook, f"http://127.0.0.1:{port}"), "it accepts, and never answers"
    assert not is_notice(hook, f"http://127.0.0.1:{port}")


def test_a_file_is_a_notice_once_it_is_there_and_not_after_a_reboot(tmp_path):
    text, file = (HOOKS / "file.sh").read_text(), tmp_path / "notice"
    copy = tmp_path / "file.sh"
    copy.write_text(text.replace("/run/cairn-preempted", str(file)))
    assert subprocess.run(["sh", str(copy)]).returncode == 1
    file.touch()
    assert subprocess.run(["sh", str(copy)]).returncode == 0


def test_the_unit_asks_until_there_is_a_notice_and_then_stops_the_peer_once(tmp_path):
    (line,) = re.findall(r"^ExecStart=(.+)$", (DEPLOY / "cairn-preemption.service").read_text(), re.M)
    log, hook = tmp_path / "log", tmp_path / "preempted"
    scripts = {"preempted": f"echo asked >> {log}; [ $(wc -l < {log}) -ge 5 ]"}
    scripts |= {name: f'echo {name} "$@" >> {log}' for name in ("sleep", "systemctl")}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    command = [word.replace("/etc/cairn/preempted", str(hook)) for word in shlex.split(line)]
    subprocess.run(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True, timeout=20)
    assert log.read_text().splitlines() == [
        *["asked", "sleep 5"] * 2,
        "asked",
        "systemctl stop --no-block cairn-peer",
    ]
