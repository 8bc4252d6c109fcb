"""Client of a run's coordinator: the spec, admissions, the status of the swarm, a peer's earnings.

The coordinator is identified by the fingerprint of its TLS certificate, in the invite or in the owner's newest address
record (`protocol.coordinator_address`). Its answers are checked all the same: the spec against the run id, and the
admission against the owner's key. All calls are idempotent, so one that got no answer is tried again, at the next
address if there is one.

The dataclasses here are the client's view of `coordinator.proto`, with texts and numbers checked: the one shape of a
peer's status on this side of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import random
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import async_timeout
import grpc
import grpc.aio
from cryptography import x509

from peer.errors import PeerError
from protocol.coordinator_address import CoordinatorAddress
from protocol.envelope import seal
from protocol.errors import CairnError, MalformedError, os_reason
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, sha256
from protocol.invite import TLS_NAME, HostPort, Invite, is_multiaddress
from protocol.message_codec import MessageDecoder
from protocol.messages import MAX_ADDRESSES, Admission, Signed
from protocol.plain_text import printable
from protocol.spec import RunSpec, open_spec
from protocol.version import PROTOCOL
from protocol.wire import coordinator_pb2 as wire
from protocol.wire import coordinator_pb2_grpc as stubs

T = TypeVar("T")

CONNECT_SECONDS = 5.0
MAX_REPLY = 4 * 1024 * 1024
MAX_CERTIFICATE = 16 * 1024

_OPTIONS = (
    ("grpc.ssl_target_name_override", TLS_NAME),
    ("grpc.max_receive_message_length", MAX_REPLY),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: old versions inflate before they compare with the limit
    ("grpc.enable_retries", 0),  # tried again here, with one policy
    ("grpc.enable_http_proxy", 0),  # the pinned certificate is fetched without one, too
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,  # a fault of its own: it may be gone soon, and refuses nobody
    grpc.StatusCode.UNKNOWN,
)


class CoordinatorUnreachable(PeerError):
    """No coordinator of the invite answered, or none without a fault of its own."""


class CoordinatorRefused(PeerError):
    """The coordinator answered, and said no: asking again will not help."""


class WrongCoordinator(PeerError):
    """The server at this address is not the coordinator that the invite means."""


class WrongClock(PeerError):
    """By this machine's clock the coordinator's certificate is not valid: every connection would fail."""


@dataclass(frozen=True, slots=True)
class LastState:
    """The state after the newest record of a run that is over or paused; `state` is its digest once it is archived."""

    record: Digest
    round: int
    state: Digest | None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run's verified spec, its signed envelope, multiaddresses of its swarm, and the address of its page.

    By the coordinator's word: `over` says how the run ended (empty: it goes on, or is paused), and `last` is the state
    of a run that is over or paused.
    """

    spec: RunSpec
    encoded: bytes
    addresses: tuple[str, ...]
    page: str
    over: str = ""
    last: LastState | None = None


@dataclass(frozen=True, slots=True)
class GrantedAdmission:
    """A verified admission. `clock_ahead`: seconds by which this machine's clock is ahead of the coordinator's."""

    admission: Signed[Admission]
    addresses: tuple[str, ...]
    clock_ahead: float


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """One peer as the coordinator sees it. Texts are printable and short, numbers finite."""

    peer: PeerKey
    name: str
    phase: str
    round: int
    loss: float
    tokens_per_second: float
    bytes_up: int
    bytes_down: int
    micro_credits_settled: int
    micro_credits_pending: int
    head: Digest | None
    seconds_since_heartbeat: float
    device: str


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """One round: the number of contributors, and the members that trained and are not among them.

    `absent` are the first few names, `absent_total` is their number.
    """

    round: int
    tokens: int
    loss: float
    contributors: int
    absent: tuple[str, ...]
    absent_total: int
    final: bool


