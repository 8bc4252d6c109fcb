"""How the API's document describes the routes about credits (`log_routes`)."""

from __future__ import annotations

from typing import Any

from coordinator.page import schemas as s

_PLAIN = {"text/plain": {"schema": s.TEXT}}


def _asked(name: str, about: str, *, required: bool = False, path: bool = False, schema: s.Schema = s.COUNT) -> Any:
    where = "path" if path else "query"
    return {"name": name, "in": where, "required": required or path, "description": about, "schema": schema}


def _get(summary: str, answer: s.Schema, *asked: Any, **more: str) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "200": {"description": "the answer", "content": {"application/json": {"schema": answer}}},
        "400": {"description": "the question is not understood", "content": _PLAIN},
        "503": {"description": "the ledger cannot be read at this moment", "content": _PLAIN},
    }
    answers |= {code.removeprefix("code_"): {"description": why, "content": _PLAIN} for code, why in more.items()}
    return {"get": {"summary": summary, "parameters": list(asked), "responses": answers}}


_HASHES = s.many(s.DIGEST, description="RFC 9162, section 2.1.3 or 2.1.4")
_RECEIPT = s.of(
    {
        "round": s.COUNT,
        "record": s.DIGEST,
        "update": s.DIGEST,
        "accepted": s.FLAG,
        "reason": s.TEXT,
        "windows": s.COUNT,
        "tokens": s.COUNT,
        "micro_credits": s.MICRO,
        "entry": s.COUNT,
        "line": s.COUNT,
        "pending_until": s.COUNT,
        "status": {"enum": ["pending", "settled", "voided", "not accepted"]},
        "bytes": s.BASE64,
    }
)

LOG_PATHS: dict[str, Any] = {
    "/api/log/head": _get(
        "Signed heads of the ledger's log, newest first; the newest is at most a minute old",
        s.of({"heads": s.many(s.BASE64, description='envelopes of kind "tree-head"')}),
        _asked("before", "only of trees smaller than this"),
        _asked("limit", "at most so many, up to 100"),
    ),
    "/api/log/entries": _get(
        "Entries of the log, as they were hashed",
        s.of({"first": s.COUNT, "size": s.COUNT, "entries": s.many(s.BASE64)}),
        _asked("first", "the first one's number"),
        _asked("limit", "at most so many, up to 1000"),
    ),
    "/api/log/lines": _get(
        "The lines of a round entry, as they were hashed",
        s.of({"entry": s.COUNT, "lines": s.many(s.BASE64)}),
        _asked("entry", "the entry's number", required=True),
        code_404="no round entry has that number",
    ),
    "/api/log/inclusion": _get(
        "The proof that an entry is in the log of a size",
        s.of({"entry": s.COUNT, "size": s.COUNT, "hashes": _HASHES}),
        _asked("entry", "the entry's number", required=True),
        _asked("size", "of the tree", required=True),
    ),
    "/api/log/consistency": _get(
        "The proof that the log of one size goes on from that of another",
        s.of({"first": s.COUNT, "second": s.COUNT, "hashes": _HASHES}),
        _asked("first", "the smaller size", required=True),
        _asked("second", "the larger size", required=True),
    ),
    "/api/receipts": _get(
        "A peer's receipts, newest first",
        s.of({"peer": s.KEY, "receipts": s.many(_RECEIPT), "next": s.maybe(s.COUNT)}),
        _asked("peer", "whose", required=True, schema=s.KEY),
        _asked("before", "go on: what `next` was in the answer before"),
        _asked("limit", "at most so many, up to 100"),
    ),
    "/api/accounts/{key}": _get(
        "What an account, or a peer, has in all",
        s.of(s.LEADER["properties"] | {"rounds_in_all": s.COUNT}),
        _asked("key", "the account's key, or a peer's", path=True, schema=s.KEY),
    ),
    "/api/export/credits.{form}": {
        "get": {
            "summary": "All credits, a line for each accepted update",
            "parameters": [_asked("form", "csv or parquet", path=True, schema={"enum": ["csv", "parquet"]})],
            "responses": {
                "200": {"description": "a file", "content": {"text/csv": {}, "application/vnd.apache.parquet": {}}},
                "404": {"description": "another form", "content": _PLAIN},
                "501": {"description": "this coordinator cannot write Parquet", "content": _PLAIN},
            },
        }
    },
}
"""Path -> path item, for `openapi.document`."""
