"""The routes: the page and its files, /api/status, /api/rounds, /api/charts, /events, /metrics. Reading only."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.errors import LedgerError, TooManyError
from coordinator.page.feed import Feed

STATIC = Path(__file__).parent / "static"
MAX_ROUNDS = 200

_SECURITY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Source(Protocol):
    """What the page shows, as JSON."""

    feed: Feed

    def status_json(self) -> bytes: ...

    def charts_json(self) -> bytes: ...

    async def rounds_json(self, after: int, limit: int) -> bytes: ...

    def metrics_text(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _File:
    plain: bytes
    zipped: bytes
    kind: str
    tag: str


def _load(names: Sequence[str]) -> dict[str, _File]:
    """Files are few and small: kept in memory, compressed once."""
    files = {}
    for name in names:
        data = (STATIC / name).read_bytes()
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        text = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        files[name] = _File(data, gzip.compress(data, mtime=0), text, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return files


def make_app(source: Source) -> ASGIApp:
    """The application. Files that the page needs and that are missing fail here, not at the first visitor."""
    files = _load([p.relative_to(STATIC).as_posix() for p in sorted(STATIC.rglob("*")) if p.is_file()])
    index = files["index.html"]

    def page(request: Request) -> Response:
        return _file(request, index)

    async def static(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        return PlainTextResponse("no such file\n", 404) if found is None else _file(request, found)

    async def home(request: Request) -> Response:
        return page(request)

    async def favicon(request: Request) -> Response:
        return _file(request, files["favicon.svg"])

    async def status(_: Request) -> Response:
        return _json(source.status_json())

    async def charts(_: Request) -> Response:
        return _json(source.charts_json())

    async def rounds(request: Request) -> Response:
        try:
            after = _whole(request, "after", -1, -1, 2**40)
            limit = _whole(request, "limit", 50, 1, MAX_ROUNDS)
        except ValueError as e:
            return PlainTextResponse(f"{e}\n", 400)
        try:
            return _json(await source.rounds_json(after, limit))
        except (LedgerError, TooManyError):
            return PlainTextResponse("the ledger cannot be read at this moment: try again\n", 503)

    async def metrics(_: Request) -> Response:
        return Response(source.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app = Starlette(
        routes=[
            Route("/", home),
            Route("/static/{name:path}", static),
            Route("/favicon.svg", favicon),
            Route("/favicon.ico", favicon),
            Route("/api/status", status),
            Route("/api/charts", charts),
            Route("/api/rounds", rounds),
            Route("/metrics", metrics),
        ]
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/events" and scope["method"] == "GET":
            try:
                viewer = source.feed.join()
            except TooManyError as e:
                await PlainTextResponse(f"{e}\n", 503, {"retry-after": "60"})(scope, receive, send)
                return
            await viewer(scope, receive, send)
        else:
            await app(scope, receive, send)

    return _secured(answer)


def _secured(app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> ASGIApp:
    """Adds the security headers to every response."""
    headers = [(k.encode(), v.encode()) for k, v in _SECURITY.items()]

    async def secured(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *headers]}
            await send(message)

        await app(scope, receive, with_headers)

    return secured


def _file(request: Request, file: _File) -> Response:
    headers = {"etag": file.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.zipped, headers=headers | {"content-encoding": "gzip"}, media_type=file.kind)
    return Response(file.plain, headers=headers, media_type=file.kind)


def _json(data: bytes) -> Response:
    return Response(data, headers={"cache-control": "no-store"}, media_type="application/json")


def _whole(request: Request, name: str, default: int, low: int, top: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 13 and low <= int(text) <= top):
        raise ValueError(f"{name} must be a whole number from {low} to {top}")
    return int(text)
