"""The rounds that chaos posts: a pure function of their number, so that whoever checks knows what must be there."""

from __future__ import annotations

from functools import cache

from coordinator.ledger import AdmissionRow, RefusedUpdate
from protocol.chain import genesis_digest
from protocol.ids import Digest, Round, sha256
from protocol.ledger.credits import CreditRule, RoundCredits
from protocol.ledger.entries import CreditLine
from protocol.ledger.void_orders import VoidOrder, seal_void_order
from tests.support.coordinator_fakes import make_spec, peer
from tests.support.specs import OWNER

SPEC = make_spec(credit={"hold_rounds": 3})
RULE = CreditRule.of(SPEC)
PEERS = 8
VOIDED_EVERY = 3
"""The first line of every third round is voided in the transaction that posts it."""

_KEYS = sorted(peer(n).key for n in range(PEERS))


def record(round_: int) -> Digest:
    return Digest(sha256(b"chaos", round_.to_bytes(8, "big"))) if round_ >= 0 else genesis_digest(SPEC.run_id)


@cache
def account(round_: int) -> RoundCredits:
    """Three to six peers, of windows that differ."""
    lines = []
    for i, key in enumerate(_KEYS):
        if (round_ + i) % PEERS < 3 + round_ % 4:
            windows = 1000 + 10 * round_ + i
            update = Digest(sha256(record(round_), key))
            lines.append(CreditLine(key, update, windows, windows * RULE.window, RULE.micro_credits(windows)))
    return RoundCredits(Round(round_), record(round_), record(round_ - 1), Digest(bytes(32)), 3.0, tuple(lines))


@cache
def void_order(round_: int) -> bytes | None:
    """Return the owner's void order that voids the first line of some rounds; None for the others."""
    if round_ % VOIDED_EVERY:
        return None
    a = account(round_)
    line = a.lines[0]
    return seal_void_order(OWNER, VoidOrder(SPEC.run_id, a.round, a.record, line.peer, line.update, "chaos")).encoded


def admitted(number: int) -> AdmissionRow:
    key = Digest(sha256(b"admitted", number.to_bytes(8, "big")))
    return AdmissionRow(peer(0).key.__class__(key), f"p{number}", number, number, number + 10, b"sent %d" % number)


def refusal(number: int) -> RefusedUpdate:
    update = Digest(sha256(b"refused", number.to_bytes(8, "big")))
    return RefusedUpdate(Round(number), record(0), record(number), peer(0).key, update, "late", float(number))
