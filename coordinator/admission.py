"""Admits peers: checks a signed request against the run's policy, and answers with the owner's signed admission."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from coordinator.admission_table import NEW_KEYS, AdmissionTable
from coordinator.errors import RefusedError, TooManyError, UnknownRunError
from coordinator.ledger import AdmissionRow, Ledger
from coordinator.ledger_thread import LedgerThread
from coordinator.limits import WIDER
from coordinator.tasks import finish
from protocol.checks import PARSE_ERRORS, bounded
from protocol.envelope import open_envelope
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.ids import PeerKey, RunId
from protocol.invite import MAX_CODE, check_code
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import CLOCK_TOLERANCE, MAX_NAME, Admission, Signed
from protocol.plain_text import is_plain
from protocol.proof_of_work import is_proof
from protocol.spec import AdmissionSpec, RunSpec
from protocol.units import duration
from protocol.version import MAX_PROTOCOL, RELEASE, UPGRADE, mismatch
from protocol.wire import coordinator_pb2 as wire

KIND = "admission-request"
MAX_REQUEST = 1024
TEND_SECONDS = 60.0
"""Seconds between two calls of `Admitter.tend`."""

TRY_SECONDS = 0.009
"""One try of a proof of work, on one core of an Intel Xeon at 2.9 GHz."""

_FRESH = 0.9
"""Share of an admission's time: a peer that asks again while more is left gets the same one, which costs no write."""


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A verified request: peer, run, the peer's clock (unix seconds), invite code, name, nonce of the proof of work.

    `protocol`: the version of the protocol that the peer speaks.
    """

    peer: PeerKey
    run: RunId
    time: int
    code: str
    name: str
    nonce: int
    protocol: int


def cost_to_attackers(policy: AdmissionSpec) -> str:
    """Return, for the run's owner, how many keys an attacker can get admitted, and at what cost."""
    share = f"{NEW_KEYS} a day from each IPv4 address or IPv6 /64 ({NEW_KEYS * WIDER[48]} from a /48)"
    price = "at no cost"
    if policy.work_bits:
        price = f"for about {duration(TRY_SECONDS * 2**policy.work_bits)} of one core a key"
    return {
        "open": f"open: anybody gets in {price}, with many keys: {share}",
        "invite": f"by invite: anybody who is given the code, or whom it is passed on to, gets in {price}, with many "
        f"keys: {share}; serve with another --code to shut out those who are not in yet",
        "allow": f"by list: only the {len(policy.allow)} keys in admission.allow get in; an attacker needs the key "
        "file of one of them, and no key can be added later",
    }[policy.mode]


def open_request(sent: bytes) -> AdmissionRequest:
    """Verify and decode a request. Raises MalformedError, SignatureError."""
    envelope = open_envelope(sent, KIND, limit=MAX_REQUEST)
    body = wire.AdmissionRequest()
    try:
        body.ParseFromString(envelope.payload)
    except PARSE_ERRORS:
        raise MalformedError("the payload of an admit request does not parse") from None
    name = body.name.strip()
    if len(name.encode()) > MAX_NAME or not is_plain(name):
        raise MalformedError(f"a name is at most {MAX_NAME} bytes of printable text: choose a shorter one")
    check_code(body.code)
    protocol = bounded("protocol", body.protocol, MAX_PROTOCOL)
    return AdmissionRequest(envelope.author, RunId(body.run), body.time, body.code, name, body.nonce, protocol)


def check_protocol(spoken: int, run: int) -> None:
    """Raise RefusedError unless a peer speaks the run's version of the protocol."""
    if not spoken:
        raise RefusedError(f"the request does not state the protocol that its Cairn speaks: {UPGRADE}")
    if why := mismatch(run, spoken, "this peer", RELEASE):
        raise RefusedError(why)


def check_clock(time: int, now: float) -> None:
    """Raise RefusedError, with the offset, if a peer's clock is off by more than CLOCK_TOLERANCE."""
    offset = time - now
    if abs(offset) > CLOCK_TOLERANCE:
        way = "ahead of" if offset > 0 else "behind"
        raise RefusedError(
            f"your clock is {abs(offset):.0f} s {way} the coordinator's: set it (for example with NTP), then try "
            "again. If it is right, the coordinator's is wrong: tell the run's owner"
        )


def check_policy(request: AdmissionRequest, policy: AdmissionSpec, codes: Sequence[str]) -> None:
    """Raise RefusedError unless the run's policy admits this peer."""
    if policy.mode == "allow" and str(request.peer) not in policy.allow:
        raise RefusedError(
            f"this run admits only the keys on its list, and {request.peer} is not one: no key can be added later"
        )
    if policy.mode == "invite":
        # All codes are compared, each in constant time: the duration says nothing about any of them.
        good = [hmac.compare_digest(code.encode(), request.code.encode()) for code in codes]
        if not any(good):
            what = "the invite's code is not valid (any more)" if request.code else "this invite has no code"
            raise RefusedError(f"this run admits by invite, and {what}: ask the run's owner for a new invite")


