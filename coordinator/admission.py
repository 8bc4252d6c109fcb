"""Admits peers: checks a signed request against the run's policy, and gives it the owner's signed admission."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from coordinator.errors import RefusedError, TooManyError, UnknownRunError
from coordinator.ledger import AdmissionRow
from coordinator.ledger_thread import LedgerThread
from protocol.envelope import open_envelope
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.ids import PeerKey, RunId
from protocol.invite import MAX_CODE, check_code
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import MAX_NAME, Admission, Signed
from protocol.spec import AdmissionSpec, RunSpec
from protocol.wire import coordinator_pb2 as wire

KIND = "admit"
MAX_REQUEST = 1024
CLOCK_TOLERANCE = 600
MAX_ADMISSIONS = 100_000
FORGET_AFTER = 30 * 86_400
"""An admission of a peer that earned nothing is forgotten so many seconds after its end."""

_FRESH = 0.9
"""A peer that asks again while so much of its admission is left gets the same one: asking costs no disk."""


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A verified request: who asks, for which run, when by its own clock, with which code, under which name."""

    peer: PeerKey
    run: RunId
    time: int
    code: str
    name: str


def open_request(sent: bytes) -> AdmissionRequest:
    """Verify, then decode. Raises MalformedError, SignatureError."""
    envelope = open_envelope(sent, KIND, limit=MAX_REQUEST)
    body = wire.AdmitBody()
    try:
        body.ParseFromString(envelope.payload)
    except DecodeError:
        raise MalformedError("the payload of an admit request does not parse") from None
    name = body.name.strip()
    if len(name.encode()) > MAX_NAME or not name.isprintable():
        raise MalformedError(f"a name is at most {MAX_NAME} bytes of printable text: choose a shorter one")
    check_code(body.code)
    return AdmissionRequest(envelope.author, RunId(body.run), body.time, body.code, name)


def check_clock(time: int, now: float) -> None:
    """Raises RefusedError, with the offset, when a peer's clock is off by more than CLOCK_TOLERANCE."""
    offset = time - now
    if abs(offset) > CLOCK_TOLERANCE:
        way = "ahead of" if offset > 0 else "behind"
        raise RefusedError(
            f"your clock is {abs(offset):.0f} s {way} the coordinator's: set it (for example with NTP), then try again"
        )


def check_policy(request: AdmissionRequest, policy: AdmissionSpec, codes: Sequence[str]) -> None:
    """Raises RefusedError unless the run's policy lets this peer in."""
    if policy.mode == "allow" and str(request.peer) not in policy.allow:
        raise RefusedError(
            f"this run admits only the keys on its list, and {request.peer} is not one: ask the run's owner to add it"
        )
    if policy.mode == "invite":
        # All codes are compared, each in constant time: how long it takes says nothing about any of them.
        good = [hmac.compare_digest(code.encode(), request.code.encode()) for code in codes]
        if not any(good):
            what = "the invite's code is not valid (any more)" if request.code else "this invite has no code"
            raise RefusedError(f"this run admits by invite, and {what}: ask the run's owner for a new invite")


def new_code() -> str:
    """An invite code that nobody guesses: 80 bits."""
    return secrets.token_hex(10)


class Admitter:
    """Admits and renews, and remembers whom. Names of peers are asked of it too."""

    def __init__(
        self, spec: RunSpec, owner: Identity, codes: Sequence[str], ledger: LedgerThread, now: Callable[[], float],
        refusal: Callable[[PeerKey], str | None] = lambda peer: None,
    ):  # fmt: skip
        """`refusal`: why the owner wants a peer no more; None when nothing is in its way."""
        for code in codes:
            check_code(code)
        if spec.admission.mode == "invite" and not any(codes):
            raise RefusedError(f"this run admits by invite: give at least one code of 1 to {MAX_CODE} characters")
        self._run = spec.run_id
        self._policy = spec.admission
        self._signer = KeySigner(owner)
        self._decoder = MessageDecoder(self._run, owner.key, remember=4096)
        self._codes = tuple(c for c in codes if c)
        self._ledger = ledger
        self._now = now
        self._refusal = refusal
        self._admitted: dict[PeerKey, AdmissionRow] = {}

    async def load(self) -> None:
        """Read whom the ledger's file knows. Raises LedgerError."""
        await self._ledger.run(lambda ledger: ledger.forget_admissions(int(self._now()) - FORGET_AFTER))
        self._admitted = {a.peer: a for a in await self._ledger.run(lambda ledger: ledger.admissions())}

    def name_of(self, peer: PeerKey) -> str:
        """What the peer is called, or the start of its key."""
        known = self._admitted.get(peer)
        return known.name if known and known.name else peer.short

    def knows(self, peer: PeerKey) -> bool:
        """Whether a peer was admitted (and is not forgotten yet)."""
        return peer in self._admitted

    @property
    def count(self) -> int:
        return len(self._admitted)

    async def admit(self, sent: bytes) -> Signed[Admission]:
        """The admission that a signed request gets; written down before it is given.

        Raises MalformedError, SignatureError, UnknownRunError, RefusedError, TooManyError, LedgerError.
        """
        request, now = open_request(sent), self._now()
        if request.run != self._run:
            raise UnknownRunError(f"this coordinator serves run {self._run.short}, not {request.run.short}")
        check_clock(request.time, now)
        if (why := self._refusal(request.peer)) is not None:
            raise RefusedError(why)
        check_policy(request, self._policy, self._codes)
        known = self._admitted.get(request.peer)
        if known and known.name == request.name and known.not_after - now >= _FRESH * self._policy.seconds:
            return self._decoder.open(known.sent, Admission)
        if known is None and len(self._admitted) >= MAX_ADMISSIONS:
            raise TooManyError("this run has admitted as many peers as it takes: try again tomorrow")
        start = int(now)
        body = Admission(self._run, request.peer, start, start + self._policy.seconds, request.name)
        signed = self._signer.sign(body)
        first_at = known.first_at if known else start
        admitted = AdmissionRow(request.peer, request.name, first_at, start, body.not_after, signed.sent)
        # Before the write, so that two requests at once do not pass the bound together.
        self._admitted[request.peer] = admitted
        await self._ledger.run(lambda ledger: ledger.add_admission(admitted))
        return signed
