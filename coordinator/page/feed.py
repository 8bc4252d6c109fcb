"""Live updates for viewers: each is sent the newest event only, so a slow one misses some and delays nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import async_timeout

from coordinator.errors import TooManyError
from coordinator.limits import ConcurrencyLimit

MAX_VIEWERS = 200
VIEWERS_OF_ONE = 16
"""Live views of one address."""

SEND_SECONDS = 20.0
LONGEST = 3600.0
"""Lifetime of a view in seconds; a browser opens it again by itself."""

_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


class Feed:
    """Sends what is published to every viewer."""

    def __init__(self, limit: int = MAX_VIEWERS):
        self._places = ConcurrencyLimit(limit, VIEWERS_OF_ONE)
        self._viewers: set[Viewer] = set()
        self._latest: bytes | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._viewers)

    def publish(self, data: bytes) -> None:
        """Publish the newest state: one line of JSON."""
        self._latest = b"data: " + data + b"\n\n"
        for viewer in self._viewers:
            viewer.offer(self._latest)

    def join(self, caller: str | None) -> Viewer:
        """Return a new viewer for a caller, which gets the latest event at once. Raises TooManyError."""
        too_many = "too many people watch live at this moment: reload in a minute, or read /api/status"
        if self._closed:
            raise TooManyError(too_many)
        try:
            viewer = Viewer(self, self._places.take(caller))
        except TooManyError:
            raise TooManyError(too_many) from None
        self._viewers.add(viewer)
        if self._latest is not None:
            viewer.offer(self._latest)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        viewer.free_place()

    def close(self) -> None:
        self._closed = True
        for viewer in self._viewers:
            viewer.offer(None)


class Viewer:
    """One open view: an ASGI response that lasts."""

    def __init__(self, feed: Feed, free_place: Callable[[], None]):
        self._feed = feed
        self.free_place = free_place
        self._next: bytes | None = None
        self._news = asyncio.Event()

    def offer(self, event: bytes | None) -> None:
        """Replace the event that was not sent yet; None ends the view."""
        self._next = event
        self._news.set()

    async def __call__(self, scope, receive, send) -> None:
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._stream(send, gone)
        finally:
            gone.cancel()
            self._feed.leave(self)

    async def _stream(self, send, gone: asyncio.Future) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + LONGEST
        while not gone.done() and loop.time() < end:
            news = asyncio.ensure_future(self._news.wait())
            await asyncio.wait({news, gone}, timeout=15, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            event = b": still here\n\n"
            if self._news.is_set():
                self._news.clear()
                if self._next is None:
                    break
                event = self._next
            try:
                async with async_timeout.timeout(SEND_SECONDS):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except asyncio.TimeoutError:
                return  # frozen: the server closes a response that was left open
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        continue
