"""The gRPC service (protocol/wire/coordinator.proto): bounded, with its own deadlines, and messages for people."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import async_timeout
import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from coordinator.admission import MAX_REQUEST
from coordinator.credits.views import MAX_CERTIFICATES
from coordinator.errors import PortTakenError, RefusedError, TooManyError, UnknownRunError
from coordinator.health import Health, Reflection
from coordinator.interceptor import LimitsInterceptor
from coordinator.limits import Rate, RateLimit, caller_of
from coordinator.rpc_answers import RpcAnswers
from coordinator.tls import TlsCertificate
from protocol.envelope import author_of
from protocol.errors import AdmissionError, CairnError, MalformedError, SignatureError
from protocol.ids import Digest, PeerKey
from protocol.ledger.statements import MAX_BINDING
from protocol.wire import coordinator_pb2 as wire
from protocol.wire import coordinator_pb2_grpc as stubs

log = logging.getLogger(__name__)
T = TypeVar("T")

DEADLINE = 10.0
"""Seconds that any call may take, whatever the client asked for."""

MAX_CALLS = 512
MAX_CONNECTIONS = 16_384
"""A peer keeps one open while it trains."""


READS = Rate(per_second=20, burst=200)
ADMISSIONS = Rate(per_second=5, burst=100)
DIRECTIVES = Rate(per_second=2, burst=60)
ADMISSIONS_OF_ONE = Rate(per_second=0.2, burst=10)
"""Of one peer key at one address."""

BINDINGS = Rate(per_second=1, burst=30)
BINDINGS_OF_ONE = Rate(per_second=0.1, burst=20)
"""Of one account key at one address."""

OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_send_message_length", 4 * 1024 * 1024),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.server.max_pending_requests", MAX_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_CALLS),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_connection_idle_ms", 300_000),
    # Only the end of its connection ends a call whose caller never reads the answer. Clients reconnect by themselves.
    ("grpc.max_connection_age_ms", 1_800_000),
    ("grpc.max_connection_age_grace_ms", 15_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    # Two coordinators on one port would answer in turn: the second must fail instead.
    ("grpc.so_reuseport", 0),
)

METHODS = frozenset(m.name for m in wire.DESCRIPTOR.services_by_name["Coordinator"].methods)

_CODES: tuple[tuple[type[CairnError], grpc.StatusCode], ...] = (
    (UnknownRunError, grpc.StatusCode.NOT_FOUND),
    (TooManyError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RefusedError, grpc.StatusCode.PERMISSION_DENIED),
    (AdmissionError, grpc.StatusCode.PERMISSION_DENIED),
    (SignatureError, grpc.StatusCode.UNAUTHENTICATED),
    (MalformedError, grpc.StatusCode.INVALID_ARGUMENT),
)


class CoordinatorService(stubs.CoordinatorServicer):
    """All calls of the coordinator's service. `counted(method, code, seconds)` is called after each."""

    def __init__(self, answers: RpcAnswers, counted: Callable[[str, str, float], None]):
        super().__init__()
        self._answers = answers
        self.counted = counted
        self.serving = True
        """False once the server is about to stop: probes report it."""

        self._reads = RateLimit(READS)
        self._admissions = RateLimit(ADMISSIONS)
        self._directives = RateLimit(DIRECTIVES)
        self._admissions_of_one = RateLimit(ADMISSIONS_OF_ONE)
        self._bindings = RateLimit(BINDINGS)
        self._bindings_of_one = RateLimit(BINDINGS_OF_ONE)

    async def GetRun(self, request: wire.GetRunRequest, context) -> wire.GetRunReply:
        async def work() -> wire.GetRunReply:
            self._check_run(request.run)
            return await self._answers.run_reply()

        return await self._answer("GetRun", context, self._reads, work)

    async def Admit(self, request: wire.AdmitRequest, context) -> wire.AdmitReply:
        async def work() -> wire.AdmitReply:
            # The signature is not checked yet, so the key is only claimed. It is counted together with the address:
            # otherwise anybody could use up another peer's share. One peer behind a shared address cannot use up all of
            # it.
            caller = (caller_of(context.peer()), author_of(request.request, limit=MAX_REQUEST))
            self._admissions_of_one.take(caller, time.monotonic())
            return await self._answers.admit_reply(request.request)

        return await self._answer("Admit", context, self._admissions, work)

    async def Status(self, request: wire.StatusRequest, context) -> wire.StatusReply:
        async def work() -> wire.StatusReply:
            self._check_run(request.run)
            return await self._answers.status_reply()

        return await self._answer("Status", context, self._reads, work)

    async def Account(self, request: wire.AccountRequest, context) -> wire.AccountReply:
        async def work() -> wire.AccountReply:
            self._check_run(request.run)
            return await self._answers.account_reply(PeerKey(request.peer))

        return await self._answer("Account", context, self._reads, work)

    async def PublishDirective(self, request: wire.DirectiveRequest, context) -> wire.DirectiveReply:
        async def work() -> wire.DirectiveReply:
            self._check_run(request.run)
            # The owner's signature is the authority, whoever delivers it.
            return await self._answers.directive_reply(request.directive)

        return await self._answer("Amend", context, self._directives, work)

    async def Bind(self, request: wire.BindRequest, context) -> wire.BindReply:
        async def work() -> wire.BindReply:
            self._check_run(request.run)
            # The signature is not checked yet, so the key is only claimed: counted with the address, as in Admit.
            caller = (caller_of(context.peer()), author_of(request.binding, limit=MAX_BINDING))
            self._bindings_of_one.take(caller, time.monotonic())
            return wire.BindReply(peers=await self._answers.credits.bind(request.binding))

        return await self._answer("Bind", context, self._bindings, work)

    async def Certificates(self, request: wire.CertificatesRequest, context) -> wire.CertificatesReply:
        async def work() -> wire.CertificatesReply:
            self._check_run(request.run)
            if request.record:
                one = await self._answers.credits.certificate(Digest(request.record))
                return wire.CertificatesReply(certificates=[] if one is None else [one])
            limit = min(request.limit or MAX_CERTIFICATES, MAX_CERTIFICATES)
            found, more = await self._answers.credits.certificates(Digest(request.after), limit)
            return wire.CertificatesReply(certificates=found, more=more)

        return await self._answer("Certificates", context, self._reads, work)

    def _check_run(self, run: bytes) -> None:
        if run != self._answers.run:
            raise UnknownRunError(
                f"this coordinator serves run {self._answers.run.short}, not {run[:4].hex() or 'none'}"
            )

    async def _answer(
        self, method: str, context: grpc.aio.ServicerContext, limit: RateLimit, work: Callable[[], Awaitable[T]]
    ) -> T:
        began, code, message = time.monotonic(), grpc.StatusCode.OK, ""
        try:
            limit.take(caller_of(context.peer()), began)
            async with async_timeout.timeout(DEADLINE):
                return await work()
        except asyncio.TimeoutError:
            code, message = grpc.StatusCode.DEADLINE_EXCEEDED, "the coordinator is too busy: try again in a minute"
            log.warning("%s took more than %.0f s", method, DEADLINE)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except CairnError as e:
            code = next((c for kind, c in _CODES if isinstance(e, kind)), grpc.StatusCode.INTERNAL)
            if code is grpc.StatusCode.INTERNAL:
                # A failing disk or ledger is for the operator to read, not for strangers.
                log.error("%s: %s", method, e)
                message = "the coordinator has a fault of its own: its operator finds the reason in its log"
            else:
                log.info("%s from %s refused: %s", method, caller_of(context.peer()), e)
                message = str(e)
        finally:
            self.counted(method, code.name, time.monotonic() - began)
        await context.abort(code, message)
        raise AssertionError("abort raises")


async def start_server(
    service: CoordinatorService, certificate: TlsCertificate, host: str, port: int
) -> tuple[grpc.aio.Server, int]:
    """Start the server; return it and its port. Raises PortTakenError."""
    guard = LimitsInterceptor(service.counted, METHODS, MAX_CALLS)
    server = grpc.aio.server(interceptors=[guard], options=OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    stubs.add_CoordinatorServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(Health(lambda: service.serving), server)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(), server)
    credentials = grpc.ssl_server_credentials([(certificate.key_pem, certificate.certificate_pem)])
    listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    bound = 0
    try:
        bound = server.add_secure_port(listen, credentials)
    except RuntimeError as e:
        log.debug("gRPC says: %s", e)
    if bound == 0:
        await server.stop(None)
        raise PortTakenError(
            f"cannot listen on {listen} for peers: another program (or coordinator) has the port, or the address is "
            "not this machine's; stop it, or choose another port"
        )
    await server.start()
    return server, bound
