"""The owner's signed order that one accepted update earns nothing, and why."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.checks import bounded, parsed
from protocol.envelope import Envelope, open_envelope, seal
from protocol.errors import MalformedError, SignatureError
from protocol.identity import Identity
from protocol.ids import MAX_ROUND, Digest, PeerKey, Round, RunId
from protocol.ledger.entries import MAX_VOID_ORDER
from protocol.messages import MAX_REASON
from protocol.wire import ledger_pb2 as wire

KIND = "void-order"


@dataclass(frozen=True, slots=True)
class VoidOrder:
    """The order that `update` (digest of a signed header) of `peer` earns nothing in the round of `record`."""

    run: RunId
    round: Round
    record: Digest
    peer: PeerKey
    update: Digest
    reason: str


def seal_void_order(owner: Identity, order: VoidOrder) -> Envelope:
    """Return the signed void order. Raises MalformedError when the reason is empty, too long or not for people."""
    _check_reason(order.reason)
    return seal(owner, KIND, _encode(order))


def open_void_order(encoded: bytes, run: RunId, owner: PeerKey) -> VoidOrder:
    """Return a void order of this run by its owner. Raises MalformedError, SignatureError."""
    envelope = open_envelope(encoded, KIND, limit=MAX_VOID_ORDER)
    if envelope.author != owner:
        raise SignatureError(f"a void order signed by {envelope.author.short}, who does not own the run")
    m = parsed(wire.VoidOrder(), envelope.payload)
    round_ = Round(bounded("round", m.round, MAX_ROUND))
    void_order = VoidOrder(RunId(m.run), round_, Digest(m.record), PeerKey(m.peer), Digest(m.update), m.reason)
    _check_reason(void_order.reason)
    if void_order.run != run:
        raise SignatureError(f"a void order on run {void_order.run.short}, not on {run.short}")
    if _encode(void_order) != envelope.payload:
        raise MalformedError("a void order is not in canonical form")
    return void_order


def _check_reason(reason: str) -> None:
    if not reason or len(reason.encode()) > MAX_REASON or not reason.isprintable():
        raise MalformedError(f"the reason of a void order is 1 to {MAX_REASON} bytes of printable text")


def _encode(v: VoidOrder) -> bytes:
    message = wire.VoidOrder(
        run=v.run, round=v.round, record=v.record, peer=v.peer, update=v.update, reason=v.reason
    )  # fmt: skip
    return message.SerializeToString(deterministic=True)