@dataclass(frozen=True, slots=True)
class AlertStatus:
    """A present problem. `since`: unix seconds; `message` is for people."""

    name: str
    since: int
    message: str


@dataclass(frozen=True, slots=True)
class SwarmStatus:
    """The swarm as the coordinator sees it.

    `checkpoint` is the state digest of the newest checkpoint that it holds. `losses` is a thinned curve of the run.
    """

    name: str
    health: str
    message: str
    round: int
    head: Digest
    state: Digest
    state_round: int
    tokens: int
    total_tokens: int
    tokens_per_second: float
    loss: float
    peers: tuple[PeerStatus, ...]
    page: str
    checkpoint: Digest | None
    checkpoint_round: int
    final_round: int | None
    rounds: tuple[RoundStatus, ...] = ()
    losses: tuple[float, ...] = ()
    alerts: tuple[AlertStatus, ...] = ()
    convictions: tuple[str, ...] = ()
    """Of peers that are barred, newest first: who, on which measurements, and until which round."""
    time: int = 0
    """Unix seconds by the coordinator's clock; 0 when it does not tell."""
    description: str = ""
    contact: str = ""
    license: str = ""


@dataclass(frozen=True, slots=True)
class PeerCredits:
    """The earnings of a peer."""

    micro_credits_settled: int
    micro_credits_pending: int
    rounds: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A possible address of the coordinator, and the certificate that it must show there."""

    endpoint: HostPort
    fingerprint: Digest


class CoordinatorClient:
    """The coordinators of one invite, wherever they have moved to. Use with `async with`, or close it."""

    def __init__(self, invite: Invite, *, timeout: float = 10.0, attempts: int = 3):
        self._invite = invite
        self._timeout = timeout
        self._attempts = attempts
        self._places = self._of_invite = tuple(_Place(e, invite.fingerprint) for e in invite.coordinators)
        self._channels: dict[_Place, grpc.aio.Channel] = {}
        self._answered: _Place | None = None  # the last address that answered
        self._opening: defaultdict[_Place, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One call at a time connects to a place: a silent one keeps nobody from the others."""

        self._spec: RunSpec | None = None
        self._encoded = b""

    async def __aenter__(self) -> CoordinatorClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close(None)

    def moved(self, to: CoordinatorAddress) -> None:
        """Use this address first from now on, and the invite's addresses if nobody answers there."""
        there = tuple(_Place(e, to.fingerprint) for e in to.coordinators)
        self._places = tuple(dict.fromkeys((*there, *self._of_invite)))
        self._answered = None

    # -- the calls -------------------------------------------------------------------------------------------

    async def get_run(self, *, attempts: int | None = None) -> RunInfo:
        """Return the spec, verified against the run id. `attempts` replaces the usual number. Raises CairnError."""
        request = wire.GetRunRequest(run=bytes(self._invite.run))
        reply: wire.GetRunReply = await self._call(lambda stub, t: stub.GetRun(request, timeout=t), attempts)
        self._spec = open_spec(reply.spec, self._invite.run)
        self._encoded = reply.spec
        return self._run_info(reply, self._spec)

    async def get_run_again(self) -> RunInfo:
        """Return the same without another copy of the spec, after one attempt. Raises CairnError."""
        if self._spec is None:
            return await self.get_run(attempts=1)
        request = wire.GetRunRequest(run=bytes(self._invite.run), knows_spec=True)
        reply: wire.GetRunReply = await self._call(lambda stub, t: stub.GetRun(request, timeout=t), 1)
        return self._run_info(reply, self._spec)

    def _run_info(self, reply: wire.GetRunReply, spec: RunSpec) -> RunInfo:
        last = None
        if reply.HasField("last"):
            m = reply.last
            last = LastState(Digest(m.record), m.round, Digest(m.state) if m.state else None)
        addresses = usable_addresses(reply.addresses)
        return RunInfo(spec, self._encoded, addresses, _text(reply.page, 300), _text(reply.over, 600), last)

    async def admit(self, identity: Identity, name: str = "", *, nonce: int = 0) -> GrantedAdmission:
        """Request an admission for this identity, or its renewal.

        `nonce`: the key's proof of work, if the run asks for one.

        Raises CoordinatorRefused with the coordinator's reason, and CairnError for other failures.
        """
        spec = self._spec or (await self.get_run()).spec

        def ask(stub: stubs.CoordinatorStub, seconds: float) -> Awaitable[wire.AdmitReply]:
            # Signed for each attempt: the time in it is compared with the coordinator's clock.
            body = wire.AdmissionRequest(
                run=bytes(self._invite.run),
                time=int(time.time()),
                code=self._invite.code,
                name=name,
                nonce=nonce,
                protocol=PROTOCOL,
            )
            request = wire.AdmitRequest(
                request=seal(identity, "admission-request", body.SerializeToString(deterministic=True)).encoded
            )
            return stub.Admit(request, timeout=seconds)

        reply: wire.AdmitReply = await self._call(ask)
        decoder = MessageDecoder(self._invite.run, spec.owner_key, remember=1)
        ahead = time.time() - reply.time
        # Checked by the coordinator's clock, by which the admission was made; this machine's may be wrong.
        decoder.decode_admission_at(reply.admission, identity.key, float(reply.time))
        return GrantedAdmission(decoder.decode(reply.admission, Admission), usable_addresses(reply.addresses), ahead)

    async def status(self) -> SwarmStatus:
        """Return the status of the swarm. Raises CairnError."""
        request = wire.StatusRequest(run=bytes(self._invite.run))
        m: wire.StatusReply = await self._call(lambda stub, t: stub.Status(request, timeout=t))
        return SwarmStatus(
            _text(m.name), _text(m.health), _text(m.message, 400), m.round, Digest(m.head), Digest(m.state),
            m.state_round, m.tokens, m.total_tokens, _number(m.tokens_per_second), _number(m.loss),
            tuple(_peer(p) for p in m.peers),
            _text(m.page, 300), Digest(m.checkpoint) if m.checkpoint else None, m.checkpoint_round,
            m.final_round if m.HasField("final_round") else None,
            tuple(_round(r) for r in m.rounds[:20]), tuple(_number(x) for x in m.losses[:120]),
            tuple(AlertStatus(_text(a.name), a.since, _text(a.message, 600)) for a in m.alerts[:20]),
            tuple(_text(c, 600) for c in m.convictions[:8]), m.time,
            *(_text(t, 300) for t in (m.description, m.contact, m.license)),
        )  # fmt: skip

    async def totals(self, peer: PeerKey) -> PeerCredits:
        """Return a peer's totals; all zero for an unknown peer. Raises CairnError."""
        request = wire.AccountRequest(run=bytes(self._invite.run), peer=bytes(peer))
        m: wire.AccountReply = await self._call(lambda stub, t: stub.Account(request, timeout=t))
        return PeerCredits(m.micro_credits_settled, m.micro_credits_pending, m.rounds)

    async def publish_directive(self, sent: bytes = b"", base: bytes | None = None) -> wire.DirectiveReply:
        """Publish the owner's signed directive; without one, request the newest. Raises CairnError.

        With the digest of the `base` that it was made from (b"": none), it is refused if another one is the newest.
        """
        request = wire.DirectiveRequest(run=bytes(self._invite.run), directive=sent, base=base)
        reply: wire.DirectiveReply = await self._call(lambda stub, t: stub.PublishDirective(request, timeout=t))
        reply.wait = _text(reply.wait, 300)
        return reply

    async def bind(self, binding: bytes) -> int:
        """Hand in a signed binding; return the number of the account's peers after it. Raises CairnError."""
        request = wire.BindRequest(run=bytes(self._invite.run), binding=binding)
        reply: wire.BindReply = await self._call(lambda stub, t: stub.Bind(request, timeout=t))
        return reply.peers

    async def certificates(self, after: Digest, limit: int) -> tuple[Sequence[bytes], bool]:
        """Return certificates that follow a record, unverified, and whether there are more. Raises CairnError."""
        request = wire.CertificatesRequest(run=bytes(self._invite.run), after=after, limit=limit)
        reply: wire.CertificatesReply = await self._call(lambda stub, t: stub.Certificates(request, timeout=t))
        return list(reply.certificates), reply.more

    async def certificate(self, record: Digest) -> bytes | None:
        """Return the certificate of one record of any branch, unverified; None if it is not kept. Raises CairnError."""
        request = wire.CertificatesRequest(run=bytes(self._invite.run), record=record)
        reply: wire.CertificatesReply = await self._call(lambda stub, t: stub.Certificates(request, timeout=t))
        return reply.certificates[0] if reply.certificates else None

    # -- how they are made -----------------------------------------------------------------------------------

    async def _call(
        self, ask: Callable[[stubs.CoordinatorStub, float], Awaitable[T]], attempts: int | None = None
    ) -> T:
        """Return the first answer. Each address is tried `attempts` times, with growing pauses."""
        failures: dict[_Place, CairnError] = {}
        for attempt in range(attempts or self._attempts):
            if attempt:
                # Randomised, so that a swarm whose coordinator comes back does not call it all at once.
                await asyncio.sleep(min(4.0, 0.25 * 2**attempt) * random.uniform(0.5, 1.5))
            for place in sorted(self._places, key=lambda p: p != self._answered):
                if isinstance(failures.get(place), WrongCoordinator):
                    continue
                try:
                    reply = await self._ask(place, ask)
                except (CoordinatorUnreachable, WrongCoordinator) as e:
                    failures[place] = e
                    continue
                self._answered = place
                return reply
        if len(failures) == 1:
            raise next(iter(failures.values()))
        wrong = [e for e in failures.values() if isinstance(e, WrongCoordinator)]
        raise (wrong[0] if wrong else CoordinatorUnreachable("; ".join(str(e) for e in failures.values())))

    async def _ask(self, place: _Place, ask: Callable[[stubs.CoordinatorStub, float], Awaitable[T]]) -> T:
        channel, endpoint = await self._channel(place), place.endpoint
        try:
            return await ask(stubs.CoordinatorStub(channel), self._timeout)
        except grpc.aio.AioRpcError as e:
            said = _text(e.details() or "", 500)
            if e.code() not in _AGAIN:
                raise CoordinatorRefused(f"the coordinator at {endpoint} refused: {said or e.code().name}") from None
            if e.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise CoordinatorUnreachable(f"the coordinator at {endpoint} is busy: {said}") from None
            if said.startswith("the coordinator"):  # its own words, not gRPC's
                raise CoordinatorUnreachable(f"{said} ({endpoint})") from None
            await self._drop(place)
            raise _silent(endpoint, said) from None

    async def _channel(self, place: _Place) -> grpc.aio.Channel:
        async with self._opening[place]:
            if (channel := self._channels.get(place)) is None:
                endpoint, expected = place.endpoint, place.fingerprint
                # The system may look for a name for minutes, and tries each of its addresses for CONNECT_SECONDS.
                seconds = max(self._timeout, 6 * CONNECT_SECONDS)
                try:
                    async with async_timeout.timeout(seconds):
                        der = await asyncio.to_thread(server_certificate, endpoint)
                except asyncio.TimeoutError:
                    raise _silent(endpoint, f"no connection in {seconds:.0f} s") from None
                if sha256(der) != expected:
                    raise WrongCoordinator(
                        f"the coordinator at {endpoint} shows another certificate than the invite names "
                        f"({sha256(der).hex()[:16]}, not {expected.hex()[:16]}): the invite is old, or "
                        "someone answers in the coordinator's place; ask the run's owner for the current invite"
                    )
                _check_clock(endpoint, der, datetime.datetime.now(datetime.timezone.utc))
                pem = ssl.DER_cert_to_PEM_cert(der).encode()
                credentials = grpc.ssl_channel_credentials(root_certificates=pem)
                channel = grpc.aio.secure_channel(str(endpoint), credentials, options=_OPTIONS)
                self._channels[place] = channel
            return channel

    async def _drop(self, place: _Place) -> None:
        if (channel := self._channels.pop(place, None)) is not None:
            # Another call may use it, and ends by its own deadline.
            await channel.close(self._timeout)


