"""Sends responses piece by piece, cuts clients that read too slowly, and counts expensive answers until they are sent.

Without this, a client that reads nothing would keep its connection, and the memory of its answer, for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import async_timeout
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.errors import CoordinatorError, TooManyError
from coordinator.limits import ConcurrencyLimit, caller_at

PIECE = 64 * 1024
SEND_SECONDS = 30.0
LEAST_BYTES_PER_SECOND = 100_000
"""A client that reads more slowly than this, after its first SEND_SECONDS of waiting, is cut."""


class SlowClientError(CoordinatorError):
    """A client that did not read its response in time."""


def paced(send: Send) -> Send:
    """Return a `send` for one response that raises SlowClientError if the client reads too slowly.

    Only the time within `send` counts, not that in which the next piece is made.
    """
    clock = asyncio.get_running_loop().time
    patience = SEND_SECONDS
    """Seconds that the client may take now; each byte adds to it."""

    async def send_piece(message: Message) -> None:
        nonlocal patience
        patience = min(SEND_SECONDS, patience + len(message.get("body", b"")) / LEAST_BYTES_PER_SECOND)
        began = clock()
        try:
            async with async_timeout.timeout(patience):
                await send(message)
        except asyncio.TimeoutError:
            raise SlowClientError("a client did not read its response in time") from None
        patience -= clock() - began

    async def send_in_pieces(message: Message) -> None:
        body, at = message.get("body", b""), 0
        while len(body) - at > PIECE:
            await send_piece({**message, "body": body[at : at + PIECE], "more_body": True})
            at += PIECE
        await send_piece({**message, "body": body[at:]} if at else message)

    return send_in_pieces


class LimitedEndpoint:
    """An endpoint with a number of places, in all and for each network: each is held until its response is sent."""

    def __init__(self, endpoint: Callable[[Request], Awaitable[ASGIApp]], places: ConcurrencyLimit):
        self._endpoint = endpoint
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # the answer to GET costs as much without its body, and slows no reader down
            await PlainTextResponse("ask with GET\n", 405, {"allow": "GET"})(scope, receive, send)
            return
        try:
            free = self._places.take(caller_at((scope.get("client") or ("", 0))[0]))
        except TooManyError as e:
            await PlainTextResponse(f"{e}\n", 503, {"retry-after": "5"})(scope, receive, send)
            return
        try:
            response = await self._endpoint(Request(scope, receive, send))
            await response(scope, receive, send)
        finally:
            free()
