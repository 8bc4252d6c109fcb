"""The rounds that chaos posts: a pure function of their number, so that whoever checks knows what must be there."""

from __future__ import annotations

from functools import cache

from coordinator.ledger import AdmissionRow, RefusedUpdate
from protocol.chain import genesis_digest
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.ledger.credits import CreditRule, RoundCredits
from protocol.messages import Verdict
from tests.support.coordinator_fakes import make_spec, peer

SPEC = make_spec(credit={"hold_rounds": 3})
RULE = CreditRule.of(SPEC)
PEERS = 8
VOIDED_EVERY = 3
"""The first line of every third round is voided by a verdict that the next round carries."""

_KEYS = sorted(peer(n).key for n in range(PEERS))


def record(round_: int) -> Digest:
    return Digest(sha256(b"chaos", round_.to_bytes(8, "big"))) if round_ >= 0 else genesis_digest(SPEC.run_id)


@cache
def round_credits(round_: int) -> RoundCredits:
    """Three to six peers, of windows that differ."""
    lines = []
    for i, key in enumerate(_KEYS):
        if (round_ + i) % PEERS < 3 + round_ % 4:
            windows = 1000 + 10 * round_ + i
            update = Digest(sha256(record(round_), key))
            lines.append(RULE.line(key, update, windows))
    return RoundCredits(
        Round(round_), record(round_), record(round_ - 1), Digest(bytes(32)), 3.0, tuple(lines), verdicts_on(round_ - 1)
    )


def verdicts_on(round_: int) -> tuple[Verdict, ...]:
    """Return the verdict on the first line of some rounds; none on the others."""
    if round_ < 0 or round_ % VOIDED_EVERY:
        return ()
    c = round_credits(round_)
    return (Verdict(c.record, c.lines[0].peer, "chaos"),)


def admitted(number: int) -> AdmissionRow:
    key = Digest(sha256(b"admitted", number.to_bytes(8, "big")))
    return AdmissionRow(peer(0).key.__class__(key), f"p{number}", number, number, number + 10, b"sent %d" % number)


def refused_peer(number: int) -> PeerKey:
    """Return another peer for each update, since the ledger keeps only the newest ones of a peer."""
    return PeerKey(sha256(b"refused peer", number.to_bytes(8, "big")))


def refusal(number: int) -> RefusedUpdate:
    update = Digest(sha256(b"refused", number.to_bytes(8, "big")))
    return RefusedUpdate(Round(number), record(0), record(number), refused_peer(number), update, "late", float(number))
