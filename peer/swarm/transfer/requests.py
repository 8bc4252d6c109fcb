"""The requests of one fetch: numbered actions, queries under way and to be repeated, and each provider's failures."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from peer.swarm.transfer.actions import Action, CancelRequest, DropProvider, QueryProvider
from peer.swarm.transfer.frames import SIZE_BYTES, BlobOp, ReplyStatus
from peer.swarm.transfer.outcomes import Declined, Lost
from peer.swarm.transfer.providers import LOST_RETRIES, RETRIES, Pause, Provider
from peer.swarm.transfer.streams import Priority
from protocol.ids import PeerKey
from protocol.merkle import CHUNK


class Purpose(enum.Enum):
    """The purpose of a query."""

    SIZE = "the blob's size"
    LEAVES = "its leaf hashes"
    LEAVES_SUSPICION = "the provider's size of a blob of which it gave wrong leaf hashes"
    CHUNK_SUSPICION = "the provider's size of a blob of which it gave a wrong chunk"
    BITMAP = "which chunks the provider has"


@dataclass(eq=False, slots=True)
class Query:
    """A request that is repeated, as the provider's failures allow, until it is answered."""

    provider: Provider
    op: BlobOp
    index: int
    purpose: Purpose
    accusation: str = ""
    """The report, if a suspicion is justified."""

    retry_at: float = inf


class Requests:
    """The requests of one fetch. `priority` is that of its queries."""

    def __init__(self, peers: Iterable[PeerKey], priority: Priority, chance: random.Random):
        self.providers = [Provider(peer) for peer in peers]
        self.now = 0.0
        self._priority = priority
        self._chance = chance
        self._actions: list[Action] = []
        self._last_number = 0
        self._under_way: dict[int, Query] = {}
        self._retries: list[Query] = []

    # -- actions -----------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """Return a new number for an action."""
        self._last_number += 1
        return self._last_number

    def act(self, action: Action) -> None:
        """Add an action to those of this step."""
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        """Return the actions of this step, and begin a new one."""
        actions, self._actions = self._actions, []
        return actions

    # -- providers ---------------------------------------------------------------------------------------------------

    def usable(self) -> list[Provider]:
        """Return the providers that are left: those without recent failures first, else in the caller's order."""
        return sorted((p for p in self.providers if not p.bad), key=lambda p: bool(p.counts))

    def gave(self, provider: Provider) -> None:
        """Note that a provider gave data: its failures are forgotten."""
        provider.counts.clear()
        provider.reason = "was still sending"

    def failed(self, provider: Provider, outcome: Declined | Lost) -> Pause | None:
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
        return min((q.retry_at for q in self._retries), default=inf)

    def send(self, query: Query) -> bool:
        """Send a query; return False if its provider is bad."""
        if query.provider.bad:
            return False
        number = self.number()
        self._under_way[number] = query
        limit = SIZE_BYTES if query.op is BlobOp.SIZE else CHUNK
        self.act(QueryProvider(number, query.provider.peer, self._priority, query.op, query.index, limit))
        return True

    def answered(self, number: int) -> Query | None:
        """Return the query of this number, which is not under way any more; None if there is none."""
        return self._under_way.pop(number, None)

    def repeat(self, query: Query, seconds: float) -> None:
        """Have a query sent again after a time."""
        query.retry_at = self.now + seconds
        self._retries.append(query)

    def take_due(self) -> list[Query]:
        """Return the queries that are to be repeated now."""
        due = [q for q in self._retries if q.retry_at <= self.now]
        self._retries = [q for q in self._retries if q.retry_at > self.now]
        return due

    def cancel(self, unwanted: Callable[[Query], bool]) -> None:
        """Cancel queries, also those that would be repeated."""
        for number in [n for n, query in self._under_way.items() if unwanted(query)]:
            del self._under_way[number]
            self.act(CancelRequest(number))
        self._retries = [query for query in self._retries if not unwanted(query)]
