"""Posts an event to a webhook: one request, with a deadline, signed, no redirects.

The JSON has the same sentence as "text" (Slack, Mattermost, Matrix bridges) and as "content" (Discord), and the event
in "cairn". With a secret, `X-Cairn-Signature` is "v1=" and the HMAC-SHA256, in hex, of `X-Cairn-Timestamp`, a dot, and
the body (as at Stripe and Slack). A receiver checks both, and refuses old times.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import ssl
import time
from dataclasses import asdict

import async_timeout

from coordinator.alerts.config import Webhook
from coordinator.alerts.tracker import AlertEvent
from coordinator.errors import CoordinatorError

DEADLINE = 10.0
MAX_ANSWER = 16 * 1024
MAX_MESSAGE = 600
_SIGNS = {"fired": "ALERT", "ongoing": "STILL", "resolved": "RESOLVED", "test": "TEST"}


class WebhookError(CoordinatorError):
    """A webhook that did not accept an event; `final`: a repetition is useless."""

    def __init__(self, message: str, *, final: bool = False):
        super().__init__(message)
        self.final = final


def plain(text: str) -> str:
    """Return text from strangers without characters of which chats make links, mentions and markup."""
    text = "".join(c if c.isprintable() else " " for c in text[:MAX_MESSAGE])
    return re.sub(r"[<>&@`*_~|\[\]\\#]", "'", text)


def payload(event: AlertEvent, run: str, page: str) -> bytes:
    """Return the body to post; `run` is the run's name, `page` the page's address ("": none)."""
    sentence = f"{_SIGNS[event.kind]} {plain(run)}: {event.name}: {plain(event.message)}"
    if page:
        sentence += f" ({page})"
    body = {
        "text": sentence,
        "content": sentence,
        "allowed_mentions": {"parse": []},  # Discord: a peer's name mentions nobody
        "cairn": asdict(event) | {"run": run, "page": page},
    }
    return json.dumps(body, separators=(",", ":")).encode()


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """Return the value of `X-Cairn-Signature`."""
    return "v1=" + hmac.new(secret.encode(), f"{timestamp}.".encode() + body, "sha256").hexdigest()


async def post(hook: Webhook, body: bytes, secret: str = "", *, deadline: float = DEADLINE) -> None:
    """Post a body; signed unless `secret` is "". Raises WebhookError."""
    try:
        async with async_timeout.timeout(deadline):
            status = await _post(hook, body, secret)
    except asyncio.TimeoutError:
        raise WebhookError(f"{hook} did not answer within {deadline:.0f} s") from None
    except (OSError, ssl.SSLError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as e:
        raise WebhookError(
            f"{hook} could not be reached ({getattr(e, 'strerror', None) or e or 'it hung up'})"
        ) from None
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise WebhookError(
            f"{hook} sends elsewhere ({status}), and that is not followed: give the address itself", final=True
        )
    final = 400 <= status < 500 and status not in (408, 425, 429)
    raise WebhookError(f"{hook} answered with status {status}" + (": check the address" if final else ""), final=final)


async def _post(hook: Webhook, body: bytes, secret: str) -> int:
    """Send the request, and return the status of the answer."""
    context = ssl.create_default_context() if hook.secure else None
    reader, writer = await asyncio.open_connection(hook.host, hook.port, ssl=context, limit=MAX_ANSWER)
    try:
        now = int(time.time())
        host = f"[{hook.host}]" if ":" in hook.host else hook.host
        headers = {
            "Host": host if hook.port == (443 if hook.secure else 80) else f"{host}:{hook.port}",
            "User-Agent": "cairn-coordinator",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            "X-Cairn-Timestamp": str(now),
        }
        if secret:
            headers["X-Cairn-Signature"] = signature(secret, now, body)
        head = f"POST {hook.target} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
        writer.write(head.encode("ascii") + body)
        await writer.drain()
        while True:
            answer = await reader.readuntil(b"\r\n\r\n")
            status = re.match(rb"HTTP/1\.[01] ([1-5][0-9][0-9])[ \r]", answer)
            if status is None:
                raise ValueError("it does not speak HTTP")
            if status[1][:1] != b"1":  # 100 Continue is not the answer yet
                return int(status[1])
    finally:
        writer.close()
