"""Badges of the run, its peers and its accounts: pictures that other pages embed."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from coordinator.page import pictures
from coordinator.page.answers import AnswerCache, EncodedBody
from coordinator.page.api import PageApi
from coordinator.page.endpoints import KEY
from protocol.ids import PeerKey

BADGE_SECONDS = 30
"""How long a badge is kept."""


def badge_routes(source: PageApi, answers: AnswerCache) -> list[Route]:
    """Return the routes of /badge.svg, /badge/peer/KEY.svg and /badge/account/KEY.svg."""

    async def run(request: Request) -> Response:
        async def make() -> EncodedBody:
            return EncodedBody.of(pictures.run_badge(source.overview()), pictures.SVG_TYPE)

        body = await answers.get("/badge.svg", BADGE_SECONDS, make)
        assert body is not None
        return _embeddable(body, request)

    def volunteer(kind: str, badge_of: Callable[[PeerKey], bytes | None]) -> Route:
        async def answer(request: Request) -> Response:
            try:
                key = KEY.read(request.path_params["key"])
            except ValueError as e:
                return PlainTextResponse(f"{e}\n", 400)

            async def make() -> EncodedBody | None:
                badge = badge_of(key)
                return None if badge is None else EncodedBody.of(badge, pictures.SVG_TYPE)

            body = await answers.get(("/badge", kind, key), BADGE_SECONDS, make)
            if body is None:
                return PlainTextResponse(f"this run knows no such {kind}\n", 404)
            return _embeddable(body, request)

        return Route(f"/badge/{kind}/{{key}}.svg", answer)

    return [
        Route("/badge.svg", run),
        volunteer("peer", source.peer_badge),
        volunteer("account", source.account_badge),
    ]


def _embeddable(body: EncodedBody, request: Request) -> Response:
    found = body.answer(request, f"public, max-age={BADGE_SECONDS}")
    found.headers["cross-origin-resource-policy"] = "cross-origin"  # it is for other pages
    return found