def server_certificate(endpoint: HostPort) -> bytes:
    """Return the certificate (DER) that a server shows. It is only compared, not trusted.

    Raises CoordinatorUnreachable, WrongCoordinator.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with contextlib.closing(socket.create_connection((endpoint.host, endpoint.port), CONNECT_SECONDS)) as plain:
            with context.wrap_socket(plain, server_hostname=TLS_NAME) as tls:
                der = tls.getpeercert(binary_form=True)
    except socket.gaierror:
        raise CoordinatorUnreachable(
            f"the name {endpoint.host} does not resolve: check your network, and that the invite is current"
        ) from None
    except ssl.SSLError:
        raise WrongCoordinator(
            f"what answers at {endpoint} does not speak TLS: it is not a coordinator; ask the run's owner for the "
            "current invite"
        ) from None
    except OSError as e:
        raise _silent(endpoint, os_reason(e)) from None
    if not der or len(der) > MAX_CERTIFICATE:
        raise WrongCoordinator(f"what answers at {endpoint} shows no usable certificate: it is not a coordinator")
    return der


def _check_clock(endpoint: HostPort, der: bytes, now: datetime.datetime) -> None:
    """Raise WrongClock if the certificate is not valid now, WrongCoordinator if it cannot be read."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    except (ValueError, x509.InvalidVersion):
        raise WrongCoordinator(f"the certificate of the coordinator at {endpoint} cannot be read") from None
    if begins <= now <= ends:
        return
    which = f"not valid before {begins:%Y-%m-%d %H:%M}" if now < begins else f"valid until {ends:%Y-%m-%d %H:%M}"
    raise WrongClock(
        f"this machine's clock may be wrong: it says {now:%Y-%m-%d %H:%M} UTC, and the certificate of the coordinator "
        f"at {endpoint} is {which}: set the clock (for example with NTP), then try again"
    )


