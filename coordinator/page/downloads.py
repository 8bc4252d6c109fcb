"""Downloads of checkpoint files: whole or one range (RFC 9110, section 14), limited in number and rate.

The limits leave room for the coordinator's own traffic. A slow client is cut by `response_limits`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from coordinator.errors import TooManyError
from coordinator.limits import ConcurrencyLimit, caller_at
from coordinator.page.feed import disconnected

MAX_DOWNLOADS = 8
DOWNLOADS_OF_ONE = 2
"""Downloads of one address."""

BYTES_PER_SECOND = 25_000_000
"""Rate of all downloads together."""

PIECE = 256 * 1024
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


class Downloads:
    """Counts the downloads, and spaces their pieces."""

    def __init__(self, find: Callable[[str, str], Path | None], rate: float = BYTES_PER_SECOND):
        self._find = find
        self._rate = rate
        self._free_at = 0.0
        self.places = ConcurrencyLimit(MAX_DOWNLOADS, DOWNLOADS_OF_ONE)

    async def answer(self, request: Request) -> Response:
        """Answer the route `{folder}/{file}` of an archived checkpoint."""
        path = self._find(request.path_params["folder"], request.path_params["file"])
        if path is None:
            return PlainTextResponse("no such checkpoint here: /api/checkpoints lists the available ones\n", 404)
        try:
            stat = await asyncio.to_thread(path.stat)
        except OSError:
            return PlainTextResponse("this checkpoint is gone: /api/checkpoints lists the available ones\n", 404)
        name = f"{request.path_params['folder']}-{path.name}"
        found = _Download(
            path, headers={"cache-control": "no-cache"}, media_type="application/octet-stream", stat_result=stat,
            filename=name,
        )  # fmt: skip
        if request.headers.get("if-none-match") == found.headers["etag"]:
            return Response(status_code=304, headers={"etag": found.headers["etag"], "cache-control": "no-cache"})
        found.downloads = self
        return found

    async def turn(self, size: int) -> None:
        """Wait until this number of bytes may be sent."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + size / self._rate
        await asyncio.sleep(self._free_at - now - size / self._rate)


class _Download(FileResponse):
    """A file or one range of it, piece by piece."""

    chunk_size = PIECE
    downloads: Downloads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ranges = [(k, v) for k, v in scope["headers"] if k != b"range" or _is_range(v.decode("latin-1"))]
        scope = {**scope, "headers": ranges}
        if scope["method"] == "HEAD":
            await super().__call__(scope, receive, send)
            return
        try:
            free = self.downloads.places.take(caller_at((scope.get("client") or ("", 0))[0]))
        except TooManyError:
            text = "too many downloads at this moment, from your address or in all: try again\n"
            await PlainTextResponse(text, 503, {"retry-after": "60"})(scope, receive, send)
            return
        gone = asyncio.ensure_future(disconnected(receive))

        async def spaced(message: Message) -> None:
            if gone.done():
                raise OSError("the client is gone")
            if body := message.get("body", b""):
                await self.downloads.turn(len(body))
            await send(message)

        try:
            await super().__call__(scope, receive, spaced)
        except OSError:
            return  # the file is deleted, or the client is gone
        finally:
            gone.cancel()
            free()


def _is_range(text: str) -> bool:
    """Return whether this is one range of bytes; any other range is ignored, as RFC 9110 permits."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        return False
    first, last = match.groups()
    return int(first) <= int(last) if first and last else bool(first or last)
