"""A coordinator that serves on loopback, and its clients: by gRPC, raw gRPC and HTTP."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import httpx
import pytest

from coordinator.service import Coordinator, CoordinatorConfig
from peer.coordinator_client import (
    CoordinatorClient,
    server_certificate,
)
from protocol.invite import TLS_NAME, HostPort
from protocol.spec import sign_spec
from protocol.wire import coordinator_pb2_grpc as stubs
from tests.support.coordinator_fakes import FakeSwarm, make_archiver, make_spec
from tests.support.specs import OWNER
from tests.support.waiting import LIMIT, until

SPEC = make_spec()


@asynccontextmanager
async def running(tmp_path, spec=SPEC, swarm=None, now=time.time, monotonic=None, **config):
    """Run a coordinator; the time of `now` passes in `monotonic` too, if there is none."""
    monotonic = monotonic or (time.monotonic if now is time.time else now)
    swarm = swarm or FakeSwarm(spec)
    places = dict(listen_host="127.0.0.1", listen_port=0, page_host="127.0.0.1", page_port=0)
    coordinator = Coordinator(
        CoordinatorConfig(tmp_path, **(places | config)), spec, sign_spec(OWNER, spec).encoded, OWNER, swarm,
        make_archiver(spec, tmp_path, swarm), now=now, monotonic=monotonic,
    )  # fmt: skip
    await coordinator.start()
    try:
        yield coordinator, swarm
    finally:
        await coordinator.stop()


def client(coordinator, **changes) -> CoordinatorClient:
    return CoordinatorClient(replace(coordinator.invite(), **changes), attempts=1)


async def settled(coordinator, rounds: int) -> None:
    """Wait until the coordinator has followed this number of rounds."""
    await until(lambda: coordinator.overview().round == rounds, f"{rounds} rounds are followed", every=0.05)


@asynccontextmanager
async def raw_stub(coordinator):
    import ssl

    der = await asyncio.to_thread(server_certificate, HostPort("127.0.0.1", coordinator.grpc_port))
    channel = grpc.aio.secure_channel(
        f"127.0.0.1:{coordinator.grpc_port}",
        grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(der).encode()),
        options=[("grpc.ssl_target_name_override", TLS_NAME)],
    )
    try:
        yield stubs.CoordinatorStub(channel)
    finally:
        await channel.close()


async def refusal(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as e:
        await call
    return e.value.code(), e.value.details() or ""


def web(coordinator) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{coordinator.page_port}", timeout=LIMIT, trust_env=False)
