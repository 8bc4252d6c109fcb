"""The calls about credits: receipts, the log with its proofs, accounts. Part of the gRPC service (`rpc`)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from coordinator.credits.views import MAX_CERTIFICATES, MAX_ENTRIES, MAX_PAGE, CreditLogProtocol
from coordinator.limits import Rate, RateLimit, caller_of
from protocol.envelope import author_of
from protocol.errors import MalformedError
from protocol.ids import MAX_COUNT, Digest, PeerKey
from protocol.ledger.statements import MAX_BINDING
from protocol.wire import coordinator_pb2 as wire

T = TypeVar("T")

BINDINGS = Rate(per_second=1, burst=30)
BINDINGS_OF_ONE = Rate(per_second=0.1, burst=20)
"""Of one account key at one address."""


class LogCalls:
    """A mixin of `rpc.Service`, which answers and counts; `_log` is what is answered from."""

    _log: Callable[[], CreditLogProtocol]
    _reads: RateLimit
    _answer: Callable[[str, Any, RateLimit, Callable[[], Awaitable[Any]]], Awaitable[Any]]
    _check_run: Callable[[bytes], None]

    def __init__(self):
        self._bindings = RateLimit(BINDINGS)
        self._bindings_of_one = RateLimit(BINDINGS_OF_ONE)

    async def Receipts(self, request: wire.ReceiptsRequest, context) -> wire.ReceiptsReply:
        async def work() -> wire.ReceiptsReply:
            before = _count(request.before) if request.before else None
            page = await self._log().receipts(PeerKey(request.peer), before, _limit(request.limit, MAX_PAGE))
            items = [wire.ReceiptItem(receipt=i.sent, status=i.status) for i in page.items]
            return wire.ReceiptsReply(receipts=items, next=page.next or 0)

        return await self._read("Receipts", request, context, work)

    async def TreeHead(self, request: wire.TreeHeadRequest, context) -> wire.TreeHeadReply:
        async def work() -> wire.TreeHeadReply:
            before = _count(request.before) if request.before else None
            return wire.TreeHeadReply(heads=await self._log().heads(before, _limit(request.limit or 1, MAX_PAGE)))

        return await self._read("TreeHead", request, context, work)

    async def Entries(self, request: wire.EntriesRequest, context) -> wire.EntriesReply:
        async def work() -> wire.EntriesReply:
            entries, size = await self._log().entries(_count(request.first), _limit(request.limit, MAX_ENTRIES))
            return wire.EntriesReply(entries=entries, size=size)

        return await self._read("Entries", request, context, work)

    async def Lines(self, request: wire.LinesRequest, context) -> wire.LinesReply:
        async def work() -> wire.LinesReply:
            found, following = await self._log().lines(_count(request.first), _limit(request.limit, MAX_ENTRIES))
            groups = [wire.EntryLines(entry=g.entry, lines=g.lines) for g in found]
            return wire.LinesReply(entries=groups, next=following)

        return await self._read("Lines", request, context, work)

    async def Inclusion(self, request: wire.InclusionRequest, context) -> wire.ProofReply:
        async def work() -> wire.ProofReply:
            return wire.ProofReply(hashes=await self._log().inclusion(_count(request.entry), _count(request.size)))

        return await self._read("Inclusion", request, context, work)

    async def Consistency(self, request: wire.ConsistencyRequest, context) -> wire.ProofReply:
        async def work() -> wire.ProofReply:
            return wire.ProofReply(hashes=await self._log().consistency(_count(request.first), _count(request.second)))

        return await self._read("Consistency", request, context, work)

    async def Bind(self, request: wire.BindRequest, context) -> wire.BindReply:
        async def work() -> wire.BindReply:
            self._check_run(request.run)
            # Before any signature is looked at, so the key is only claimed: counted with the address, as in Admit.
            caller = (caller_of(context.peer()), author_of(request.binding, limit=MAX_BINDING))
            self._bindings_of_one.take(caller, time.monotonic())
            return wire.BindReply(peers=await self._log().bind(request.binding))

        return await self._answer("Bind", context, self._bindings, work)

    async def Standing(self, request: wire.StandingRequest, context) -> wire.StandingReply:
        async def work() -> wire.StandingReply:
            log = self._log()
            v = await log.standing(PeerKey(request.key))
            return wire.StandingReply(
                key=request.key, kind=v.kind, name=v.name, team=v.team, account=v.account or b"",
                micro_credits_settled=v.settled, micro_credits_pending=v.pending, micro_credits_voided=v.voided,
                recent=v.recent, tokens=v.tokens, rounds=v.rounds, peers=v.peers, rounds_in_all=log.rounds,
            )  # fmt: skip

        return await self._read("Standing", request, context, work)

    async def Certificates(self, request: wire.CertificatesRequest, context) -> wire.CertificatesReply:
        async def work() -> wire.CertificatesReply:
            if request.record:
                one = await self._log().certificate(Digest(request.record))
                return wire.CertificatesReply(certificates=[] if one is None else [one])
            limit = _limit(request.limit, MAX_CERTIFICATES)
            found, more = await self._log().certificates(Digest(request.after), limit)
            return wire.CertificatesReply(certificates=found, more=more)

        return await self._read("Certificates", request, context, work)

    async def _read(self, method: str, request: Any, context: Any, work: Callable[[], Awaitable[T]]) -> T:
        async def checked() -> T:
            self._check_run(request.run)
            return await work()

        return await self._answer(method, context, self._reads, checked)


def _limit(asked: int, most: int) -> int:
    return min(asked or most, most)


def _count(value: int) -> int:
    if value > MAX_COUNT:
        raise MalformedError(f"{value} is larger than any number in a log: at most {MAX_COUNT}")
    return value
