"""The API about credits: the log with its proofs, receipts, accounts, and all credits as a file. Read-only."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from coordinator.credits.export import CSV_TYPE, PARQUET_TYPE, ParquetMissingError
from coordinator.credits.log import CreditLog
from coordinator.credits.views import MAX_ENTRIES, MAX_PAGE, ReceiptItem
from coordinator.errors import LedgerError, TooManyError
from coordinator.page import json_view
from coordinator.page import schemas as s
from coordinator.page.endpoints import UNREADABLE, ApiEndpoint, Immutable, Parameter
from protocol.ids import PeerKey


async def _heads(log: CreditLog, before: int | None, limit: int) -> dict[str, Any]:
    return {"heads": [_b64(h) for h in await log.heads(before, limit)]}


async def _entries(log: CreditLog, first: int, limit: int) -> dict[str, Any]:
    found, size = await log.entries(first, limit)
    answer = {"first": first, "size": size, "entries": [_b64(e) for e in found]}
    return Immutable(answer) if len(found) == limit else answer


async def _lines(log: CreditLog, first: int, limit: int) -> dict[str, Any]:
    found, following = await log.lines(first, limit)
    groups = [{"entry": g.entry, "lines": [_b64(line) for line in g.lines]} for g in found]
    answer = {"groups": groups, "next": following}
    return Immutable(answer) if following == first + limit else answer


async def _inclusion(log: CreditLog, entry: int, size: int) -> dict[str, Any]:
    hashes = await log.inclusion(entry, size)
    return Immutable({"entry": entry, "size": size, "hashes": [h.hex() for h in hashes]})


async def _consistency(log: CreditLog, first: int, second: int) -> dict[str, Any]:
    hashes = await log.consistency(first, second)
    return Immutable({"first": first, "second": second, "hashes": [h.hex() for h in hashes]})


async def _receipts(log: CreditLog, peer: PeerKey, before: int | None, limit: int) -> dict[str, Any]:
    page = await log.receipts.page(peer, before, limit)
    return {"peer": str(peer), "receipts": [_receipt(i) for i in page.items], "next": page.next}


async def _account(log: CreditLog, key: PeerKey) -> dict[str, Any]:
    return json_view.credit_summary(log.leaderboard.of(key)) | {"rounds_total": log.leaderboard.rounds}


def _receipt(item: ReceiptItem) -> dict[str, Any]:
    r = item.receipt
    return {
        "round": r.round,
        "record": str(r.record),
        "update": str(r.update),
        "accepted": r.accepted,
        "reason": r.reason,
        "windows": r.windows,
        "tokens": r.tokens,
        "micro_credits": r.micro_credits,
        "entry": r.entry,
        "line": r.line,
        "pending_until": r.pending_until,
        "status": item.status,
        "bytes": _b64(item.sent),
    }


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


_HASHES = s.many({"type": "string", "pattern": "^[0-9a-f]{64}$"})
_ENTRIES = (
    Parameter("first", "the first entry", 0),
    Parameter("limit", "maximum number", MAX_ENTRIES, 1, MAX_ENTRIES),
)

CREDIT_ENDPOINTS: tuple[ApiEndpoint, ...] = (
    ApiEndpoint(
        "/api/log/head",
        "Signed tree heads (RFC 9162), newest first: envelopes of the owner",
        s.of({"heads": s.many(s.BASE64)}),
        _heads,
        (Parameter("before", "only heads over fewer entries"), Parameter("limit", "maximum number", 1, 1, MAX_PAGE)),
        seconds=0,
    ),
    ApiEndpoint(
        "/api/log/entries",
        "Entries of the log, as their bytes were written and hashed",
        s.of({"first": s.COUNT, "size": s.COUNT, "entries": s.many(s.BASE64)}),
        _entries,
        _ENTRIES,
        seconds=0,
    ),
    ApiEndpoint(
        "/api/log/lines",
        "The credit lines of the round entries in a range: the leaves under their lines_root",
        s.of({"groups": s.many(s.of({"entry": s.COUNT, "lines": s.many(s.BASE64)})), "next": s.COUNT}),
        _lines,
        _ENTRIES,
        seconds=0,
    ),
    ApiEndpoint(
        "/api/log/inclusion",
        "The proof that an entry is in the log of a size",
        s.of({"entry": s.COUNT, "size": s.COUNT, "hashes": _HASHES}),
        _inclusion,
        (Parameter("entry", "the entry", required=True), Parameter("size", "the log's size", required=True)),
        seconds=0,
    ),
    ApiEndpoint(
        "/api/log/consistency",
        "The proof that the log of one size extends that of another",
        s.of({"first": s.COUNT, "second": s.COUNT, "hashes": _HASHES}),
        _consistency,
        (Parameter("first", "the smaller size", required=True), Parameter("second", "the larger size", required=True)),
        seconds=0,
    ),
    ApiEndpoint(
        "/api/receipts",
        "A peer's receipts, newest first",
        s.of({"peer": s.KEY, "receipts": s.many(s.RECEIPT), "next": s.maybe(s.COUNT)}),
        _receipts,
        (
            Parameter("peer", "the peer's key", key=True, required=True),
            Parameter("before", "only entries before this one (`next` of the page before)"),
            Parameter("limit", "maximum number", 50, 1, MAX_PAGE),
        ),
        seconds=0,
    ),
    ApiEndpoint(
        "/api/accounts/{key}",
        "The totals of an account, or of a peer",
        s.of(s.LEADER["properties"] | {"rounds_total": s.COUNT}),
        _account,
        (Parameter("key", "the account's or the peer's key", key=True, in_path=True),),
        seconds=0,
    ),
)


def credit_routes(log: CreditLog) -> list[Route]:
    """Return the routes of CREDIT_ENDPOINTS, and /api/export/credits.csv and .parquet."""

    async def export(request: Request) -> Response:
        form = request.path_params["form"]
        if form not in ("csv", "parquet"):
            return PlainTextResponse("there is credits.csv and credits.parquet\n", 404)
        pieces = log.export(form)
        try:
            first = await anext(pieces, b"")
        except ParquetMissingError as e:
            return PlainTextResponse(f"{e}\n", 501)
        except (LedgerError, TooManyError):
            return PlainTextResponse(UNREADABLE, 503, {"retry-after": "5"})
        headers = {"content-disposition": f'attachment; filename="credits.{form}"', "cache-control": "no-store"}
        kind = CSV_TYPE if form == "csv" else PARQUET_TYPE
        return StreamingResponse(_chained(first, pieces), headers=headers, media_type=kind)

    return [*(e.route(log) for e in CREDIT_ENDPOINTS), Route("/api/export/credits.{form}", export)]


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece
