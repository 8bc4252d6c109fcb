"""Runs the page in the coordinator's own event loop: a bounded number of connections, and slow ones are cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import async_timeout
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.errors import PortTakenError, TooManyError
from coordinator.limits import ConcurrencyLimit, caller_at
from protocol.errors import os_reason

MAX_CONNECTIONS = 512
MAX_PER_NETWORK = 64
REQUEST_SECONDS = 10.0


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 that cuts connections with incomplete requests, and those of a network that has too many."""

    places: ConcurrencyLimit
    """Those of a server: each server has a class of its own."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._silent_checks = 0
        self._guard = self.loop.call_later(REQUEST_SECONDS, self._check)
        self._free: Callable[[], None] | None = None
        try:
            self._free = self.places.take(caller_at(self.client[0]) if self.client else None)
        except TooManyError:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.cancel()
        if self._free is not None:
            self._free()
        super().connection_lost(exc)

    def _check(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        self._silent_checks = 0 if answering and not self.transport.is_closing() else self._silent_checks + 1
        if self._silent_checks >= 2:
            self.transport.abort()
        else:
            self._guard = self.loop.call_later(REQUEST_SECONDS, self._check)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield  # signals belong to the program around this server


class PageServer:
    """An ASGI application on a port."""

    def __init__(self, app: ASGIApp):
        # Between the two limits a client is answered that the page is busy; beyond the second it is cut.
        limit = ConcurrencyLimit(2 * MAX_CONNECTIONS, MAX_PER_NETWORK)
        protocol = type("Protocol", (GuardedProtocol,), {"places": limit})
        self.config = uvicorn.Config(
            app, lifespan="off", http=protocol, ws="none", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=5,
            timeout_graceful_shutdown=2, h11_max_incomplete_event_size=16 * 1024,
        )  # fmt: skip
        self._server = _Server(self.config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises PortTakenError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(128)
        except OSError as e:
            sock.close()
            raise PortTakenError(
                f"cannot listen on {host}:{port} for the page ({os_reason(e)}): stop the program that has the port, "
                "or choose another one with --page"
            ) from None
        bound: int = sock.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]), name="page")
        return bound

    async def stop(self) -> None:
        """Stop within about three seconds, whatever browsers do."""
        self._server.should_exit = True
        if self._task is not None:
            try:
                async with async_timeout.timeout(4):
                    await self._task
            except asyncio.TimeoutError:
                for connection in list(self._server.server_state.connections):
                    transport = getattr(connection, "transport", None)
                    if transport is not None:
                        transport.abort()