def _silent(endpoint: HostPort, why: str) -> CoordinatorUnreachable:
    return CoordinatorUnreachable(
        f"the coordinator at {endpoint} does not answer ({why or 'no reason given'}): is it running, and does "
        "a firewall let you through? Training among peers goes on without it"
    )


def _peer(m: wire.PeerStatus) -> PeerStatus:
    return PeerStatus(
        PeerKey(m.peer), _text(m.name), _text(m.phase), m.round, _number(m.loss), _number(m.tokens_per_second),
        m.bytes_up, m.bytes_down, m.micro_credits_settled, m.micro_credits_pending,
        Digest(m.head) if m.head else None, _number(m.seconds_since_heartbeat), _text(m.device),
    )  # fmt: skip


def _round(m: wire.RoundStatus) -> RoundStatus:
    absent = tuple(_text(n) for n in m.absent[:8])
    return RoundStatus(m.round, m.tokens, _number(m.loss), m.contributors, absent, m.absent_total, m.final)


def _text(text: str, top: int = 80) -> str:
    return printable(text, top)


def _number(value: float) -> float:
    if not math.isfinite(value):
        raise MalformedError("the coordinator's answer holds a number that is not finite: is it of another version?")
    return value


def usable_addresses(sent: Sequence[str]) -> tuple[str, ...]:
    """Return the multiaddresses that an invite may name. They are hints: others are dropped."""
    return tuple(a for a in sent[:MAX_ADDRESSES] if is_multiaddress(a))
