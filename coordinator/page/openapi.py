"""The OpenAPI 3.1 document of the page's API, from the table of endpoints (https://spec.openapis.org/oas/v3.1.0)."""

from __future__ import annotations

from typing import Any

from coordinator.credits.export import CSV_TYPE, PARQUET_TYPE
from coordinator.page import schemas as s
from coordinator.page import spec_route
from coordinator.page.credit_routes import CREDIT_ENDPOINTS
from coordinator.page.endpoints import ENDPOINTS, ApiEndpoint, Parameter

ABOUT = (
    "Everything that a Cairn coordinator's page shows, as JSON. Read-only; no key is needed. Answers are cached and "
    "carry an ETag, except those about credits: send it back in If-None-Match. Keys and digests are hexadecimal, "
    "credits are whole micro-credits (10^9 model FLOPs), times are unix seconds (in /api/credits/rounds milliseconds). "
    "Read /events (server-sent events, each with the newest state) instead of polling."
)

_PLAIN = {"text/plain": {"schema": s.TEXT}}
_PICTURE: dict[str, Any] = {"image/svg+xml": {}}
_OTHERS: dict[str, Any] = {
    "/badge.svg": {
        "get": {
            "summary": "The run's name, state, progress and peers as a picture, for other pages",
            "responses": {"200": {"description": "a badge, at most 30 seconds old", "content": _PICTURE}},
        }
    },
    **{
        f"/badge/{kind}/{{key}}.svg": {
            "get": {
                "summary": f"The name, settled credits and rounds of one {kind} as a picture, for other pages",
                "parameters": [{"name": "key", "in": "path", "required": True, "schema": s.KEY}],
                "responses": {
                    "200": {"description": "a badge, at most 30 seconds old", "content": _PICTURE},
                    "400": {"description": "a malformed key", "content": _PLAIN},
                    "404": {"description": f"this run knows no such {kind}", "content": _PLAIN},
                },
            }
        }
        for kind in ("peer", "account")
    },
    "/invite.svg": {
        "get": {
            "summary": "The invite of /api/run as a QR code",
            "responses": {
                "200": {"description": "the picture", "content": _PICTURE},
                "404": {"description": "the owner gives invites to whom they want", "content": _PLAIN},
            },
        }
    },
    "/events": {
        "get": {
            "summary": "The state as server-sent events (`data:` and JSON), when it changes and every two seconds",
            "responses": {
                "200": {"description": "a stream", "content": {"text/event-stream": {"schema": s.EVENT}}},
                "503": {"description": "too many viewers at this moment", "content": _PLAIN},
            },
        }
    },
    "/api/export/credits.{form}": {
        "get": {
            "summary": "All credits as a file: csv or parquet",
            "parameters": [
                {
                    "name": "form",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "enum": ["csv", "parquet"]},
                }
            ],
            "responses": {
                "200": {"description": "the file", "content": {CSV_TYPE: {}, PARQUET_TYPE: {}}},
                "503": {"description": "the ledger cannot be read at this moment", "content": _PLAIN},
            },
        }
    },
    spec_route.PATH: spec_route.OPERATION,
    "/metrics": {
        "get": {
            "summary": "For Prometheus",
            "responses": {"200": {"description": "the text format 0.0.4", "content": _PLAIN}},
        }
    },
    "/api/openapi.json": {
        "get": {
            "summary": "This document",
            "responses": {
                "200": {"description": "OpenAPI 3.1", "content": {"application/json": {"schema": {"type": "object"}}}}
            },
        }
    },
    "/checkpoints/{folder}/{file}": {
        "get": {
            "summary": "A file of a checkpoint, whole or one range of it",
            "parameters": [
                {"name": "folder", "in": "path", "required": True, "schema": s.TEXT, "example": "round-000030"},
                {"name": "file", "in": "path", "required": True, "schema": s.TEXT, "example": "model.safetensors"},
                {"name": "Range", "in": "header", "required": False, "schema": s.TEXT, "example": "bytes=0-1023"},
            ],
            "responses": {
                "200": {"description": "the whole file", "content": {"application/octet-stream": {}}},
                "206": {"description": "the range", "content": {"application/octet-stream": {}}},
                "404": {"description": "not archived here", "content": _PLAIN},
                "416": {"description": "no such range", "content": _PLAIN},
                "503": {"description": "too many downloads at this moment", "content": _PLAIN},
            },
        }
    },
}  # fmt: skip


def document() -> dict[str, Any]:
    paths = {e.path: {"get": _operation(e)} for e in (*ENDPOINTS, *CREDIT_ENDPOINTS)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cairn coordinator", "version": "1", "description": ABOUT},
        "paths": dict(sorted((paths | _OTHERS).items())),
    }


def _operation(e: ApiEndpoint) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "200": {"description": "the answer", "content": {"application/json": {"schema": e.answer}}},
        "503": {"description": "the ledger cannot be read at this moment", "content": _PLAIN},
    }
    if e.seconds:
        answers["304"] = {"description": "unchanged (If-None-Match)"}
    if e.parameters:
        answers["400"] = {"description": "a malformed request", "content": _PLAIN}
    if e.missing:
        answers["404"] = {"description": e.missing, "content": _PLAIN}
    return {"summary": e.about, "parameters": [_parameter(p) for p in e.parameters], "responses": answers}


def _parameter(p: Parameter) -> dict[str, Any]:
    where, required = ("path", True) if p.in_path else ("query", p.required)
    return {"name": p.name, "in": where, "required": required, "description": p.about, "schema": p.schema()}
