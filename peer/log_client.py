"""Reads what a coordinator says of credits over HTTP: rounds, receipts, totals.

Only the signatures of receipts are verified here. `cairn audit ledger` compares rounds, what is settled, and balances
with the certificates. A receipt's status and `CreditTotals` are the coordinator's word.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar
from urllib.parse import urlencode

import async_timeout

from peer.coordinator_client import CoordinatorRefused, CoordinatorUnreachable
from protocol.errors import CairnError, MalformedError
from protocol.ids import MAX_COUNT, Digest, PeerKey, Round, RunId
from protocol.ledger.audit import CreditedRound, CreditedRounds
from protocol.ledger.credits import CreditLine
from protocol.ledger.statements import Receipt, open_receipt
from protocol.messages import Signed
from protocol.plain_text import printable
from protocol.strict_json import read_json

T = TypeVar("T")

MAX_ANSWER = 4 * 1024 * 1024
"""Bytes of one answer; a page of rounds has about 1.5 MB, plus at most the lines of one round (1 MB)."""

BALANCES_PAGE = 1000
"""Balances in one answer; one with fewer is the last."""

MAX_TEXT = 80
TIMEOUT_SECONDS = 20.0
"""Seconds of silence after which a page is given up."""

ANSWER_SECONDS = 120.0
"""Maximum seconds of one answer."""

PAUSES = (0.5, 2.0, 5.0)
"""Seconds before each repetition of a request that a busy or silent coordinator did not answer."""

STATUSES = ("pending", "settled", "voided", "not accepted")

Fetch = Callable[[str], Awaitable[bytes]]
"""Returns the body that a URL answers with. Raises CoordinatorUnreachable, CoordinatorRefused."""


@dataclass(frozen=True, slots=True)
class Receipted:
    """A verified receipt, and by the coordinator's word its status and what voids it ("": nothing)."""

    word: Signed[Receipt]
    status: str
    void_reason: str = ""


@dataclass(frozen=True, slots=True)
class CreditTotals:
    """Totals of a peer or an account by the coordinator's word; `cairn audit ledger` recomputes them.

    Amounts are micro-credits, `recent` micro-credits a day. `rounds_total` counts the final rounds.
    """

    key: PeerKey
    kind: str
    name: str
    team: str
    account: PeerKey | None
    settled: int
    pending: int
    voided: int
    recent: int
    tokens: int
    rounds: int
    peers: tuple[PeerKey, ...]
    rounds_total: int


class LogClient:
    """The credits that one coordinator shows on its page. Every method raises CairnError."""

    def __init__(self, page: str, run: RunId, owner: PeerKey, fetch: Fetch | None = None):
        """Prepare; `page` is the page's address, as the coordinator gives it, `owner` the key that signs receipts."""
        # With a query or a fragment of its own it would choose the whole of what is asked, and of which host.
        if not page.startswith(("http://", "https://")) or any(c in page for c in "?#@\\") or not page.isprintable():
            raise CairnError(f"the coordinator names {page[:100]!r} as its page, which is no web address: update it")
        self._page = page.rstrip("/")
        self._run = run
        self._owner = owner
        self._fetch = fetch or fetch_url

    async def rounds(self, first: int, limit: int) -> CreditedRounds:
        """Return final rounds, unverified, from number `first` on."""
        answer = await self._get("/api/credits/rounds", first=first, limit=limit)
        rounds = _items(answer, "rounds", _round)[:limit]
        return CreditedRounds(tuple(rounds), _field(answer, "size", _count), _field(answer, "settled", _count))

    async def balances(self, after: PeerKey | None = None) -> tuple[int, dict[PeerKey, tuple[int, int, int]]]:
        """Return the number of final rounds, and peers' settled, pending and voided micro-credits after them.

        The peers are those with the next greater keys, in order, at most BALANCES_PAGE.
        """
        above = None if after is None else str(after)
        answer = await self._get("/api/credits/balances", after=above, limit=BALANCES_PAGE)
        found = _items(answer, "balances", lambda b: (_field(b, "peer", PeerKey.parse), _amounts(b)))
        keys = [*([] if after is None else [after]), *(peer for peer, _ in found)]
        if len(found) > BALANCES_PAGE or any(a >= b for a, b in pairwise(keys)):
            raise MalformedError(f"the coordinator's balances are not at most {BALANCES_PAGE} by ascending key")
        return _field(answer, "size", _count), dict(found)

    async def receipts(self, peer: PeerKey, limit: int = 50) -> list[Receipted]:
        """Return a peer's newest receipts, newest first."""
        answer = await self._get("/api/receipts", peer=str(peer), limit=limit)
        found = []
        for item in _items(answer, "receipts", dict)[:limit]:
            word = open_receipt(_field(item, "bytes", _bytes), self._run, self._owner)
            if word.body.peer != peer:
                raise MalformedError(f"the coordinator gave a receipt of {word.body.peer.short}, not of {peer.short}")
            status = _field(item, "status", _text)
            why = _text(str(item.get("void_reason", ""))) if status == "voided" else ""
            found.append(Receipted(word, status if status in STATUSES else "unknown", why))
        return found

    async def totals(self, key: PeerKey) -> CreditTotals:
        """Return the totals of a peer or an account; all zero for a key that is unknown."""
        a = await self._get(f"/api/accounts/{key}")
        settled, pending, voided = _amounts(a)
        return CreditTotals(
            key, _field(a, "kind", _text), _field(a, "name", _text), _field(a, "team", _text),
            None if a.get("account") is None else _field(a, "account", PeerKey.parse), settled, pending, voided,
            _field(a, "recent", _count), _field(a, "tokens", _count), _field(a, "rounds", _count),
            tuple(_items(a, "peers", PeerKey.parse)), _field(a, "rounds_total", _count),
        )  # fmt: skip

    async def _get(self, path: str, **query: int | str | None) -> dict[str, Any]:
        given = urlencode({k: v for k, v in query.items() if v is not None})
        data = await self._fetch(f"{self._page}{path}{'?' if given else ''}{given}")
        try:
            answer = read_json(data, path, MAX_ANSWER)
        except MalformedError:
            answer = None
        if not isinstance(answer, dict):
            raise MalformedError(f"{self._page}{path} does not answer with a JSON object: is it a coordinator's page?")
        return answer


