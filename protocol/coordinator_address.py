"""The signed record of a coordinator's address, which members store and pass on.

An invite names the address that the coordinator had when it was published. The coordinator may move: whoever finds it
gone asks any member, and accepts the newest record that the run's owner signed. A member can withhold it or give an old
one; it cannot forge one, and an old one leads to an address where nobody shows the right certificate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from protocol.checks import bounded, check_canonical, parsed
from protocol.envelope import open_envelope, seal
from protocol.errors import AdmissionError, MalformedError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, RunId
from protocol.invite import MAX_COORDINATORS, MAX_SWARM_ADDRESSES, HostPort
from protocol.messages import MAX_ADDRESS, Signed
from protocol.wire import swarm_pb2 as wire

KIND = "coordinator-address"
MAX_COORDINATOR_ADDRESS_ENVELOPE = 4096
"""No envelope of this kind is larger, in bytes."""

_MAX_ENDPOINT = 270
_BEGINNING = bytes([0x0A, len(KIND)]) + KIND.encode()


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """The places at which the coordinator can be reached.

    `sequence`: unix milliseconds, and more than in any record before it. `fingerprint`: SHA-256 of the TLS certificate
    (DER) that is shown at the `coordinators`. `addresses`: multiaddresses of its observer in the swarm.
    """

    run: RunId
    sequence: int
    coordinators: tuple[HostPort, ...]
    fingerprint: Digest
    addresses: tuple[str, ...] = ()


def is_coordinator_address(encoded: bytes) -> bool:
    """Return whether an envelope claims to be of this kind, by its first bytes."""
    return encoded.startswith(_BEGINNING)


def sign_coordinator_address(owner: Identity, body: CoordinatorAddress) -> Signed[CoordinatorAddress]:
    """Return the signed record, rounded as others will read it.

    Raises MalformedError for one that they would refuse.
    """
    encoded = seal(owner, KIND, _encode(body).SerializeToString(deterministic=True)).encoded
    return open_coordinator_address(encoded, body.run, owner.key)


def open_coordinator_address(encoded: bytes, run: RunId, owner: PeerKey) -> Signed[CoordinatorAddress]:
    """Return the verified record.

    Raises MalformedError, SignatureError; AdmissionError when it is not the owner's.
    """
    body: Any = _check_claims(encoded, run, owner)  # a body of its own beside those of `messages`
    e = open_envelope(encoded, KIND, limit=MAX_COORDINATOR_ADDRESS_ENVELOPE)
    return Signed(body, e.author, e.digest, e.encoded)


def open_if_newer(
    encoded: bytes, run: RunId, owner: PeerKey, than: Signed[CoordinatorAddress] | None
) -> Signed[CoordinatorAddress] | None:
    """Open a record if it is newer than the given one. For an older one return None, without a signature check."""
    if than is not None:
        if encoded == than.encoded:
            return None
        if _check_claims(encoded, run, owner).sequence <= than.body.sequence:
            return None
    return open_coordinator_address(encoded, run, owner)


def next_coordinator_address(
    owner: Identity, newest: Signed[CoordinatorAddress] | None, present: CoordinatorAddress
) -> Signed[CoordinatorAddress]:
    """Return the coordinator's newest record while nothing has changed, else a newer one that names what is `present`.

    `present.sequence` is the clock's (unix milliseconds). If the clock went backwards, the newest record's plus one.
    """
    if newest is not None:
        if replace(present, sequence=newest.body.sequence) == newest.body:
            return newest
        present = replace(present, sequence=max(present.sequence, newest.body.sequence + 1))
    return sign_coordinator_address(owner, present)


def newest_address(found: Sequence[Signed[CoordinatorAddress]]) -> Signed[CoordinatorAddress] | None:
    """Return the newest of several records; None if there are none."""
    return max(found, key=lambda s: s.body.sequence, default=None)


def _check_claims(encoded: bytes, run: RunId, owner: PeerKey) -> CoordinatorAddress:
    """Return the unverified claims of an envelope, only to refuse it cheaply."""
    if len(encoded) > MAX_COORDINATOR_ADDRESS_ENVELOPE:
        raise MalformedError(
            f"a {KIND} message of {len(encoded)} bytes: at most {MAX_COORDINATOR_ADDRESS_ENVELOPE} are accepted"
        )
    m = parsed(wire.Envelope(), encoded)
    if m.kind != KIND:
        raise MalformedError(f"a message of kind {m.kind[:32]!r} where {KIND!r} was expected")
    if m.key != owner:
        raise AdmissionError(f"a {KIND} message that is not signed by the run's owner")
    return _decode(m.payload, run)


def _encode(body: CoordinatorAddress) -> wire.CoordinatorAddress:
    return wire.CoordinatorAddress(
        run=body.run, sequence=body.sequence, coordinators=[str(e) for e in body.coordinators],
        fingerprint=body.fingerprint, addresses=body.addresses,
    )  # fmt: skip


def _decode(payload: bytes, run: RunId) -> CoordinatorAddress:
    m = parsed(wire.CoordinatorAddress(), payload)
    if bytes(m.run) != run:
        raise MalformedError(f"a {KIND} message of another run")
    if not 1 <= len(m.coordinators) <= MAX_COORDINATORS or len(m.addresses) > MAX_SWARM_ADDRESSES:
        raise MalformedError(
            f"a {KIND} message names 1 to {MAX_COORDINATORS} coordinators and at most {MAX_SWARM_ADDRESSES} addresses"
        )
    if any(len(text) > _MAX_ENDPOINT for text in m.coordinators):
        raise MalformedError(f"a {KIND} message with an address that is too long")
    for address in m.addresses:
        if not (
            address.startswith("/") and address.isascii() and address.isprintable() and len(address) <= MAX_ADDRESS
        ):
            raise MalformedError(f"{address[:80]!r} is not a multiaddress")
    body = CoordinatorAddress(
        run, bounded("sequence", m.sequence), tuple(HostPort.parse(text) for text in m.coordinators),
        Digest(m.fingerprint), tuple(m.addresses),
    )  # fmt: skip
    check_canonical(KIND, _encode(body), payload)
    return body
