"""A bounded cache of answers: many requests cost one answer, and a repeated request of one browser gets 304."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

MAX_KEPT = 64
MAX_BYTES = 32 * 1024 * 1024
LONGEST = 10.0
"""Maximum number of seconds that a slow answer is kept."""

_SMALL = 1024
"""Bytes below which compression saves nothing."""


@dataclass(frozen=True, slots=True)
class EncodedBody:
    """Bytes to send, also compressed, and their tag."""

    plain: bytes
    zipped: bytes | None
    kind: str
    tag: str

    @classmethod
    def of(cls, data: bytes, kind: str = "application/json", *, level: int = 5) -> EncodedBody:
        zipped = gzip.compress(data, level, mtime=0) if len(data) >= _SMALL else None
        return cls(data, zipped, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')

    def answer(self, request: Request, caching: str = "no-cache") -> Response:
        """Return a response in the encoding that the browser accepts, or 304 if it has the bytes already."""
        headers = {"etag": self.tag, "cache-control": caching, "vary": "accept-encoding"}
        if self.tag in (t.strip().removeprefix("W/") for t in request.headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=headers)
        if self.zipped is not None and "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.zipped, headers=headers | {"content-encoding": "gzip"}, media_type=self.kind)
        return Response(self.plain, headers=headers, media_type=self.kind)


class AnswerCache:
    """Bodies by request. Each is made at most once in its time, for any number of requests."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._kept: OrderedDict[Hashable, tuple[float, EncodedBody | None]] = OrderedDict()
        self._making: dict[Hashable, asyncio.Task[EncodedBody | None]] = {}
        self._bytes = 0

    async def get(
        self, asked: Hashable, seconds: float, make: Callable[[], Awaitable[EncodedBody | None]]
    ) -> EncodedBody | None:
        """Return the body that was made at most `seconds` ago, or make it; None if there is no such thing.

        A slow answer is kept longer, so that making one takes a tenth of the time at most.
        """
        kept = self._kept.get(asked)
        if kept is not None and self._now() < kept[0]:
            self._kept.move_to_end(asked)
            return kept[1]
        task = self._making.get(asked)
        if task is None:
            task = self._making[asked] = asyncio.create_task(self._make(asked, seconds, make))
            task.add_done_callback(lambda _: self._making.pop(asked, None))
        return await asyncio.shield(task)

    async def _make(
        self, asked: Hashable, seconds: float, make: Callable[[], Awaitable[EncodedBody | None]]
    ) -> EncodedBody | None:
        began = self._now()
        body = await make()
        ended = self._now()
        self._drop(asked)
        self._kept[asked] = (ended + max(seconds, min(LONGEST, 10 * (ended - began))), body)
        self._bytes += _size(body)
        while len(self._kept) > MAX_KEPT or self._bytes > MAX_BYTES:
            self._drop(next(iter(self._kept)))
        return body

    def _drop(self, asked: Hashable) -> None:
        kept: tuple[float, Any] | None = self._kept.pop(asked, None)
        if kept is not None:
            self._bytes -= _size(kept[1])


def _size(body: EncodedBody | None) -> int:
    return 0 if body is None else len(body.plain) + len(body.zipped or b"")
