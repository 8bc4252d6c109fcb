"""A peer's binding to an account, of which the test has both keys."""

from __future__ import annotations

from protocol.identity import Identity
from protocol.ids import RunId
from protocol.ledger.statements import AccountBinding, BindAccount, BindPeer, open_binding, sign


def bind(peer: Identity, account: Identity, run: RunId, time: int, name: str, team: str = "") -> AccountBinding:
    """Return both statements, signed. Raises MalformedError for names that are too long or not printable."""
    inner = sign(peer, BindPeer(run, account.key, time))
    return open_binding(sign(account, BindAccount(run, inner.encoded, time, name, team)).encoded, run)
