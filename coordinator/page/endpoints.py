"""The answers of the API, as a table: the source of routes, parameter checks and the OpenAPI document."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from coordinator.errors import LedgerError, TooManyError
from coordinator.page import json_view
from coordinator.page import schemas as s
from coordinator.page.answers import AnswerCache, EncodedBody
from protocol.errors import ProtocolError
from protocol.ids import PeerKey
from protocol.ledger.statements import MAX_ACCOUNT_NAME

UNREADABLE = "the ledger cannot be read at this moment: try again\n"

MAX_ROUNDS = 200
MAX_PEERS = 200
TOP = 2**40


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: a whole number from `low` to `top`, one of `choices`, a peer's key, or short text."""

    name: str
    about: str
    default: Any = None
    low: int = 0
    top: int = TOP
    choices: tuple[str, ...] = ()
    key: bool = False
    longest: int = 0
    in_path: bool = False
    required: bool = False

    def read(self, text: str | None) -> Any:
        """Return the value of a parameter's text. Raises ValueError with a message for the client."""
        if text is None:
            if self.required:
                raise ValueError(f"{self.name} is required")
            return self.default
        if self.choices:
            if text not in self.choices:
                raise ValueError(f"{self.name} must be one of: {', '.join(self.choices)}")
            return text
        if self.key:
            if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
                raise ValueError(f"{self.name} must be a peer's key: 64 hexadecimal digits")
            return PeerKey(bytes.fromhex(text))
        if self.longest:
            if len(text) > self.longest:
                raise ValueError(f"{self.name} must have at most {self.longest} characters")
            return text
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 13 and self.low <= int(text) <= self.top):
            raise ValueError(f"{self.name} must be a whole number from {self.low} to {self.top}")
        return int(text)

    def schema(self) -> s.Schema:
        if self.choices:
            found: s.Schema = {"type": "string", "enum": list(self.choices)}
        elif self.key:
            found = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
        elif self.longest:
            found = {"type": "string", "maxLength": self.longest}
        else:
            found = {"type": "integer", "minimum": self.low, "maximum": self.top}
        return found if self.default is None else found | {"default": self.default}


def _encoded(value: Any) -> EncodedBody:
    """Return an answer's body. It may be megabytes: call it in a thread."""
    return EncodedBody.of(json_view.encode(value))


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """One endpoint: `make` answers, now or awaited, from a source (`PageApi`, `CreditLog`) and the parameters' values.

    An answer is kept for `seconds`; 0: it is made for each request.
    """

    path: str
    about: str
    answer: s.Schema
    make: Callable[..., Any]
    parameters: tuple[Parameter, ...] = ()
    seconds: float = 1.0
    missing: str = ""
    """The message of a 404, if there can be one."""

    def route(self, source: Any, answers: AnswerCache | None = None) -> Route:
        """Return the route; `answers` is needed unless `seconds` is 0."""

        async def value_of(asked: dict[str, Any]) -> Any:
            value = self.make(source, **asked)
            return await value if inspect.isawaitable(value) else value

        async def answer(request: Request) -> Response:
            try:
                asked = {
                    p.name: p.read((request.path_params if p.in_path else request.query_params).get(p.name))
                    for p in self.parameters
                }
            except ValueError as e:
                return PlainTextResponse(f"{e}\n", 400)
            try:
                if answers is None:
                    body = await asyncio.to_thread(json_view.encode, await value_of(asked))
                    return Response(body, 200, {"cache-control": "no-store"}, "application/json")

                async def make() -> EncodedBody | None:
                    value = await value_of(asked)
                    return None if value is None else await asyncio.to_thread(_encoded, value)

                # The head is part of the key: a request after a new round must not get an answer from before it.
                body = await answers.get((source.head, self.path, *asked.values()), self.seconds, make)
            except ProtocolError as e:
                return PlainTextResponse(f"{e}\n", 400)
            except (LedgerError, TooManyError):
                return PlainTextResponse(UNREADABLE, 503, {"retry-after": "5"})
            return PlainTextResponse(f"{self.missing}\n", 404) if body is None else body.answer(request)

        return Route(self.path, answer)


SORTS = ("state", "name", "since", "round", "loss", "speed", "up", "down", "credits", "device", "last_round")

_NUMBER = Parameter("number", "the round's number", in_path=True)
KEY = Parameter("key", "the peer's key", key=True, in_path=True)

