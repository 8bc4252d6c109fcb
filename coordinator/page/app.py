"""The routes: the page and its files, the API by its table, /events, /metrics, checkpoints. Read-only."""

from __future__ import annotations

import contextlib
import mimetypes
import time
from collections.abc import Awaitable, Callable, Sequence
from html import escape
from pathlib import Path
from string import Template

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.errors import TooManyError
from coordinator.limits import NetworkLimit, Rate, caller_at
from coordinator.page import json_view, openapi, pictures
from coordinator.page.answers import AnswerCache, EncodedBody
from coordinator.page.api import PageApi
from coordinator.page.api_docs import api_page
from coordinator.page.badge_routes import badge_routes
from coordinator.page.downloads import Downloads
from coordinator.page.endpoints import ENDPOINTS
from coordinator.page.response_limits import SlowClientError, paced

STATIC = Path(__file__).parent / "static"
REQUESTS_OF_ONE = Rate(30, 200)
"""Requests of one network; a reverse proxy on this machine stands for everybody and is not counted."""

INVITE_SECONDS = 10
"""How long the picture of the invite is kept."""

METRICS_SECONDS = 1
"""How long /metrics is kept: it is made on the event loop, which must not work for each of many requests."""

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


def make_app(source: PageApi, more: Sequence[Route] = ()) -> ASGIApp:
    """Return the application, with the routes about credits (`more`).

    A missing file of the page fails here, not at the first visitor.
    """
    files = _load()
    index = _for_run(files.pop("index.html"), source.spec.name)
    answers, rate = AnswerCache(), NetworkLimit(REQUESTS_OF_ONE)
    downloads = Downloads(source.checkpoint_file)
    document = openapi.document()
    spec = EncodedBody.of(json_view.encode(document), level=9)
    human = EncodedBody.of(api_page(document).encode(), "text/html; charset=utf-8", level=9)

    async def static(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        return PlainTextResponse("no such file\n", 404) if found is None else found.answer(request)

    def always(body: EncodedBody) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return body.answer(request)

        return answer

    async def invite(request: Request) -> Response:
        async def make() -> EncodedBody | None:
            found = source.published_invite()
            return None if found is None else EncodedBody.of(pictures.qr_code(str(found)), pictures.SVG_TYPE)

        body = await answers.get("/invite.svg", INVITE_SECONDS, make)
        return PlainTextResponse("ask the run's owner for an invite\n", 404) if body is None else body.answer(request)

    async def metrics(request: Request) -> Response:
        async def make() -> EncodedBody:
            return EncodedBody.of(await source.metrics_text(), "text/plain; version=0.0.4; charset=utf-8")

        body = await answers.get("/metrics", METRICS_SECONDS, make)
        assert body is not None
        return body.answer(request)

    app = Starlette(
        routes=[
            Route("/", always(index)),
            Route("/static/{name:path}", static),
            Route("/favicon.svg", always(files["favicon.svg"])),
            Route("/favicon.ico", always(files["favicon.svg"])),
            *badge_routes(source, answers),
            Route("/invite.svg", invite),
            Route("/api", always(human)),
            Route("/api/openapi.json", always(spec)),
            *more,
            *(e.route(source, answers) for e in ENDPOINTS),
            Route("/checkpoints/{folder}/{file}", downloads.answer),
            Route("/metrics", metrics),
        ]
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if (caller := _stranger(scope)) is not None:
                rate.take(caller, time.monotonic())
        except TooManyError as e:
            await PlainTextResponse(f"{e}\n", 429, {"retry-after": "5"})(scope, receive, send)
            return
        if scope["path"] == "/events" and scope["method"] == "GET":
            try:
                viewer = source.feed.join(_stranger(scope))
            except TooManyError as e:
                await PlainTextResponse(f"{e}\n", 503, {"retry-after": "60"})(scope, receive, send)
                return
            await viewer(scope, receive, send)
        else:
            with contextlib.suppress(SlowClientError):  # the server closes a response that was left open
                await app(scope, receive, paced(send))

    return _secured(answer)


def _stranger(scope: Scope) -> str | None:
    """Return the network of the client; None for this machine itself."""
    return caller_at((scope.get("client") or ("", 0))[0])


def _load() -> dict[str, EncodedBody]:
    """Return the page's files, which are few and small: kept in memory, compressed once."""
    files = {}
    for path in sorted(p for p in STATIC.rglob("*") if p.is_file()):
        kind = mimetypes.guess_type(path.name)[0] or "text/plain"
        if path.suffix == ".js":
            kind = "text/javascript"  # independent of this machine's table: a browser accepts modules as nothing else
        text = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        files[path.relative_to(STATIC).as_posix()] = EncodedBody.of(path.read_bytes(), text, level=9)
    return files


def _for_run(template: EncodedBody, name: str) -> EncodedBody:
    """Return the page with the run's name in what others show of it."""
    text = Template(template.plain.decode()).substitute(run=escape(name, quote=True))
    return EncodedBody.of(text.encode(), template.kind, level=9)


def _secured(app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> ASGIApp:
    """Return the application with security headers in every response; a response's own headers win."""
    headers = [(k.encode(), v.encode()) for k, v in _SECURITY.items()]

    async def secured(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = message.get("headers", [])
                names = {name for name, _ in own}
                message = {**message, "headers": [*own, *(h for h in headers if h[0] not in names)]}
            await send(message)

        await app(scope, receive, with_headers)

    return secured
