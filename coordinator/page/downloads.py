"""Downloads of checkpoint files: whole or one range (RFC 9110, section 14), limited in number and rate.

The limits leave room for the coordinator's own traffic.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import async_timeout
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from coordinator.page.feed import disconnected

MAX_DOWNLOADS = 8
BYTES_PER_SECOND = 25_000_000
"""Rate of all downloads together."""

PIECE = 256 * 1024
SEND_SECONDS = 30.0
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


class Downloads:
    """Counts the downloads, and spaces their pieces."""

    def __init__(self, find: Callable[[str, str], Path | None], rate: float = BYTES_PER_SECOND):
        self._find = find
        self._rate = rate
        self._free_at = 0.0
        self._count = 0

    async def answer(self, request: Request) -> Response:
        """Answer the route `{folder}/{file}` of an archived checkpoint."""
        path = self._find(request.path_params["folder"], request.path_params["file"])
        if path is None:
            return PlainTextResponse("no such checkpoint here: /api/checkpoints lists the available ones\n", 404)
        try:
            stat = await asyncio.to_thread(path.stat)
        except OSError:
            return PlainTextResponse("this checkpoint is gone: /api/checkpoints lists the available ones\n", 404)
        size, tag = stat.st_size, f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
        headers = {"accept-ranges": "bytes", "etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        first, end, code = 0, size, 200
        asked = request.headers.get("range")
        if asked is not None and request.headers.get("if-range", tag) == tag:
            found = _range(asked, size)
            if found is not None and not found:
                return PlainTextResponse("no such range\n", 416, headers | {"content-range": f"bytes */{size}"})
            if found:
                first, end = found
                code = 206
                headers["content-range"] = f"bytes {first}-{end - 1}/{size}"
        headers |= {"content-length": str(end - first), "content-type": "application/octet-stream"}
        name = f"{request.path_params['folder']}-{path.name}"
        headers["content-disposition"] = f'attachment; filename="{name}"'
        if request.method == "HEAD":
            return Response(status_code=code, headers=headers)
        if self._count >= MAX_DOWNLOADS:
            return PlainTextResponse("too many downloads at this moment: try again\n", 503, {"retry-after": "60"})
        return _Pieces(self, path, first, end, code, headers)

    async def turn(self, size: int) -> None:
        """Wait until this number of bytes may be sent."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + size / self._rate
        await asyncio.sleep(self._free_at - now - size / self._rate)

    def began(self) -> None:
        self._count += 1

    def ended(self) -> None:
        self._count -= 1


class _Pieces(Response):
    """One range of a file, piece by piece."""

    def __init__(self, downloads: Downloads, path: Path, first: int, end: int, code: int, headers: dict[str, str]):
        super().__init__(status_code=code, headers=headers)
        self._downloads = downloads
        self._path, self._first, self._end = path, first, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._downloads.began()
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            file = await asyncio.to_thread(open, self._path, "rb")
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                at = self._first
                while at < self._end and not gone.done():
                    await self._downloads.turn(min(PIECE, self._end - at))
                    data = await asyncio.to_thread(_read, file, at, min(PIECE, self._end - at))
                    if not data:
                        return  # cut short on disk: the connection is closed, and the reader sees it
                    at += len(data)
                    await self._send(send, {"type": "http.response.body", "body": data, "more_body": at < self._end})
                if self._first == self._end:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                await asyncio.to_thread(file.close)
        except (OSError, asyncio.TimeoutError):
            return  # the file is deleted, or the client is gone
        finally:
            gone.cancel()
            self._downloads.ended()

    @staticmethod
    async def _send(send: Send, message: dict) -> None:
        async with async_timeout.timeout(SEND_SECONDS):
            await send(message)


def _read(file, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _range(text: str, size: int) -> tuple[int, int] | tuple[()] | None:
    """Return the first byte of a range and the one after its last.

    The result is () if the file has none of these, and None if the range is to be ignored.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None or match.group(1) == match.group(2) == "":
        return None
    if not match.group(1):
        last = int(match.group(2))
        return (max(0, size - last), size) if last and size else ()
    first = int(match.group(1))
    end = min(size, int(match.group(2)) + 1) if match.group(2) else size
    if match.group(2) and int(match.group(2)) < first:
        return None
    return (first, end) if first < size else ()
