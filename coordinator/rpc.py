"""The gRPC service (protocol/wire/coordinator.proto): each method's own limits, and its answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from coordinator.admission import MAX_REQUEST, Admitter
from coordinator.checkpoints.settings import AboutTable
from coordinator.control import RunControl
from coordinator.credits.log import MAX_CERTIFICATES, CreditLog
from coordinator.errors import PortTakenError, UnknownRunError
from coordinator.health import Health, Reflection
from coordinator.history import charts
from coordinator.indexed_chain import IndexedChain
from coordinator.interceptor import OPEN, STREAMS, LimitsInterceptor
from coordinator.limits import NetworkLimit, Rate, RateLimit, caller_of
from coordinator.overview import Overview, PeerOverview
from coordinator.swarm import SwarmView
from coordinator.tls import TlsCertificate
from protocol.envelope import claimed_author
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import Balance
from protocol.ledger.statements import MAX_BINDING
from protocol.message_codec import MAX_ADDRESSES
from protocol.spec import RunSpec
from protocol.wire import coordinator_pb2 as wire
from protocol.wire import coordinator_pb2_grpc as stubs

log = logging.getLogger(__name__)

MAX_CONVICTIONS = 8
MAX_BARS = 1024
"""Barred peers in the answer to an owner."""

MAX_STATUS_PEERS = 1000
MAX_ABSENT = 8
MAX_LOSSES = 120
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
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: old versions inflate before they compare with the limit
    ("grpc.max_send_message_length", 4 * 1024 * 1024),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    # Beyond it a call is refused unread, which its client sees as UNAVAILABLE. Ended calls count until they are freed.
    ("grpc.max_concurrent_streams", 64),
    ("grpc.server.max_pending_requests", MAX_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_CALLS),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_connection_idle_ms", 300_000),
    # Only the end of its connection ends a call whose caller never reads the answer. Clients reconnect by themselves.
    ("grpc.max_connection_age_ms", 300_000),
    ("grpc.max_connection_age_grace_ms", 15_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    # Two coordinators on one port would answer in turn: the second must fail instead.
    ("grpc.so_reuseport", 0),
)


class CoordinatorService(stubs.CoordinatorServicer):
    """All calls of the coordinator's service. Each may raise CairnError, which the interceptor turns into a status."""

    def __init__(
        self, spec: RunSpec, spec_envelope: bytes, *, view: SwarmView, chain: IndexedChain, admitter: Admitter,
        control: RunControl, credits: CreditLog, overview: Callable[[], Overview], page_url: Callable[[], str],
        now: Callable[[], float], about: AboutTable,
    ):  # fmt: skip
        super().__init__()
        self._spec = spec
        self._spec_envelope = spec_envelope
        self._view = view
        self._chain = chain
        self._admitter = admitter
        self._control = control
        self._credits = credits
        self._overview = overview
        self._page_url = page_url
        self._now = now
        self._about = about
        self._status: tuple[Overview, wire.StatusReply] | None = None
        self._thinned: tuple[tuple[Round, Digest] | None, list[float]] | None = None
        self._reads = NetworkLimit(READS)
        self._admissions = NetworkLimit(ADMISSIONS)
        self._directives = NetworkLimit(DIRECTIVES)
        self._admissions_of_one = RateLimit(ADMISSIONS_OF_ONE)
        self._bindings = NetworkLimit(BINDINGS)
        self._bindings_of_one = RateLimit(BINDINGS_OF_ONE)

    def _check(self, context: grpc.aio.ServicerContext, limit: NetworkLimit, run: bytes) -> None:
        """Raise TooManyError for a caller's rate, UnknownRunError for another run."""
        limit.take(caller_of(context.peer()), time.monotonic())
        if run != self._spec.run_id:
            raise UnknownRunError(
                f"this coordinator serves run {self._spec.run_id.short}, not {run[:4].hex() or 'none'}"
            )

    async def GetRun(self, request: wire.GetRunRequest, context) -> wire.GetRunReply:
        self._check(context, self._reads, request.run)
        reply = await self.run_reply()
        if request.knows_spec:
            reply.ClearField("spec")
        return reply

    async def run_reply(self) -> wire.GetRunReply:
        """Return the spec, where the swarm and the page are, and what became of a run that is over."""
        reply = wire.GetRunReply(
            spec=self._spec_envelope, addresses=self._addresses(), page=self._page_url(), over=self._overview().over
        )
        if (last := self._view.resting_state()) is not None:
            reply.last.record, reply.last.round, reply.last.state = last.record, last.round, last.state or b""
        return reply

    async def Admit(self, request: wire.AdmitRequest, context) -> wire.AdmitReply:
        address = caller_of(context.peer())
        self._admissions.take(address, time.monotonic())
        # The signature is not checked yet, so the key is only claimed. It is counted together with the address:
        # otherwise anybody could use up another peer's share. One peer behind a shared address cannot use up all of it.
        caller = (address, claimed_author(request.request, limit=MAX_REQUEST))
        self._admissions_of_one.take(caller, time.monotonic())
        admission = await self._admitter.admit(request.request, address)
        return wire.AdmitReply(admission=admission.encoded, time=int(self._now()), addresses=self._addresses())

    def _addresses(self) -> list[str]:
        return list(self._view.addresses())[:MAX_ADDRESSES]

    async def Status(self, request: wire.StatusRequest, context) -> wire.StatusReply:
        self._check(context, self._reads, request.run)
        o = self._overview()
        if self._status is not None and self._status[0] is o:
            self._status[1].time = int(self._now())
            return self._status[1]  # hundreds of kilobytes: made once for each overview
        checkpoint = self._newest_checkpoint()
        reply = wire.StatusReply(
            name=o.name, health=o.health, message=o.message, round=o.round, head=o.head, state=o.state,
            state_round=o.state_round, tokens=o.tokens, total_tokens=o.total_tokens,
            tokens_per_second=o.tokens_per_second, loss=o.loss or 0.0, page=self._page_url(), time=int(self._now()),
            peers=[_peer_status(p) for p in o.peers[:MAX_STATUS_PEERS]], **self._about.model_dump(),
        )  # fmt: skip
        if o.final_round is not None:
            reply.final_round = o.final_round
        if checkpoint is not None:
            reply.checkpoint, reply.checkpoint_round = checkpoint
        for r in o.rounds:
            credits, absent = r.credits, r.absent or ()
            reply.rounds.add(
                round=credits.round, tokens=credits.tokens, loss=credits.loss, contributors=len(credits.lines),
                absent=absent[:MAX_ABSENT], absent_total=len(absent), final=r.final,
            )  # fmt: skip
        reply.losses.extend(self._losses())
        for a in o.alerts:
            reply.alerts.add(name=a.name, since=int(a.since), message=a.message)
        barred = [c for c in o.convictions if c.pardoned_in is None and c.barred_until > o.round]
        reply.convictions.extend(c.describe(self._admitter.name_of) for c in barred[:MAX_CONVICTIONS])
        self._status = (o, reply)
        return reply

    def _losses(self) -> list[float]:
        """Return the losses of the whole run, thinned; made once a round."""
        head = self._chain.head
        if self._thinned is None or self._thinned[0] != head:
            self._thinned = (head, charts(self._chain.points(), MAX_LOSSES).loss)
        return self._thinned[1]

    def _newest_checkpoint(self) -> tuple[Digest, int] | None:
        """Return the newest state that is a checkpoint and in the observer's store."""
        for credits in self._chain.remembered:
            if credits.round % self._spec.checkpoint.every == 0 and self._view.has_blob(credits.base_state):
                return credits.base_state, credits.round
        genesis = self._spec.genesis.name
        return (genesis, 0) if self._view.has_blob(genesis) else None

    async def PublishDirective(self, request: wire.DirectiveRequest, context) -> wire.DirectiveReply:
        """Accept a directive (an envelope; b"": none), and return the newest with how far it has spread."""
        self._check(context, self._directives, request.run)
        if request.directive:  # the owner's signature is the authority, whoever delivers it
            await self._control.accept(request.directive, request.base if request.HasField("base") else None)
        newest, o = self._control.newest, self._overview()
        beats = [p.heartbeat for p in o.peers if p.heartbeat is not None and p.phase not in ("silent", "gone")]
        informed = sum(newest is not None and b.directive_sequence == newest.body.sequence for b in beats)
        return wire.DirectiveReply(
            directive=newest.encoded if newest is not None else b"", round=o.round, peers=len(beats), informed=informed,
            wait=self._control.wait_reason(), convictions=[
                wire.Conviction(peer=key, round=penalty.convicted_in)
                for key, penalty in self._chain.audits.bars(o.round)[:MAX_BARS]
            ],
        )  # fmt: skip

    async def Account(self, request: wire.AccountRequest, context) -> wire.AccountReply:
        """Return what a peer has earned; all zero for one that is unknown."""
        self._check(context, self._reads, request.run)
        peer = PeerKey(request.peer)
        settled = self._chain.settled.get(peer, Balance())
        pending = self._chain.pending.get(peer, Balance())
        return wire.AccountReply(
            name=self._admitter.name_of(peer),
            micro_credits_settled=settled.micro_credits,
            micro_credits_pending=pending.micro_credits,
            tokens=settled.tokens + pending.tokens,
            rounds=settled.rounds + pending.rounds,
        )

    async def Bind(self, request: wire.BindRequest, context) -> wire.BindReply:
        self._check(context, self._bindings, request.run)
        # The signature is not checked yet, so the key is only claimed: counted with the address, as in Admit.
        caller = (caller_of(context.peer()), claimed_author(request.binding, limit=MAX_BINDING))
        self._bindings_of_one.take(caller, time.monotonic())
        return wire.BindReply(peers=await self._credits.leaderboard.bind(request.binding))

    async def Certificates(self, request: wire.CertificatesRequest, context) -> wire.CertificatesReply:
        self._check(context, self._reads, request.run)
        if request.record:
            one = await self._credits.certificate(Digest(request.record))
            return wire.CertificatesReply(certificates=[] if one is None else [one])
        limit = request.limit or MAX_CERTIFICATES
        found, more = await self._credits.certificates(Digest(request.after), limit)
        return wire.CertificatesReply(certificates=found, more=more)


