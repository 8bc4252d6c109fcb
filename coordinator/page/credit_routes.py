"""The routes about credits: the log with its proofs, receipts, accounts, and all credits as a file. Read-only."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from coordinator.credits.export import CSV_TYPE, PARQUET_TYPE, ParquetMissingError
from coordinator.credits.log import CreditLog
from coordinator.credits.views import MAX_ENTRIES, MAX_PAGE, ReceiptItem
from coordinator.errors import LedgerError, TooManyError
from coordinator.page import json_view
from protocol.errors import MalformedError, ProtocolError
from protocol.ids import MAX_COUNT, PeerKey

IMMUTABLE = "public, max-age=31536000, immutable"
"""Caching of answers that never change: written entries, and proofs between two sizes."""


def credit_routes(log: CreditLog) -> list[Route]:
    """Return the routes /api/log/..., /api/receipts, /api/accounts/KEY, /api/export/credits.csv and .parquet."""

    async def head(request: Request) -> Response:
        before, limit = _optional(request, "before"), _whole(request, "limit", 1, 1, MAX_PAGE)
        heads = await log.heads(before, limit)
        return _json({"heads": [_b64(h) for h in heads]})

    async def entries(request: Request) -> Response:
        first, limit = _whole(request, "first", 0), _whole(request, "limit", MAX_ENTRIES, 1, MAX_ENTRIES)
        found, size = await log.entries(first, limit)
        whole = len(found) == limit
        return _json({"first": first, "size": size, "entries": [_b64(e) for e in found]}, immutable=whole)

    async def lines(request: Request) -> Response:
        first, limit = _whole(request, "first", 0), _whole(request, "limit", MAX_ENTRIES, 1, MAX_ENTRIES)
        found, following = await log.lines(first, limit)
        groups = [{"entry": g.entry, "lines": [_b64(line) for line in g.lines]} for g in found]
        return _json({"groups": groups, "next": following}, immutable=following == first + limit)

    async def inclusion(request: Request) -> Response:
        entry, size = _whole(request, "entry", None), _whole(request, "size", None)
        hashes = await log.inclusion(entry, size)
        return _json({"entry": entry, "size": size, "hashes": [h.hex() for h in hashes]}, immutable=True)

    async def consistency(request: Request) -> Response:
        first, second = _whole(request, "first", None), _whole(request, "second", None)
        hashes = await log.consistency(first, second)
        return _json({"first": first, "second": second, "hashes": [h.hex() for h in hashes]}, immutable=True)

    async def receipts(request: Request) -> Response:
        peer = PeerKey.parse(request.query_params.get("peer", ""))
        before, limit = _optional(request, "before"), _whole(request, "limit", 50, 1, MAX_PAGE)
        page = await log.receipts(peer, before, limit)
        return _json({"peer": str(peer), "receipts": [_receipt(i) for i in page.items], "next": page.next})

    async def account(request: Request) -> Response:
        summary = await log.summary(PeerKey.parse(request.path_params["key"]))
        return _json(json_view.credit_summary(summary) | {"rounds_total": log.rounds})

    async def export(request: Request) -> Response:
        form = request.path_params["form"]
        if form not in ("csv", "parquet"):
            return PlainTextResponse("there is credits.csv and credits.parquet\n", 404)
        pieces = log.export(form)
        try:
            first = await anext(pieces, b"")
        except ParquetMissingError as e:
            return PlainTextResponse(f"{e}\n", 501)
        headers = {"content-disposition": f'attachment; filename="credits.{form}"', "cache-control": "no-store"}
        kind = CSV_TYPE if form == "csv" else PARQUET_TYPE
        return StreamingResponse(_chained(first, pieces), headers=headers, media_type=kind)

    return [
        Route("/api/log/head", _guarded(head)),
        Route("/api/log/entries", _guarded(entries)),
        Route("/api/log/lines", _guarded(lines)),
        Route("/api/log/inclusion", _guarded(inclusion)),
        Route("/api/log/consistency", _guarded(consistency)),
        Route("/api/receipts", _guarded(receipts)),
        Route("/api/accounts/{key}", _guarded(account)),
        Route("/api/export/credits.{form}", _guarded(export)),
    ]


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
        "bytes": _b64(item.encoded),
    }


def _guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return the route with 400 for malformed requests, and 503 for a ledger that cannot be read."""

    async def guarded(request: Request) -> Response:
        try:
            return await answer(request)
        except ProtocolError as e:
            return PlainTextResponse(f"{e}\n", 400)
        except (LedgerError, TooManyError):
            return PlainTextResponse("the ledger cannot be read at this moment: try again\n", 503)

    return guarded


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


def _json(value: Any, *, immutable: bool = False) -> Response:
    headers = {"cache-control": IMMUTABLE if immutable else "no-store"}
    return Response(json_view.encode(value), headers=headers, media_type="application/json")


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _optional(request: Request, name: str) -> int | None:
    return None if request.query_params.get(name) is None else _whole(request, name, None)


def _whole(request: Request, name: str, default: int | None, low: int = 0, top: int = MAX_COUNT) -> int:
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 16 and low <= int(text) <= top):
        raise MalformedError(f"{name} must be a whole number from {low} to {top}")
    return int(text)
