"""Receipts: the owner's signature on the fate of each update of a final round, accepted or not, and why.

A receipt is derived from the ledger by a deterministic signature: a repeated request, also after a restart, gets the
same bytes. Announced updates that a round left out are stored when its record is seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from coordinator.ledger import CreditedLine, Ledger, RefusedUpdate
from coordinator.ledger_thread import LedgerThread
from coordinator.swarm import AnnouncedUpdate, SwarmView
from protocol.bounded import BoundedDict
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey
from protocol.ledger.credits import RoundCredits
from protocol.ledger.statements import MAX_REASON, Receipt, sign
from protocol.spec import RunSpec

LOOK_BACK = 8
"""Newest rounds whose announced updates are checked: late ones arrive during the next round."""

AT_ONCE = 100
"""Refused updates written in one transaction."""

REMEMBERED = 20_000
"""Signed receipts kept in memory: about 8 MB."""


ReceiptStatus = Literal["pending", "settled", "voided", "not accepted"]


@dataclass(frozen=True, slots=True)
class ReceiptItem:
    """A receipt, its signed bytes (an envelope), and its status. `void_reason`: what voids it; "" if nothing does."""

    receipt: Receipt
    encoded: bytes
    status: ReceiptStatus
    void_reason: str = ""


@dataclass(frozen=True, slots=True)
class ReceiptPage:
    """Receipts, newest first. `next` is the `before` of the next page; None at the end."""

    items: tuple[ReceiptItem, ...]
    next: int | None


class Receipts:
    """Stores what rounds leave out, and makes receipts on request."""

    def __init__(self, spec: RunSpec, owner: Identity, view: SwarmView, ledger: LedgerThread, now: Callable[[], float]):
        self._run = spec.run_id
        self._hold = spec.credit.hold_rounds
        self._is_replayable = spec.audit.replayable
        self._owner = owner
        self._view = view
        self._ledger = ledger
        self._now = now
        self._noted: BoundedDict[tuple[Digest, Digest], None] = BoundedDict(REMEMBERED)
        self._signed: BoundedDict[tuple[Digest, Digest], tuple[Receipt, bytes]] = BoundedDict(REMEMBERED)

    async def note(self, newest: Sequence[RoundCredits]) -> None:
        """Store which announced updates these rounds (newest first) left out. Raises LedgerError."""
        refusals: list[RefusedUpdate] = []
        for credits in newest[:LOOK_BACK]:
            accepted = {line.peer: line.update for line in credits.lines}
            for announced in self._view.announced(credits.parent):
                header = announced.header
                key = (credits.record, header.digest)
                if accepted.get(header.author) == header.digest or key in self._noted:
                    continue
                reason = why_not(announced, credits, header.author in accepted, replayable=self._is_replayable)
                refusals.append(
                    RefusedUpdate(credits.round, credits.parent, credits.record, header.author, header.digest, reason,
                            self._now())
                )  # fmt: skip
        for i in range(0, len(refusals), AT_ONCE):
            some = refusals[i : i + AT_ONCE]
            await self._ledger.run(lambda ledger, some=some: [ledger.add_refusal(r) for r in some])
            self._noted.update(((r.record, r.update), None) for r in some)  # only now: a failed write is tried again

    async def page(self, peer: PeerKey, before: int | None, limit: int) -> ReceiptPage:
        """Return a peer's receipts, newest first, of rounds with numbers below `before`. Raises LedgerError."""

        def read(ledger: Ledger) -> tuple[list[CreditedLine], list[tuple[int, RefusedUpdate]]]:
            return ledger.history_of(peer, before, limit + 1), ledger.refused(peer, before, limit + 1)

        earned, refused = await self._ledger.read(read)
        found: list[tuple[int, CreditedLine | RefusedUpdate]] = [(e.number, e) for e in earned]
        found += refused
        found.sort(key=lambda pair: (-pair[0], isinstance(pair[1], RefusedUpdate), pair[1].update))
        # The receipts of one round are never split between two pages.
        taken = found[:limit]
        if len(found) > limit and found[limit][0] == taken[-1][0]:
            kept = [f for f in taken if f[0] != taken[-1][0]]
            taken = kept or [f for f in found if f[0] == taken[-1][0]]
        more = len(found) > len(taken)
        unsigned = {
            key: self._receipt(peer, number, what)
            for number, what in taken
            if (key := (what.record, what.update)) not in self._signed
        }
        if unsigned:  # a signature takes long enough to delay others
            receipts = list(unsigned.values())
            signed = await asyncio.to_thread(lambda: [sign(self._owner, r).encoded for r in receipts])
            self._signed.update(zip(unsigned, zip(receipts, signed, strict=True), strict=True))
        items = tuple(self._item(peer, number, what) for number, what in taken)
        return ReceiptPage(items, taken[-1][0] if more and taken and taken[-1][0] > 0 else None)

    def _item(self, peer: PeerKey, number: int, what: CreditedLine | RefusedUpdate) -> ReceiptItem:
        key = (what.record, what.update)
        made = self._signed.get(key)
        if made is None:
            receipt = self._receipt(peer, number, what)
            made = (receipt, sign(self._owner, receipt).encoded)
        self._signed.renew(key, made)
        if isinstance(what, RefusedUpdate):
            return ReceiptItem(*made, "not accepted")
        return ReceiptItem(*made, what.status, void_reason(what))

    def _receipt(self, peer: PeerKey, number: int, what: CreditedLine | RefusedUpdate) -> Receipt:
        if isinstance(what, RefusedUpdate):
            return Receipt(
                self._run, peer, what.round, what.record, what.update, False, what.reason, 0, 0, 0, number, 0
            )
        return Receipt(
            self._run, peer, what.round, what.record, what.update, True, "", what.line.windows, what.line.tokens,
            what.line.micro_credits, number, number + self._hold,
        )  # fmt: skip


def void_reason(line: CreditedLine) -> str:
    """Return what voids a credit line, for people; "" if nothing does."""
    if line.voided_in is None:
        return ""
    if line.convicted_for is None:
        return f"by the owner's verdict that round {line.voided_in} carries"
    return f"by the conviction in round {line.voided_in} for the update of round {line.convicted_for}"


def why_not(announced: AnnouncedUpdate, credits: RoundCredits, has_another: bool, *, replayable: bool) -> str:
    """Return the reason in a receipt, for people: at most MAX_REASON bytes."""
    if announced.header.author in credits.convicted:
        return "the record convicts this peer"
    if announced.flaw:
        return _cut(f"it breaks a rule of the chain: {announced.flaw}")
    if has_another:
        return "another update of this peer was accepted in this round"
    if announced.header.body.base_state != credits.base_state:
        return "it starts from another state than the round's: this peer's state had drifted"
    work = "its work is lost: this run is replayable" if replayable else "its work goes into this peer's next update"
    if announced.late:
        return f"it was announced when the round was decided already; {work}"
    return f"the round was certified without it: too few of the contributors held all of its bytes in time; {work}"


def _cut(text: str) -> str:
    data = text.encode()
    return text if len(data) <= MAX_REASON else data[: MAX_REASON - 3].decode(errors="ignore") + "..."