class Admitter:
    """Admits peers, renews admissions, and stores them. It also knows the peers' names."""

    def __init__(
        self, spec: RunSpec, owner: Identity, codes: Sequence[str], ledger: LedgerThread, now: Callable[[], float],
        has_credits: Callable[[PeerKey], bool], has_recent_work: Callable[[PeerKey], bool],
        refusal: Callable[[PeerKey], str | None] = lambda peer: None,
    ):  # fmt: skip
        """Prepare; for `has_credits` and `has_recent_work` see `AdmissionTable`.

        `refusal` returns why the owner excludes a peer (None: no).
        """
        for code in codes:
            check_code(code)
        if spec.admission.mode == "invite" and not any(codes):
            raise RefusedError(f"this run admits by invite: give at least one code of 1 to {MAX_CODE} characters")
        self._run = spec.run_id
        self._protocol = spec.version
        self._policy = spec.admission
        self._signer = KeySigner(owner)
        self._decoder = MessageDecoder(self._run, owner.key, remember=4096)
        self._codes = tuple(c for c in codes if c)
        self._ledger = ledger
        self._now = now
        self._refusal = refusal
        self._table = AdmissionTable(has_credits, has_recent_work)
        self._storing: set[PeerKey] = set()
        """Peers whose admission is being written."""

        self._gone: list[PeerKey] = []
        """Peers that are forgotten here, and not yet in the ledger."""

    async def load(self) -> None:
        """Read the stored admissions. Raises LedgerError."""
        self._table.load(await self._ledger.run(lambda ledger: ledger.admissions()), self._now())

    async def tend(self, seen: Iterable[PeerKey]) -> None:
        """Note the peers that are in the swarm, and forget those that were not for too long.

        Raises LedgerError and TooManyError; the next call then takes up what is left.
        """
        self._table.note_seen(seen, self._now())
        gone = self._gone + self._table.forget_absent(self._now())
        self._gone = [peer for peer in gone if peer not in self._table]
        if gone := self._gone:
            await self._ledger.run(lambda ledger: ledger.forget_admissions(gone))
            self._gone = []

    def name_of(self, peer: PeerKey) -> str:
        """Return the peer's name for people: see `ChosenNames.shown`."""
        return self._table.names.shown(peer)

    def knows(self, peer: PeerKey) -> bool:
        """Return whether a peer was admitted (and is not forgotten yet)."""
        return peer in self._table

    @property
    def count(self) -> int:
        return len(self._table)

    async def admit(self, sent: bytes, caller: str) -> Signed[Admission]:
        """Return the admission for a signed request (an envelope); it is stored first.

        `caller` is the network that it came from (`limits.caller_of`).

        Raises MalformedError, SignatureError, UnknownRunError, RefusedError, TooManyError, LedgerError.
        """
        request, now = open_request(sent), self._now()
        if request.run != self._run:
            raise UnknownRunError(f"this coordinator serves run {self._run.short}, not {request.run.short}")
        check_protocol(request.protocol, self._protocol)
        check_clock(request.time, now)
        if (why := self._refusal(request.peer)) is not None:
            raise RefusedError(why)
        known = self._table.get(request.peer)
        if known is None:  # a new code shuts out those who are not in yet: a ban is for the others
            check_policy(request, self._policy, self._codes)
        await self._check_work(request)
        if request.peer in self._storing:  # to take both back would leave the first, which is not stored
            raise TooManyError("an admission of this key is being stored: try again in 5 s")
        known = self._table.get(request.peer)
        if known and known.name == request.name and known.not_after - now >= _FRESH * self._policy.seconds:
            return self._decoder.decode(known.encoded, Admission)
        start = int(now)
        body = Admission(self._run, request.peer, start, start + self._policy.seconds, request.name)
        signed = self._signer.sign(body)
        first_at = known.first_at if known else start
        admitted = AdmissionRow(request.peer, request.name, first_at, start, body.not_after, signed.encoded)
        # Before the write, so that two concurrent requests do not pass the limits together.
        displaced = self._table.add(admitted, caller, now)
        self._storing.add(request.peer)

        def write(ledger: Ledger) -> None:
            ledger.forget_admissions([row.peer for row in displaced])
            ledger.add_admission(admitted)

        async def store() -> None:
            try:
                await self._ledger.run(write)
            except BaseException:
                self._table.take_back(admitted, known, displaced, caller, now)
                raise
            finally:
                self._storing.discard(request.peer)

        await finish(store())  # the table follows the ledger, though the caller goes away
        return signed

    async def _check_work(self, request: AdmissionRequest) -> None:
        """Raise RefusedError unless a key that is new here brings its proof of work."""
        bits = self._policy.work_bits
        if not bits or request.peer in self._table:
            return
        if not await asyncio.to_thread(is_proof, request.run, request.peer, request.nonce, bits):
            raise RefusedError(
                f"this run asks of a new key for a proof of work of {bits} bits, and this request has none that is "
                "right: `cairn peer join` of this version finds one"
            )