ENDPOINTS: tuple[ApiEndpoint, ...] = (
    ApiEndpoint(
        "/api/status",
        "The state of the run, the first peers and the newest rounds",
        s.STATUS,
        lambda source: source.status(),
        seconds=0.5,
    ),
    ApiEndpoint(
        "/api/run",
        "The run in short: model, data, settings, and how to take part",
        s.RUN,
        lambda source: source.run(),
        seconds=10,
    ),
    ApiEndpoint(
        "/api/charts",
        "Loss by tokens and by time, tokens a second, durations, peers and bytes by round",
        s.CHARTS,
        lambda source: source.charts(),
    ),
    ApiEndpoint(
        "/api/peers",
        "Peers that are here or were lately: sorted, filtered and paged by the server",
        s.of(
            {"total": s.COUNT, "matching": s.COUNT, "offset": s.COUNT, "peers": s.many(s.PEER)},
            description="`total`: all that are listed. A peer that is gone is listed while its credit is pending, one "
            "of the newest rounds has its work, or it is barred or banned. The leaderboard has all that have earned.",
        ),
        lambda source, sort, order, q, offset, limit: source.peers(sort, order == "down", q, offset, limit),
        (
            Parameter("sort", "sort key", "state", choices=SORTS),
            Parameter("order", "ascending or descending", "up", choices=("up", "down")),
            Parameter("q", "only names, devices or keys that contain this", "", longest=64),
            Parameter("offset", "number to skip", 0, 0, 100_000),
            Parameter("limit", "maximum number", 25, 1, MAX_PEERS),
        ),
    ),
    ApiEndpoint(
        "/api/peers/{key}",
        "One peer, and how it went in the newest rounds",
        s.of(
            {
                "peer": s.PEER,
                "name": s.TEXT,
                "tokens": s.COUNT,
                "rounds": s.COUNT,
                "newest": s.many(
                    s.of(
                        {
                            "round": s.COUNT,
                            "record": s.DIGEST,
                            "final": s.FLAG,
                            "tokens": s.COUNT,
                            "micro_credits": s.MICRO,
                            "absence": s.maybe(s.REASON),
                        }
                    )
                ),
                "audits": s.many(s.AUDIT_CASE),
            },
            description="`newest`: rounds it was in (tokens > 0) or missed (absence says why), newest first; "
            "`audits`: the newest cases about its own updates, decided ones first.",
        ),
        lambda source, key: source.peer(key),
        (KEY,),
        missing="this run knows no such peer",
    ),
    ApiEndpoint(
        "/api/audits",
        "Decisions about updates, newest first, and failed checks on which nothing is decided yet",
        s.of(
            {
                "total": s.COUNT,
                "offset": s.COUNT,
                "decided": s.many(s.AUDIT_CASE),
                "undecided_total": s.COUNT,
                "undecided": s.many(s.AUDIT_CASE),
            },
            description="`total`: decided cases that are kept, the newest 256; `undecided`: at most 25, newest first",
        ),
        lambda source, offset, limit: source.audits(offset, limit),
        (
            Parameter("offset", "number of decided cases to skip", 0, 0, 100_000),
            Parameter("limit", "maximum number of decided cases", 25, 1, 50),
        ),
    ),
    ApiEndpoint(
        "/api/rounds/newest",
        "Rounds, newest first: who was in, who was not and why, how long each part took",
        s.of({"rounds": s.many(s.ROUND_ROW), "next": s.maybe(s.COUNT)}),
        lambda source, before, limit: source.newest_rounds(before, limit),
        (
            Parameter("before", "only rounds before this one (`next` of the page before)", TOP),
            Parameter("limit", "maximum number", 25, 1, 100),
        ),
    ),
    ApiEndpoint(
        "/api/rounds/{number}",
        "One round with everybody in it",
        s.ROUND,
        lambda source, number: source.round(number),
        (_NUMBER,),
        missing="there is no such round (yet)",
    ),
    ApiEndpoint(
        "/api/rounds/{number}/certificate",
        "The signed record and the votes for it, to be checked by anybody",
        s.CERTIFICATE,
        lambda source, number: source.certificate(number),
        (_NUMBER,),
        seconds=5,
        missing="this coordinator does not hold that certificate: any peer of the run may",
    ),
    ApiEndpoint(
        "/api/leaderboard",
        "Who has most credits",
        s.many(s.LEADER),
        lambda source, by, limit, after, team: source.leaderboard(by, limit, after, team),
        (
            Parameter("by", "grouping of the rows", "peer", choices=("peer", "account", "team")),
            Parameter("limit", "maximum number", 25, 1, 100),
            Parameter("after", "continue after the row with this key", "", longest=128),
            Parameter("team", "only this team, its accounts or their peers", "", longest=MAX_ACCOUNT_NAME),
        ),
        seconds=3,
    ),
    ApiEndpoint(
        "/api/samples",
        "What the model writes, newest round first",
        s.many(s.SAMPLE),
        lambda source, before, limit: source.samples(before, limit),
        (
            Parameter("before", "only rounds before this one", TOP),
            Parameter("limit", "maximum number", 50, 1, MAX_ROUNDS),
        ),
        seconds=10,
    ),
    ApiEndpoint(
        "/api/checkpoints",
        "Archived checkpoints, newest first",
        s.many(s.CHECKPOINT),
        lambda source: source.checkpoints(),
        seconds=10,
    ),
)
