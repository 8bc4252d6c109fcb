"""The errors of a client that cannot connect to the coordinator."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.tls import load_or_make
from peer import coordinator_client
from peer.coordinator_client import CoordinatorClient, CoordinatorUnreachable, WrongClock, WrongCoordinator
from protocol.coordinator_address import CoordinatorAddress
from protocol.ids import Digest, RunId, sha256
from protocol.invite import HostPort, Invite
from tests.support.specs import digest
from tests.support.waiting import LIMIT, NEVER, ended, until

NOW = datetime.datetime.now(datetime.timezone.utc)


@pytest.mark.parametrize(
    ("made", "said"),
    [(datetime.timedelta(days=3), "not valid before"), (datetime.timedelta(days=-11 * 365), "valid until")],
)
async def test_a_clock_outside_of_the_certificates_time_is_named_before_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: datetime.timedelta, said: str
):
    certificate = load_or_make(tmp_path, now=NOW + made)
    der = ssl.PEM_cert_to_DER_cert(certificate.certificate_pem.decode())
    monkeypatch.setattr(coordinator_client, "server_certificate", lambda endpoint: der)
    invite = Invite(RunId(digest("run")), Digest(sha256(der)), (HostPort("127.0.0.1", 9),))
    async with CoordinatorClient(invite) as client:
        with pytest.raises(WrongClock, match=f"clock may be wrong.*{said}.*set the clock"):
            await client.get_run()


SLOW, QUICK = HostPort("slow.example.org", 9), HostPort("127.0.0.1", 9)
RUN, NAME = RunId(digest("run")), digest("certificate")


@pytest.fixture
async def asked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[HostPort]]:
    """The places that were asked for their certificate: one is found only at the end, the other shows a wrong one."""
    asked: list[HostPort] = []
    found = threading.Event()

    def certificate(endpoint: HostPort) -> bytes:
        asked.append(endpoint)
        if endpoint == SLOW:
            found.wait(LIMIT)
        return b"another"

    monkeypatch.setattr(coordinator_client, "server_certificate", certificate)
    yield asked
    found.set()


async def test_a_place_that_is_silent_keeps_no_call_from_another(asked: list[HostPort]):
    async with CoordinatorClient(Invite(RUN, NAME, (SLOW,)), timeout=NEVER) as client:
        first = asyncio.create_task(client.get_run(attempts=1))
        await until(lambda: asked == [SLOW], "the first call looks for the slow name")
        client.moved(CoordinatorAddress(RUN, 1, (QUICK,), NAME))
        second = asyncio.create_task(client.get_run(attempts=1))
        await until(lambda: QUICK in asked, "the second call asks the other place", seconds=30)
        for call in (first, second):
            call.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


async def test_a_name_that_is_looked_for_too_long_is_an_address_that_does_not_answer(asked, monkeypatch):
    monkeypatch.setattr(coordinator_client, "CONNECT_SECONDS", 0.01)
    async with CoordinatorClient(Invite(RUN, NAME, (SLOW, QUICK)), timeout=0.05) as client:
        with pytest.raises(WrongCoordinator):  # of the other place, to which it goes on
            await ended(client.get_run(attempts=1))
    async with CoordinatorClient(Invite(RUN, NAME, (SLOW,)), timeout=0.05) as client:
        with pytest.raises(CoordinatorUnreachable, match="slow.example.org:9 does not answer .no connection in 0 s"):
            await ended(client.get_run(attempts=1))
