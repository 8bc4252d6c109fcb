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
import time
from dataclasses import asdict

import aiohttp
from yarl import URL

from coordinator.alerts.config import Webhook
from coordinator.alerts.tracker import AlertEvent
from coordinator.errors import CoordinatorError
from protocol.plain_text import one_line

DEADLINE = 10.0
MAX_MESSAGE = 600
_SIGNS = {"fired": "ALERT", "ongoing": "STILL", "resolved": "RESOLVED", "test": "TEST"}


class WebhookError(CoordinatorError):
    """A webhook that did not accept an event; `final`: a repetition is useless."""

    def __init__(self, message: str, *, final: bool = False):
        super().__init__(message)
        self.final = final


def unlinked(text: str) -> str:
    """Return text from strangers without what chats make links, mentions and markup of."""
    return re.sub(r"(?i)[<>&@`*_~|\[\]\\#]|://|\bwww\.", "'", one_line(text[:MAX_MESSAGE]))


def payload(event: AlertEvent, run: str, page: str) -> bytes:
    """Return the body to post; `run` is the run's name, `page` the page's address ("": none)."""
    sentence = f"{_SIGNS[event.kind]} {unlinked(run)}: {event.name}: {unlinked(event.message)}"
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
    now = int(time.time())
    headers = {"User-Agent": "cairn-coordinator", "Content-Type": "application/json", "X-Cairn-Timestamp": str(now)}
    if secret:
        headers["X-Cairn-Signature"] = signature(secret, now, body)
    try:
        # The answer's body is never read.
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=deadline)) as session,
            session.post(URL(hook.url, encoded=True), data=body, headers=headers, allow_redirects=False) as answer,
        ):
            status = answer.status
    except asyncio.TimeoutError:
        raise WebhookError(f"{hook} did not answer within {deadline:.0f} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as e:
        # The text of many of these errors has the whole address.
        why = e.strerror if isinstance(e, aiohttp.ClientConnectorError) else None
        raise WebhookError(f"{hook} could not be reached ({why or 'it hung up, or does not speak HTTP'})") from None
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise WebhookError(
            f"{hook} sends elsewhere ({status}), and that is not followed: give the address itself", final=True
        )
    final = 400 <= status < 500 and status not in (408, 425, 429)
    raise WebhookError(f"{hook} answered with status {status}" + (": check the address" if final else ""), final=final)
