"""The ledger's entries and lines as bytes: one way to write each, strictly read and bounded.

The hash is over the written bytes, so reading accepts exactly the bytes that writing makes. Messages are in
protocol/wire/ledger.proto; their effects are in `state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from protocol.checks import bounded, parsed
from protocol.envelope import MAX_ENVELOPE
from protocol.errors import MalformedError
from protocol.ids import MAX_ROUND, Digest, PeerKey, Round, RunId, sha256
from protocol.ledger.credits import CreditLine as CreditLine
from protocol.merkle import leaf_hash, tree_hash
from protocol.messages import MAX_CONTRIBUTORS
from protocol.wire import ledger_pb2 as wire

MAX_LINE = 128
"""Bytes of a line: two digests, three counts."""

MAX_VOID_ORDER = 1024
"""Bytes of the envelope of a void order."""

MAX_ENTRY = MAX_ENVELOPE + 1024
"""Bytes of an entry: the largest carries a directive."""


@dataclass(frozen=True, slots=True)
class RoundEntry:
    """A finalized round: issuance -> pending of each contributor. `lines_root` is the tree hash over its lines."""

    round: Round
    record: Digest
    parent: Digest
    lines_root: Digest
    count: int
    micro_credits: int


@dataclass(frozen=True, slots=True)
class SettleEntry:
    """All lines of the round entry `entry` that were not voided: pending -> settled."""

    entry: int
    count: int
    micro_credits: int


@dataclass(frozen=True, slots=True)
class VoidEntry:
    """One line of the round entry `entry`, by a void order of the owner: pending -> voided."""

    entry: int
    line: int
    micro_credits: int
    void_order: bytes


@dataclass(frozen=True, slots=True)
class RollbackEntry:
    """The owner took the run back to a record that is in the ledger: the next round entry is its child."""

    record: Digest
    round: Round
    directive: bytes


EntryPayload = RoundEntry | SettleEntry | VoidEntry | RollbackEntry

KINDS: dict[type, str] = {RoundEntry: "round", SettleEntry: "settle", VoidEntry: "void", RollbackEntry: "rollback"}


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """An entry of the log: its place, the leaf hash of the one before, unix milliseconds, and its payload."""

    run: RunId
    sequence: int
    previous: Digest
    time: int
    payload: EntryPayload

    @property
    def kind(self) -> str:
        """One of "round", "settle", "void" and "rollback"."""
        return KINDS[type(self.payload)]


def genesis_leaf(run: RunId) -> Digest:
    """Return the predecessor that the first entry of a run's log names."""
    return Digest(sha256(b"cairn/v1/ledger", run))


def lines_root(lines: Sequence[CreditLine]) -> Digest:
    """Return the Merkle tree hash over a round's credit lines, in the record's order."""
    return tree_hash([leaf_hash(encode_line(line)) for line in lines])


# -- writing -------------------------------------------------------------------------------------------------


def encode_line(line: CreditLine) -> bytes:
    """Return the canonical bytes of a credit line."""
    message = wire.CreditLine(
        peer=line.peer, update=line.update, windows=line.windows, tokens=line.tokens, micro_credits=line.micro_credits
    )
    return message.SerializeToString(deterministic=True)


def encode_entry(entry: LedgerEntry) -> bytes:
    """Return the canonical bytes of an entry."""
    message = wire.LedgerEntry(run=entry.run, sequence=entry.sequence, previous=entry.previous, time=entry.time)
    what = entry.payload
    if isinstance(what, RoundEntry):
        message.round.CopyFrom(
            wire.RoundEntry(
                round=what.round, record=what.record, parent=what.parent, lines_root=what.lines_root,
                count=what.count, micro_credits=what.micro_credits,
            )
        )  # fmt: skip
    elif isinstance(what, SettleEntry):
        message.settle.CopyFrom(wire.SettleEntry(entry=what.entry, count=what.count, micro_credits=what.micro_credits))
    elif isinstance(what, VoidEntry):
        message.void.CopyFrom(
            wire.VoidEntry(
                entry=what.entry, line=what.line, micro_credits=what.micro_credits, void_order=what.void_order
            )
        )  # fmt: skip
    else:
        message.rollback.CopyFrom(wire.RollbackEntry(record=what.record, round=what.round, directive=what.directive))
    return message.SerializeToString(deterministic=True)


