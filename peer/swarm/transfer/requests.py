"""The requests of one fetch: its providers with their failures, and what follows from the answers to its actions."""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from peer.swarm.transfer.actions import Action, Answer, CancelAll, CancelRequest, DropProvider, QueryProvider
from peer.swarm.transfer.frames import BlobOp, BlobReply, Lost, ReplyStatus, encode_size
from protocol.ids import PeerKey

BITMAP_SECONDS = (0.1, 1.0)
"""Seconds between bitmaps of a provider that fetches too: while its bitmap changes, and at most."""

JITTER = 0.2
"""Share by which a wait is shortened or extended, by chance."""

_MAX_EXPONENT = 40


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Requests until a provider is dropped, and the seconds between them: the first wait, its growth, the longest."""

    tries: float
    first: float
    growth: float
    most: float

    def wait(self, attempt: int, chance: random.Random) -> float:
        """Return the seconds to wait after failed attempt `attempt` (0 is the first)."""
        seconds = min(self.most, self.first * self.growth ** min(attempt, _MAX_EXPONENT))
        return seconds * chance.uniform(1 - JITTER, 1 + JITTER)


RETRIES = {
    # The other side may be about to receive our header: soon again, until the deadline.
    ReplyStatus.REFUSED: RetryPolicy(inf, 0.06, 1.4, 0.5),
    ReplyStatus.MISSING: RetryPolicy(5, 0.1, 2.0, 2.0),
    ReplyStatus.ABSENT: RetryPolicy(inf, 0.1, 1.4, 1.0),
    ReplyStatus.BUSY: RetryPolicy(8, 0.2, 1.6, 2.0),
}
LOST_RETRIES = RetryPolicy(3, 0.2, 3.0, 3.0)
"""For a stream that broke or could not be opened."""

AGAIN = RetryPolicy(inf, 3.0, 2.0, 30.0)
"""For a provider that was given up while others are left: its failure may have been of a moment."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds without chunk requests to a provider. `absent`: then it says first which chunks it has."""

    seconds: float
    absent: bool = False


class ProviderActivity(enum.Enum):
    """The activity of a provider of chunks in this fetch."""

    OUT = "nothing: not begun, or dropped"
    BITMAP = "saying which chunks it has"
    SLOT = "a slot on its stream is awaited"
    FULL = "as many requests are under way as it may have"
    IDLE = "there is nothing to request"
    DRAINING = "it failed; the requests under way are awaited"
    EARLY = "it failed before the hashes were known, which are awaited"
    PAUSED = "it failed, and is asked again later"


@dataclass(eq=False)
class Provider:
    """One provider in one fetch."""

    peer: PeerKey
    reason: str = "not asked yet"
    """Its last failure or state, for a person."""

    bad: bool = False
    """Nothing more is requested from it."""

    counts: Counter[str] = field(default_factory=Counter)
    """Failures by kind, since the last data, or since it was given up."""

    had_turn: bool = False
    """Chunks, or a bitmap, were requested from it."""

    proved: bool = False
    """It gave a correct chunk."""

    suspected: bool = False
    """It gave a wrong chunk. Nothing more is requested until it is known whose fault that is."""

    # Of the attempt that is going on:
    activity: ProviderActivity = ProviderActivity.OUT
    wake_at: float = inf
    slot: int | None = None
    """The number of the slot request under way."""

    requests: dict[int, int] = field(default_factory=dict)
    """Chunks that are requested, or not yet stored, by the number of the request."""

    pause: Pause | None = None
    """Set by the first failure: all that was requested at the same time counts once."""

    pages: list[bytes] = field(default_factory=list)
    bitmap_due: float = 0.0
    bitmap_seconds: float = BITMAP_SECONDS[0]

    def begin(self) -> None:
        """Prepare for a new attempt at chunks."""
        self.activity, self.wake_at, self.slot, self.pause = ProviderActivity.OUT, inf, None, None
        self.requests, self.pages = {}, []
        self.bitmap_due, self.bitmap_seconds = 0.0, BITMAP_SECONDS[0]


@dataclass(eq=False, slots=True)
class Query:
    """A request that is repeated, as the provider's failures allow, until it is answered."""

    provider: Provider
    op: BlobOp
    index: int
    given: Callable[[Query, bytes], None]
    of_chunks: bool = False
    """True: without an answer the provider is asked for no chunks. False: it is out of the race for leaf hashes."""

    delayed: Callable[[Query], None] = lambda query: None
    """Called before it is repeated later."""

    number: int = 0
    repeats: int = 0
    retry_at: float = inf


