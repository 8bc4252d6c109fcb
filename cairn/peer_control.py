"""How commands reach a peer that runs on this machine: a socket in its run's folder, which only its user may open.

One line of JSON each way: {"ask": "pause"} and {"said": "..."}, or {"refused": "..."}. The system refuses a connection
to a socket that a killed process left. So a peer that does not run differs from one that does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import async_timeout

from protocol.errors import CairnError, MalformedError, os_reason
from protocol.strict_json import read_json

if TYPE_CHECKING:
    from peer.node.rest import RestWish

log = logging.getLogger("cairn.peer")

SOCKET = "control.sock"
MAX_LINE = 4096
MAX_NAME = 100
"""Longest name in bytes by which a socket is opened: the system takes no more than 107."""

READ_SECONDS = 10.0
"""Maximum seconds in which a command sends its line."""

FREE_SECONDS = 10.0
"""Maximum seconds for which the answer to "pause" waits until the devices are free."""

ANSWER_SECONDS = 30.0
"""Maximum seconds for which a command waits for the answer."""

LEAVE_SECONDS = 90.0
"""Maximum seconds for which `cairn peer leave` waits until the process has ended."""

PAUSED = "paused by its user"

Answer = Callable[[str], Awaitable[str]]
"""Returns what is said to a command. Raises CairnError to refuse it."""


class PeerControl:
    """The answers of a peer to these commands."""

    def __init__(self, rest: RestWish, stop: asyncio.Event):
        self._rest = rest
        self._stop = stop

    async def answer(self, ask: str) -> str:
        """Do what is asked, and return what to tell the user. Raises CairnError."""
        if ask == "leave":
            self._stop.set()
            return "leaving"
        if ask == "pause":
            return await self._pause()
        if ask == "resume":
            return self._resume()
        raise CairnError(f"{ask[:20]!r} is not known here: the peer's Cairn may be older than this one")

    async def _pause(self) -> str:
        rest, began = self._rest, time.monotonic()
        rest.want("user", PAUSED)
        if await rest.until_free(FREE_SECONDS):
            return f"paused: its devices are free after {time.monotonic() - began:.1f} s"
        return "paused: no step begins any more, and its devices are free soon"

    def _resume(self) -> str:
        rest = self._rest
        rest.want("user", "")
        return f"not paused any more, and still resting: {rest.reason}" if rest.reason else "working again"


@asynccontextmanager
async def listening(folder: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer commands at the socket in this folder for as long as the block lasts.

    The caller holds the lock of the store in the folder, so a socket that is there is nobody's.
    """
    path = folder / SOCKET

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with async_timeout.timeout(READ_SECONDS):
                line = await reader.readline()
            ask = _field(line, "ask")
            try:
                reply = {"said": await answer(ask or "")}
            except CairnError as e:
                reply = {"refused": str(e)}
            writer.write(json.dumps(reply).encode() + b"\n")
            async with async_timeout.timeout(READ_SECONDS):
                await writer.drain()
            if ask == "leave":
                with contextlib.suppress(asyncio.CancelledError):  # the end of the process closes the connection
                    await asyncio.Event().wait()
        except (OSError, ValueError, asyncio.TimeoutError):
            pass  # the command is gone, or sent nothing that can be read
        finally:
            writer.close()

    try:
        path.unlink(missing_ok=True)
        with _openable(path) as name:
            server = await asyncio.start_unix_server(serve, name, limit=MAX_LINE)
        path.chmod(0o600)
    except OSError as e:
        log.warning("%s: %s: `cairn peer pause`, `resume` and `leave` do not reach this peer", path, os_reason(e))
        yield
        return
    try:
        yield
    finally:
        server.close()
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def ask_peer(folder: Path, ask: str) -> str | None:
    """Return what the peer of the run in this folder says; None when none runs. After "leave" it has ended.

    Raises CairnError when it refuses, or does not answer.
    """
    path = folder / SOCKET
    try:
        with _openable(path) as name, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(name)
            connection.sendall(json.dumps({"ask": ask}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                line = lines.readline(MAX_LINE)
                if ask == "leave" and line:
                    connection.settimeout(LEAVE_SECONDS)
                    lines.read(1)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except TimeoutError:
        raise CairnError(f"the peer in {folder} does not answer: its peer.log says what it does") from None
    except OSError as e:
        raise CairnError(f"{path}: {os_reason(e)}: is it another user's?") from None
    if (refused := _field(line, "refused")) is not None:
        raise CairnError(refused)
    if (said := _field(line, "said")) is None:
        raise CairnError(f"the peer in {folder} ended before it answered: its peer.log says why")
    return said


def _field(line: bytes, name: str) -> str | None:
    """Return a text of a line of JSON; None when it has none."""
    try:
        found = read_json(line, "a line", MAX_LINE)
    except MalformedError:
        return None
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str) else None


@contextmanager
def _openable(path: Path) -> Iterator[str]:
    """Yield a name of a socket that is short enough to be opened: of a deep folder, by a descriptor of it."""
    if len(os.fsencode(path)) <= MAX_NAME:
        yield str(path)
        return
    try:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield str(path)[-MAX_NAME:]  # it does not exist, whatever its name
        return
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
