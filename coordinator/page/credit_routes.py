"""The API about credits: rounds, receipts, accounts, and all credits as a file. Read-only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from coordinator.credits.export import CSV_TYPE, MAX_ROUNDS, PARQUET_TYPE, ParquetMissingError
from coordinator.credits.log import CreditLog
from coordinator.credits.receipts import ReceiptItem
from coordinator.errors import LedgerError, TooManyError
from coordinator.limits import ConcurrencyLimit
from coordinator.page import json_view
from coordinator.page import schemas as s
from coordinator.page.endpoints import UNREADABLE, ApiEndpoint, Parameter
from coordinator.page.response_limits import LimitedEndpoint
from protocol.ids import PeerKey
from protocol.ledger.audit import CreditedRound

MAX_PAGE = 100
"""Receipts in one answer."""

MAX_ANSWERS = 32
ANSWERS_OF_ONE = 4
"""Answers at once, in all and of one network: each is read from the ledger and made for one client."""

MAX_EXPORTS = 2
EXPORTS_OF_ONE = 1
"""Exports at once, in all and of one network."""


async def _rounds(log: CreditLog, first: int, limit: int) -> dict[str, Any]:
    page = await log.rounds(first, limit)
    rounds = await asyncio.to_thread(lambda: [_round(r) for r in page.rounds])  # thousands of lines
    return {"size": page.size, "settled": page.settled, "rounds": rounds}


def _round(r: CreditedRound) -> dict[str, Any]:
    return {
        "number": r.number,
        "round": r.round,
        "record": str(r.record),
        "parent": str(r.parent),
        "time": r.time,
        "lines": [
            {
                "peer": str(x.peer), "update": str(x.update), "windows": x.windows, "tokens": x.tokens,
                "micro_credits": x.micro_credits, "voided_by": r.voided.get(i),
            }
            for i, x in enumerate(r.lines)
        ],
    }  # fmt: skip


async def _balances(log: CreditLog, after: PeerKey | None, limit: int) -> dict[str, Any]:
    size, found = await log.balances(after, limit)
    rows = [
        {"peer": str(peer)} | {f"micro_credits_{s}": b.of(s).micro_credits for s in ("settled", "pending", "voided")}
        for peer, b in found
    ]
    return {"size": size, "balances": rows}


async def _receipts(log: CreditLog, peer: PeerKey, before: int | None, limit: int) -> dict[str, Any]:
    page = await log.receipts.page(peer, before, limit)
    return {"peer": str(peer), "receipts": [_receipt(i) for i in page.items], "next": page.next}


def _account(log: CreditLog, key: PeerKey) -> dict[str, Any]:
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
        "number": r.number,
        "pending_until": r.pending_until,
        "status": item.status,
        "void_reason": item.void_reason,
        "bytes": json_view.base64_text(item.encoded),
    }


_LINE = s.of(
    {
        "peer": s.KEY, "update": s.DIGEST, "windows": s.COUNT, "tokens": s.COUNT, "micro_credits": s.MICRO,
        "voided_by": s.maybe(s.COUNT),
    },
    description="`update`: digest of the signed header; `voided_by`: number of the round whose record voids the credit",
)  # fmt: skip

CREDIT_ENDPOINTS: tuple[ApiEndpoint, ...] = (
    ApiEndpoint(
        "/api/credits/rounds",
        "Final rounds with their credits, numbered from 0 in the order in which they became final",
        s.of(
            {
                "size": s.COUNT,
                "settled": s.COUNT,
                "rounds": s.many(
                    s.of(
                        {
                            "number": s.COUNT,
                            "round": s.COUNT,
                            "record": s.DIGEST,
                            "parent": s.DIGEST,
                            "time": s.COUNT,
                            "lines": s.many(_LINE),
                        }
                    )
                ),
            },
            description="`size`: all final rounds; `settled`: how many of these are settled, counted from the first",
        ),
        _rounds,
        (
            Parameter("first", "the number of the first round", 0),
            Parameter("limit", "maximum number", MAX_ROUNDS, 1, MAX_ROUNDS),
        ),
        seconds=0,
    ),
    ApiEndpoint(
        "/api/credits/balances",
        "What each peer has after `size` final rounds, by ascending key",
        s.of(
            {
                "size": s.COUNT,
                "balances": s.many(
                    s.of(
                        {
                            "peer": s.KEY,
                            "micro_credits_settled": s.MICRO,
                            "micro_credits_pending": s.MICRO,
                            "micro_credits_voided": s.MICRO,
                        }
                    )
                ),
            }
        ),
        _balances,
        (Parameter("after", "only greater keys", key=True), Parameter("limit", "maximum number", 1000, 1, 1000)),
        seconds=0,
    ),
    ApiEndpoint(
        "/api/receipts",
        "A peer's receipts, newest first",
        s.of({"peer": s.KEY, "receipts": s.many(s.RECEIPT), "next": s.maybe(s.COUNT)}),
        _receipts,
        (
            Parameter("peer", "the peer's key", key=True, required=True),
            Parameter("before", "only rounds with numbers below this one (`next` of the page before)"),
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
        except ParquetMissingError:  # its remedy is for this machine, not for the reader
            return PlainTextResponse("this coordinator has no pyarrow, which Parquet needs: take credits.csv\n", 501)
        except (LedgerError, TooManyError):
            return PlainTextResponse(UNREADABLE, 503, {"retry-after": "5"})
        headers = {"content-disposition": f'attachment; filename="credits.{form}"', "cache-control": "no-store"}
        kind = CSV_TYPE if form == "csv" else PARQUET_TYPE
        return StreamingResponse(_chained(first, pieces), headers=headers, media_type=kind)

    answers = ConcurrencyLimit(MAX_ANSWERS, ANSWERS_OF_ONE)
    routes = [Route(e.path, LimitedEndpoint(e.route(log).endpoint, answers), methods=["GET"]) for e in CREDIT_ENDPOINTS]
    exports = ConcurrencyLimit(MAX_EXPORTS, EXPORTS_OF_ONE)
    return [*routes, Route("/api/export/credits.{form}", LimitedEndpoint(export, exports), methods=["GET"])]


async def _chained(first: bytes, remaining: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in remaining:
        yield piece