class Requests:
    """The requests of one fetch. `on_failed` receives each query whose provider gives no answer to it.

    `size` is the bytes of the blob, as somebody stated them.
    """

    def __init__(self, size: int, chance: random.Random, on_failed: Callable[[Query], None]):
        self.providers: list[Provider] = []
        self.now = 0.0
        self.size = size
        self._chance = chance
        self._on_failed = on_failed
        self._actions: list[Action] = []
        self._last_number = 0
        self._unanswered: dict[int, Callable[[Any], None]] = {}
        self._queries: list[Query] = []

    # -- actions -----------------------------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        """Add an action to those of this step."""
        self._actions.append(action)

    def request(self, make: Callable[[int], Action], then: Callable[[Any], None]) -> int:
        """Add an action with a new number, which is returned; `then` receives the answer's value."""
        self._last_number += 1
        self._unanswered[self._last_number] = then
        self.act(make(self._last_number))
        return self._last_number

    def answer(self, answer: Answer) -> None:
        """Let follow what the answered action was for, unless it was cancelled."""
        if (then := self._unanswered.pop(answer.number, None)) is not None:
            then(answer.value)

    def cancel(self, number: int) -> None:
        """Cancel an action, unless it is answered."""
        if self._unanswered.pop(number, None) is not None:
            self.act(CancelRequest(number))

    def cancel_all(self) -> None:
        """Cancel all actions and queries, and close the blob."""
        self._unanswered.clear()
        self._queries.clear()
        self.act(CancelAll())

    def take_actions(self) -> list[Action]:
        """Return the actions of this step, and begin a new one."""
        actions, self._actions = self._actions, []
        return actions

    # -- providers ---------------------------------------------------------------------------------------------------

    def usable(self) -> list[Provider]:
        """Return the providers that are left: those without recent failures first, else in the caller's order."""
        return sorted((p for p in self.providers if not p.bad), key=lambda p: bool(p.counts))

    def again_at(self, given_up: int) -> float:
        """Return when to ask a provider again that was given up this number of times."""
        return self.now + AGAIN.wait(given_up, self._chance)

    def gave(self, provider: Provider) -> None:
        """Note that a provider gave data: its failures are forgotten."""
        provider.counts.clear()
        provider.reason = "was still sending"

    def failed(self, provider: Provider, outcome: BlobReply | Lost) -> Pause | None:
        """Count a failure; return how long to wait before the next request. None: the provider is of no more use."""
        provider.reason = outcome.reason
        if isinstance(outcome, Lost):
            if outcome.hostile:
                self.drop(provider, outcome.reason)
                return None
            kind, policy = "lost", LOST_RETRIES
        elif outcome.status is ReplyStatus.BAD_REQUEST:
            return None
        else:
            kind, policy = outcome.status.name, RETRIES[outcome.status]
        attempt = provider.counts[kind]
        provider.counts[kind] += 1
        if attempt + 1 >= policy.tries:
            return None
        return Pause(policy.wait(attempt, self._chance), absent=kind == ReplyStatus.ABSENT.name)

    def drop(self, provider: Provider, reason: str) -> None:
        """Report a provider that broke the rules in a way that no fault of the network explains. It stays `bad`."""
        if not provider.bad:
            provider.bad = True
            provider.reason = reason
            self.act(DropProvider(provider.peer, reason))

    # -- queries -----------------------------------------------------------------------------------------------------

    @property
    def retry_at(self) -> float:
        """When the next query is to be repeated."""
        return min((q.retry_at for q in self._queries), default=inf)

    def send(self, query: Query) -> None:
        """Send a query to its provider. It fails if that is bad."""
        self._queries.append(query)
        self._send(query)

    def repeat_due(self) -> None:
        """Send the queries that are to be repeated now."""
        for query in [q for q in self._queries if q.retry_at <= self.now]:
            if query in self._queries:  # an earlier one may have failed, and cancelled it
                self._send(query)

    def suspect(self, provider: Provider, accusation: str, *, of_chunks: bool) -> None:
        """Report a provider that gave wrong bytes if it holds the blob for one of the same size as we do.

        Otherwise the one that stated the size may have lied, to set us against honest providers.
        """

        def given(query: Query, data: bytes) -> None:
            if data == encode_size(self.size):
                self.drop(provider, accusation)
            else:
                provider.reason = f"takes the blob for one of another size than {self.size:,} bytes"
            self._on_failed(query)

        self.send(Query(provider, BlobOp.SIZE, 0, given, of_chunks))

    def cancel_queries(self, unwanted: Callable[[Query], bool]) -> None:
        """Cancel queries, including those that would be repeated."""
        for query in [q for q in self._queries if unwanted(q)]:
            self._queries.remove(query)
            self.cancel(query.number)

    def _send(self, query: Query) -> None:
        query.retry_at = inf
        if query.provider.bad:
            self._fail(query)
        else:
            query.number = self.request(
                lambda number: QueryProvider(number, query.provider.peer, query.op, query.index),
                lambda outcome: self._answered(query, outcome),
            )

    def _answered(self, query: Query, outcome: BlobReply | Lost) -> None:
        if isinstance(outcome, BlobReply) and outcome.status is ReplyStatus.OK:
            self._queries.remove(query)
            self.gave(query.provider)
            query.given(query, outcome.data)
        elif (pause := self.failed(query.provider, outcome)) is None:
            self._fail(query)
        else:
            query.repeats += 1
            query.retry_at = self.now + pause.seconds
            query.delayed(query)

    def _fail(self, query: Query) -> None:
        self._queries.remove(query)
        self._on_failed(query)
