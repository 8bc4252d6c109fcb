"""The routes about credits as the OpenAPI document has them: log, proofs, receipts, accounts, the export."""

from __future__ import annotations

from typing import Any

from coordinator.page import schemas as s

_HASH: s.Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_PLAIN = {"text/plain": {"schema": s.TEXT}}

RECEIPT = s.of(
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
    },
    description="`bytes`: the envelope that the owner signed. It settles when the log's newest round entry is the "
    "`pending_until`-th, counted from 0.",
)

ACCOUNT = s.of(s.LEADER["properties"] | {"rounds_total": s.COUNT})


def _path(about: str, answer: s.Schema | None, parameters: dict[str, bool], *, kinds: tuple[str, ...] = ()) -> Any:
    """Return one path; `parameters` are whole numbers by name, True for required ones."""
    content: dict[str, Any] = {"application/json": {"schema": answer}} if answer else {kind: {} for kind in kinds}
    return {
        "get": {
            "summary": about,
            "parameters": [_whole(name, must) for name, must in parameters.items()],
            "responses": {
                "200": {"description": "the answer", "content": content},
                "400": {"description": "a malformed request", "content": _PLAIN},
                "503": {"description": "the ledger cannot be read at this moment", "content": _PLAIN},
            },
        }
    }


def _whole(name: str, must: bool) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": must, "schema": {"type": "integer", "minimum": 0}}


def _key(name: str, where: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": True, "schema": s.KEY}


def _credit_paths() -> dict[str, Any]:
    hashes = s.many(_HASH)
    paths = {
        "/api/log/head": _path(
            "Signed tree heads (RFC 9162), newest first: envelopes of the owner",
            s.of({"heads": s.many(s.BASE64)}),
            {"before": False, "limit": False},
        ),
        "/api/log/entries": _path(
            "Entries of the log, as their bytes were written and hashed",
            s.of({"first": s.COUNT, "size": s.COUNT, "entries": s.many(s.BASE64)}),
            {"first": False, "limit": False},
        ),
        "/api/log/lines": _path(
            "The credit lines of the round entries in a range: the leaves under their lines_root",
            s.of({"groups": s.many(s.of({"entry": s.COUNT, "lines": s.many(s.BASE64)})), "next": s.COUNT}),
            {"first": False, "limit": False},
        ),
        "/api/log/inclusion": _path(
            "The proof that an entry is in the log of a size",
            s.of({"entry": s.COUNT, "size": s.COUNT, "hashes": hashes}),
            {"entry": True, "size": True},
        ),
        "/api/log/consistency": _path(
            "The proof that the log of one size extends that of another",
            s.of({"first": s.COUNT, "second": s.COUNT, "hashes": hashes}),
            {"first": True, "second": True},
        ),
        "/api/receipts": _path(
            "A peer's receipts, newest first",
            s.of({"peer": s.KEY, "receipts": s.many(RECEIPT), "next": s.maybe(s.COUNT)}),
            {"before": False, "limit": False},
        ),
        "/api/accounts/{key}": _path("The totals of an account, or of a peer", ACCOUNT, {}),
        "/api/export/credits.{form}": _path(
            "All credits as a file: csv or parquet", None, {}, kinds=("text/csv", "application/vnd.apache.parquet")
        ),
    }
    paths["/api/receipts"]["get"]["parameters"].append(_key("peer", "query"))
    paths["/api/accounts/{key}"]["get"]["parameters"].append(_key("key", "path"))
    form = {"name": "form", "in": "path", "required": True, "schema": {"type": "string", "enum": ["csv", "parquet"]}}
    paths["/api/export/credits.{form}"]["get"]["parameters"].append(form)
    return paths


CREDIT_PATHS = _credit_paths()
"""For `make_app(..., described=CREDIT_PATHS)`, where these routes are served."""