def _peer_status(p: PeerOverview) -> wire.PeerStatus:
    status = wire.PeerStatus(
        peer=p.peer, name=p.name, phase=p.phase, micro_credits_settled=p.settled, micro_credits_pending=p.pending,
        seconds_since_heartbeat=p.seconds_since,
    )  # fmt: skip
    if (h := p.heartbeat) is not None:
        status.round, status.loss, status.tokens_per_second = h.round, h.loss, h.tokens_per_second
        status.bytes_up, status.bytes_down, status.head, status.device = h.bytes_up, h.bytes_down, h.head, h.device
    return status


async def start_server(
    service: CoordinatorService, health: Health, counted: Callable[[str, str, float], None],
    certificate: TlsCertificate, host: str, port: int,
) -> tuple[grpc.aio.Server, int]:  # fmt: skip
    """Start the server; return it and its port. `counted(method, code, seconds)` is called after each call.

    Raises PortTakenError.
    """
    guard = LimitsInterceptor(counted, MAX_CALLS)
    most = OPEN * (MAX_CALLS + STREAMS)
    server = grpc.aio.server(interceptors=[guard], options=OPTIONS, maximum_concurrent_rpcs=most)
    stubs.add_CoordinatorServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
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
            "not this machine's; stop it, or choose another port with --grpc"
        )
    await server.start()
    return server, bound
