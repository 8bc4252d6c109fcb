"""The run's signed spec on the page's address: what a stranger needs to know of a run before there is an invite."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.page.answers import EncodedBody

PATH = "/api/spec.signed"
OPERATION = {
    "get": {
        "summary": "The run's spec in the envelope that its owner signed (docs/wire.md)",
        "responses": {"200": {"description": "the envelope", "content": {"application/octet-stream": {}}}},
    }
}


def spec_route(envelope: bytes) -> Route:
    """Return the route that answers with the spec's envelope."""
    body = EncodedBody.of(envelope, "application/octet-stream")

    async def answer(request: Request) -> Response:
        return body.answer(request)

    return Route(PATH, answer)