# -- reading -------------------------------------------------------------------------------------------------


def decode_line(encoded: bytes) -> CreditLine:
    """Raise MalformedError for anything but what `encode_line` writes of a line within bounds."""
    m = _parsed(wire.CreditLine(), encoded, "a line", MAX_LINE)
    if not m.windows or not m.tokens:
        raise MalformedError("a line of the ledger covers at least one window")
    line = CreditLine(
        PeerKey(m.peer), Digest(m.update), bounded("windows", m.windows), bounded("tokens", m.tokens),
        bounded("micro-credits", m.micro_credits),
    )  # fmt: skip
    if encode_line(line) != encoded:
        raise MalformedError("a line of the ledger is not in canonical form")
    return line


def decode_entry(encoded: bytes) -> LedgerEntry:
    """Raise MalformedError for anything but what `encode_entry` writes of an entry within bounds."""
    m = _parsed(wire.LedgerEntry(), encoded, "an entry", MAX_ENTRY)
    kind = m.WhichOneof("payload")
    if kind is None:
        raise MalformedError("an entry of the ledger that says nothing")
    sequence, time = bounded("sequence", m.sequence), bounded("time", m.time)
    entry = LedgerEntry(RunId(m.run), sequence, Digest(m.previous), time, _READ[kind](getattr(m, kind)))
    if encode_entry(entry) != encoded:
        raise MalformedError("an entry of the ledger is not in canonical form")
    return entry


def _round(m: wire.RoundEntry) -> RoundEntry:
    if not 1 <= m.count <= MAX_CONTRIBUTORS:
        raise MalformedError(f"a round has 1 to {MAX_CONTRIBUTORS} lines, not {m.count}")
    return RoundEntry(
        Round(bounded("round", m.round, MAX_ROUND)), Digest(m.record), Digest(m.parent), Digest(m.lines_root), m.count,
        bounded("micro-credits", m.micro_credits),
    )  # fmt: skip


def _settle(m: wire.SettleEntry) -> SettleEntry:
    count = bounded("settled lines", m.count, MAX_CONTRIBUTORS)
    return SettleEntry(bounded("entry", m.entry), count, bounded("micro-credits", m.micro_credits))


def _void(m: wire.VoidEntry) -> VoidEntry:
    if not 1 <= len(m.void_order) <= MAX_VOID_ORDER:
        raise MalformedError(f"a void order of {len(m.void_order)} bytes: want 1 to {MAX_VOID_ORDER}")
    return VoidEntry(
        bounded("entry", m.entry), bounded("line", m.line, MAX_CONTRIBUTORS - 1),
        bounded("micro-credits", m.micro_credits), bytes(m.void_order),
    )  # fmt: skip


def _rollback(m: wire.RollbackEntry) -> RollbackEntry:
    if not 1 <= len(m.directive) <= MAX_ENVELOPE:
        raise MalformedError(f"a directive of {len(m.directive)} bytes: want 1 to {MAX_ENVELOPE}")
    return RollbackEntry(Digest(m.record), Round(bounded("round", m.round, MAX_ROUND)), bytes(m.directive))


_READ = {"round": _round, "settle": _settle, "void": _void, "rollback": _rollback}

M = TypeVar("M", bound=Message)


def _parsed(message: M, encoded: bytes, name: str, limit: int) -> M:
    if len(encoded) > limit:
        raise MalformedError(f"{name} of the ledger of {len(encoded)} bytes: at most {limit} are accepted")
    return parsed(message, encoded)
