"""A peer and a run of different protocols: real processes and calls get the remedy, and nobody is admitted."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path

import grpc
import pytest

from peer.node.enrollment import ADMISSION, run_folder
from peer.swarm import transport
from peer.swarm.transport import call_name
from protocol.envelope import seal
from protocol.version import MAX_PROTOCOL, PROTOCOL, RELEASE
from protocol.wire import coordinator_pb2 as wire
from tests.support.coordinator_fakes import peer
from tests.support.coordinator_service import SPEC, raw_stub, refusal, running
from tests.support.waiting import LIMIT, ended

LATER = SPEC.model_copy(update={"version": PROTOCOL + 1})
"""The spec of a run that speaks the next protocol; only its version differs."""

NEWER_CAIRN = f"""
import protocol.version as version
version.PROTOCOL = {PROTOCOL + 1}
version.LAST_RELEASES[{PROTOCOL}] = "{RELEASE}"
from cairn.main import main
main()
"""
"""A Cairn that speaks the next protocol, and knows the last release that spoke this one."""


async def join(tmp_path: Path, invite: object, *python: str) -> tuple[int, str]:
    """Return the exit code and the output of `cairn peer join`, as a process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *python, "peer", "join", str(invite), "--home", str(tmp_path / "home"), "--plain",
        "--device", "cpu", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await ended(process.communicate(), 4 * LIMIT)
    return process.returncode or 0, out.decode()


@pytest.mark.parametrize(
    ("spec", "python", "says"),
    [
        (LATER, ("-m", "cairn"), f"{PROTOCOL + 1}, and this Cairn {RELEASE} speaks {PROTOCOL}: run `cairn peer up"),
        pytest.param(
            SPEC,
            ("-c", NEWER_CAIRN),
            f"{PROTOCOL}, and this Cairn {RELEASE} speaks {PROTOCOL + 1}: install cairn-sw",
            marks=pytest.mark.long,
        ),
    ],
    ids=["too old", "too new"],
)
async def test_a_peer_of_another_protocol_is_refused_before_anything_is_fetched(tmp_path, spec, python, says):
    async with running(tmp_path, spec) as (c, _):
        code, said = await join(tmp_path, c.invite(), *python)
        assert code == 1 and f"this run speaks protocol {says}" in said, said
        assert c.admitter.count == 0
    store = run_folder(tmp_path / "home", spec.run_id) / "store"
    assert not (store / "values" / ADMISSION).exists() and not list((store / "blobs").rglob("*.*"))


@pytest.mark.parametrize(
    ("spec", "stated", "code", "says"),
    [
        (SPEC, 0, grpc.StatusCode.PERMISSION_DENIED, "does not state the protocol.*run `cairn peer upgrade`"),
        (
            SPEC,
            PROTOCOL + 1,
            grpc.StatusCode.PERMISSION_DENIED,
            f"speaks {PROTOCOL + 1}: in your clone `git checkout v{RELEASE}`, then",
        ),
        (SPEC, MAX_PROTOCOL, grpc.StatusCode.PERMISSION_DENIED, "in your clone `git checkout v"),
        (SPEC, MAX_PROTOCOL + 1, grpc.StatusCode.INVALID_ARGUMENT, "at most"),
        (SPEC, 2**32 + PROTOCOL, grpc.StatusCode.INVALID_ARGUMENT, "at most"),
        (SPEC, 2**64 - 1, grpc.StatusCode.INVALID_ARGUMENT, "at most"),
        (LATER, PROTOCOL, grpc.StatusCode.PERMISSION_DENIED, f"speaks {PROTOCOL}: run `cairn peer upgrade`"),
    ],
)
async def test_a_request_that_states_another_protocol_is_not_admitted(tmp_path, spec, stated, code, says):
    body = wire.AdmissionRequest(run=bytes(spec.run_id), time=int(time.time()), protocol=stated)
    request = wire.AdmitRequest(request=seal(peer(1), "admission-request", body.SerializeToString()).encoded)
    async with running(tmp_path, spec) as (c, _), raw_stub(c) as stub:
        got, said = await refusal(stub.Admit(request, timeout=LIMIT))
        assert got is code and re.search(says, said), said
        assert c.admitter.count == 0


def test_peers_of_two_protocols_have_calls_of_other_names_but_for_the_one_that_gives_strangers_the_spec(monkeypatch):
    calls = ("packet", "chain", "headers", "blob", "coordinator-address")
    ours = {call: call_name(SPEC.run_id, call) for call in calls}
    monkeypatch.setattr(transport, "PROTOCOL", PROTOCOL + 1)
    theirs = {call: call_name(SPEC.run_id, call) for call in calls}
    assert [call for call in calls if ours[call] == theirs[call]] == ["coordinator-address"]
