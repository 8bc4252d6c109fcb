"""The errors of a client that cannot connect to the coordinator."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest

from coordinator.tls import load_or_make
from peer import coordinator_client
from peer.coordinator_client import CoordinatorClient, WrongClock
from protocol.ids import Digest, RunId, sha256
from protocol.invite import HostPort, Invite
from tests.support.specs import digest

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