async def fetch_url(url: str, pauses: Sequence[float] = PAUSES) -> bytes:
    """Return the body of a web page, after some repetitions if need be: one after each of `pauses` (seconds).

    Raises CoordinatorUnreachable, CoordinatorRefused.
    """
    for pause in pauses:
        try:
            return await _answer(url)
        except CoordinatorUnreachable:
            await asyncio.sleep(pause)
    return await _answer(url)


async def _answer(url: str) -> bytes:
    """Return what `_read` does. It runs in a daemon, since a server that sends little by little must not hold us."""
    answer = Future[bytes]()
    answer.set_running_or_notify_cancel()  # so that it takes an answer that nobody awaits any more

    def read() -> None:
        try:
            answer.set_result(_read(url))
        except Exception as e:  # noqa: BLE001 - it is raised where the answer is awaited
            answer.set_exception(e)

    threading.Thread(target=read, daemon=True).start()
    try:
        async with async_timeout.timeout(ANSWER_SECONDS):
            return await asyncio.wrap_future(answer)
    except asyncio.TimeoutError:
        page = url.partition("/api/")[0]
        raise CoordinatorUnreachable(f"the coordinator's page at {page} answers too slowly: try again later") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A stranger's page must not have us call other machines, such as those of our own network."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _read(url: str) -> bytes:
    page = url.partition("/api/")[0]
    request = urllib.request.Request(url, headers={"User-Agent": "cairn", "Accept": "application/json"})
    try:
        with _OPENER.open(request, timeout=TIMEOUT_SECONDS) as response:
            data: bytes = response.read(MAX_ANSWER + 1)
    except urllib.error.HTTPError as e:
        if 300 <= e.code < 400:
            to = _text(e.headers.get("Location", "elsewhere"))
            raise CoordinatorRefused(
                f"the page at {page} redirects to {to}: if you trust that address, give it"
            ) from None
        said = ""
        with suppress(OSError, ValueError, http.client.HTTPException):  # the status says enough
            said = _text(e.read(500).decode(errors="replace").strip())
        if e.code in (429, 502, 503, 504):
            raise CoordinatorUnreachable(f"the coordinator's page at {page} is busy: {said or e.code}") from None
        raise CoordinatorRefused(f"the coordinator's page at {page} refused: {said or e.code}") from None
    except (OSError, ValueError, http.client.HTTPException) as e:
        why = _text(str(getattr(e, "reason", e)))
        raise CoordinatorUnreachable(
            f"the coordinator's page at {page} does not answer ({why}): is it running, and open to you? Ask the run's "
            "owner"
        ) from None
    if len(data) > MAX_ANSWER:
        raise MalformedError(f"the coordinator's page at {page} answers with more than {MAX_ANSWER} bytes")
    return data


def _field(answer: dict[str, Any], name: str, read: Callable[[Any], T]) -> T:
    """Return one field of an answer. Raises MalformedError."""
    try:
        return read(answer[name])
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error):
        raise MalformedError(f"the coordinator's answer has no good {name}: is it of another version?") from None


def _items(answer: dict[str, Any], name: str, read: Callable[[Any], T]) -> list[T]:
    return _field(answer, name, lambda found: [read(item) for item in _list(found)])


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise ValueError
    return value


def _bytes(value: Any) -> bytes:
    return base64.b64decode(value, validate=True)


def _round(value: dict[str, Any]) -> CreditedRound:
    lines = _list(value["lines"])
    voided = {i: _count(x["voided_by"]) for i, x in enumerate(lines) if x["voided_by"] is not None}
    return CreditedRound(
        _count(value["number"]), Round(_count(value["round"])), _digest(value["record"]), _digest(value["parent"]),
        _count(value["time"]), tuple(_line(x) for x in lines), voided,
    )  # fmt: skip


def _amounts(value: dict[str, Any]) -> tuple[int, int, int]:
    """Return settled, pending and voided micro-credits."""
    settled, pending, voided = (_field(value, f"micro_credits_{s}", _count) for s in ("settled", "pending", "voided"))
    return settled, pending, voided


def _line(value: dict[str, Any]) -> CreditLine:
    peer, update = PeerKey.parse(value["peer"]), _digest(value["update"])
    return CreditLine(peer, update, *(_count(value[n]) for n in ("windows", "tokens", "micro_credits")))


def _digest(value: Any) -> Digest:
    return Digest(bytes.fromhex(value))


def _text(text: str) -> str:
    return printable(text, MAX_TEXT)
