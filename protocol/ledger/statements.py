"""Signed statements about credit: receipts by the owner, bindings by peers and accounts.

Each is opened by a function that verifies before it decodes, and refuses what its maker would not have written byte for
byte: one statement has one form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from protocol.checks import bounded, parsed, text
from protocol.envelope import claimed_author, open_envelope, seal
from protocol.errors import AdmissionError, MalformedError
from protocol.identity import Identity
from protocol.ids import MAX_ROUND, Digest, PeerKey, Round, RunId
from protocol.messages import MAX_REASON, Signed
from protocol.wire import ledger_pb2 as wire

MAX_ACCOUNT_NAME = 40


@dataclass(frozen=True, slots=True)
class Receipt:
    """The owner's statement about one update that was announced in a finalized round.

    `windows`, `tokens` and `micro_credits` are what was accepted: 0 when it was not, and then `reason` says why.
    `number` counts the final records before this one, on any branch. Credit settles when the final record with the
    number `pending_until` is there; that is 0 for what was not accepted.
    """

    run: RunId
    peer: PeerKey
    round: Round
    record: Digest
    update: Digest
    accepted: bool
    reason: str
    windows: int
    tokens: int
    micro_credits: int
    number: int
    pending_until: int


@dataclass(frozen=True, slots=True)
class BindPeer:
    """A peer's statement that its credits count for an account. `time` in unix seconds: the newest counts."""

    run: RunId
    account: PeerKey
    time: int


@dataclass(frozen=True, slots=True)
class BindAccount:
    """An account's statement that a peer is its own, with the account's name and team ("": none).

    `peer_statement`: the envelope of the peer's `BindPeer`.
    """

    run: RunId
    peer_statement: bytes
    time: int
    name: str
    team: str


T = TypeVar("T", Receipt, BindPeer, BindAccount)


@dataclass(frozen=True, slots=True)
class AccountBinding:
    """A binding that peer and account have signed.

    If a peer has several bindings, the one with the highest `precedence` counts. Times in unix seconds.
    """

    peer: PeerKey
    account: PeerKey
    name: str
    team: str
    peer_time: int
    account_time: int
    encoded: bytes

    @property
    def precedence(self) -> tuple[int, int]:
        """The peer's time decides first: an account cannot keep a peer that has gone to another."""
        return self.peer_time, self.account_time


def sign(identity: Identity, body: T) -> Signed[T]:
    """Return the signed statement. Raises MalformedError for one that others would refuse."""
    kind, limit, encode, decode = _KINDS[type(body)]
    e = seal(identity, kind, encode(body).SerializeToString(deterministic=True))
    if len(e.encoded) > limit or decode(e.payload) != body:
        raise MalformedError(f"this {kind} has no form on the wire: a text or a number is too large")
    return Signed(body, e.author, e.digest, e.encoded)


def open_receipt(encoded: bytes, run: RunId, owner: PeerKey) -> Signed[Receipt]:
    """Return a verified receipt. Raises MalformedError, SignatureError; AdmissionError when it is not the owner's."""
    return _open(encoded, Receipt, run, owner)


def open_bind_peer(encoded: bytes, run: RunId) -> Signed[BindPeer]:
    """Return a peer's consent to be bound to an account, which the account signs.

    Raises MalformedError, SignatureError.
    """
    return _open(encoded, BindPeer, run, None)


def open_binding(encoded: bytes, run: RunId) -> AccountBinding:
    """Return both statements, verified.

    Raises MalformedError, SignatureError; AdmissionError when they name different accounts.
    """
    outer = _open(encoded, BindAccount, run, None)
    inner = _open(outer.body.peer_statement, BindPeer, run, None)
    if inner.body.account != outer.author:
        raise AdmissionError(
            f"peer {inner.author.short} binds itself to account {inner.body.account.short}, not to "
            f"{outer.author.short}, which signs"
        )
    b = outer.body
    return AccountBinding(inner.author, outer.author, b.name, b.team, inner.body.time, b.time, outer.encoded)


def _open(encoded: bytes, body: type[T], run: RunId, by: PeerKey | None) -> Signed[T]:
    kind, limit, encode, decode = _KINDS[body]
    if by is not None and claimed_author(encoded, limit=limit) != by:
        raise AdmissionError(f"a {kind} that is not signed by the run's owner")
    e = open_envelope(encoded, kind, limit=limit)
    decoded = decode(e.payload)
    if encode(decoded).SerializeToString(deterministic=True) != e.payload:
        raise MalformedError(f"a {kind} that is not in canonical form")
    if decoded.run != run:
        raise MalformedError(f"a {kind} of another run ({decoded.run.short})")
    return Signed(decoded, e.author, e.digest, e.encoded)


# -- the forms on the wire -------------------------------------------------------------------------------------------


def _encode_receipt(b: Receipt) -> Message:
    return wire.Receipt(
        run=b.run, peer=b.peer, round=b.round, record=b.record, update=b.update, accepted=b.accepted, reason=b.reason,
        windows=b.windows, tokens=b.tokens, micro_credits=b.micro_credits, number=b.number,
        pending_until=b.pending_until,
    )  # fmt: skip


def _decode_receipt(payload: bytes) -> Receipt:
    m = parsed(wire.Receipt(), payload)
    receipt = Receipt(
        RunId(m.run), PeerKey(m.peer), Round(bounded("round", m.round, MAX_ROUND)), Digest(m.record), Digest(m.update),
        m.accepted, text("reason", m.reason, MAX_REASON), bounded("windows", m.windows), bounded("tokens", m.tokens),
        bounded("micro_credits", m.micro_credits), bounded("number", m.number),
        bounded("pending_until", m.pending_until),
    )  # fmt: skip
    if receipt.accepted == bool(receipt.reason):
        raise MalformedError("a receipt says why an update was not accepted, and nothing else")
    if not receipt.accepted and any((receipt.windows, receipt.tokens, receipt.micro_credits, receipt.pending_until)):
        raise MalformedError("a receipt for what was not accepted gives no credit")
    return receipt


def _encode_bind_peer(b: BindPeer) -> Message:
    return wire.BindPeer(run=b.run, account=b.account, time=b.time)


def _decode_bind_peer(payload: bytes) -> BindPeer:
    m = parsed(wire.BindPeer(), payload)
    return BindPeer(RunId(m.run), PeerKey(m.account), bounded("time", m.time))


def _encode_bind_account(b: BindAccount) -> Message:
    return wire.BindAccount(run=b.run, peer_statement=b.peer_statement, time=b.time, name=b.name, team=b.team)


def _decode_bind_account(payload: bytes) -> BindAccount:
    m = parsed(wire.BindAccount(), payload)
    name, team = text("name", m.name, MAX_ACCOUNT_NAME), text("team", m.team, MAX_ACCOUNT_NAME)
    if name != name.strip() or team != team.strip():
        raise MalformedError("a name neither begins nor ends with a space")
    return BindAccount(RunId(m.run), bytes(m.peer_statement), bounded("time", m.time), name, team)


_KINDS: dict[type, tuple[str, int, Callable[[Any], Message], Callable[[bytes], Any]]] = {
    Receipt: ("receipt", 640, _encode_receipt, _decode_receipt),
    BindPeer: ("bind-peer", 256, _encode_bind_peer, _decode_bind_peer),
    BindAccount: ("bind-account", 640, _encode_bind_account, _decode_bind_account),
}
"""For each statement: its kind on the wire, the largest envelope in bytes, how it is encoded and decoded."""

MAX_BINDING = _KINDS[BindAccount][1]
