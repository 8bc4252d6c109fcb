"""The scheduler of one fetch: what to request from which provider, and when again. A step function.

It has no I/O, clock or event loop. `start` and `step` return the actions that follow; the driver (`fetch.py`) carries
them out, answers them, and calls `step` with None at `wake_at`. A fetch has these stages:

    leaves    the leaf hashes: asked of one provider after the other, until one gives them; meanwhile the first
              provider gives a few chunks (early)
    chunks    up to ACTIVE providers at once give chunks (`ChunkStage`); `ChunkPicker` chooses which

At most PROVIDERS are considered at a time. When all of them have failed, or none has given a chunk for STALL_SECONDS,
others are, with what is here already. So no number of useless providers hides one that has the blob.

Leaf hashes are checked against the digest, and chunks against the leaf hashes. A provider that gives wrong bytes is
dropped. One that is silent, busy, or not yet willing is asked again, or others are asked in its place. One that was
given up is asked again now and then while others are left.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from peer.swarm.transfer.actions import Action, Answer, EndFetch, OpenBlob, Priority, ReserveEarly
from peer.swarm.transfer.chunk_picker import ChunkPicker
from peer.swarm.transfer.chunk_stage import ACTIVE, ChunkStage, StageEnd, StreamView
from peer.swarm.transfer.frames import BlobOp, leaf_pages
from peer.swarm.transfer.requests import Provider, ProviderActivity, Query, Requests
from protocol.ids import Digest, PeerKey
from protocol.merkle import chunk_count

BULK = 4 * 1024 * 1024
"""Blobs over this size have a stream of their own, so that smaller ones need not queue behind them."""

PROVIDERS = 32
"""Providers considered at a time for one blob."""

STALL_SECONDS = 30.0
"""Seconds without a new chunk until other providers have their turn: time for four chunks at 280 kbit/s."""

RELAYED = 4
"""For blobs with more chunks than this, fetchers give each other what they have before they ask a scarce seeder again.

For smaller ones it would only take longer."""

HEDGE_SECONDS = 0.5
"""After this time without leaf hashes, another provider is asked for them."""


@dataclass(slots=True)
class _Race:
    """Providers asked for leaf hashes, one after the other, until one gives them."""

    waiting: list[Provider]
    running: set[PeerKey] = field(default_factory=set)
    next_at: float = inf
    again: dict[Provider, float] = field(default_factory=dict)
    """When to ask those again that gave none, while others are left."""

    given_up: Counter[PeerKey] = field(default_factory=Counter)
    pages: dict[PeerKey, dict[int, bytes]] = field(default_factory=dict)
    """Leaf hashes received, by page."""

    openings: list[int] = field(default_factory=list)
    """The numbers of the actions that check leaf hashes."""

    @property
    def wake_at(self) -> float:
        """When to ask one more."""
        return min((self.next_at, *self.again.values()))

    @property
    def is_lost(self) -> bool:
        """True when nobody is left but those that were given up."""
        return all(self.given_up[peer] for peer in (*self.running, *(p.peer for p in self.waiting)))


class Scheduler:
    """The decisions of one fetch.

    `peers` are the providers, the likeliest first. `size` is the blob's size in bytes that somebody signed for. With
    `chunks`, only these are fetched. `has` says whether a chunk is in the store, and `here` how many are. All chance
    comes from `chance`.
    """

    def __init__(
        self,
        me: PeerKey,
        peers: Iterable[PeerKey],
        digest: Digest,
        size: int,
        *,
        chunks: Collection[int] | None,
        streams: StreamView,
        has: Callable[[int], bool],
        here: Callable[[], int],
        chance: random.Random,
    ):
        self._me = me
        self._digest = digest
        self._wanted = chunks
        self._streams = streams
        self._has = has
        self._here = here
        self._chance = chance
        self._later = deque(Provider(p) for p in _spread(list(dict.fromkeys(peers)), chance))
        """Providers that are considered when those of `_requests` have failed."""
        self._failed: list[Provider] = []
        self._stalled_at = inf
        self._requests = Requests(size, chance, self._query_failed)
        self._requests.providers = self._next_providers()
        self._deadline_seconds = self._deadline = inf
        self._over = False
        self._race: _Race | None = None
        self._chunks: ChunkStage | None = None

    # -- the interface -----------------------------------------------------------------------------------------------

    @property
    def chunk_priority(self) -> Priority:
        """The priority of chunk requests."""
        return Priority.BULK if self._requests.size > BULK else Priority.SMALL

    @property
    def query_priority(self) -> Priority:
        """The priority of everything else. Of many chunks it must not wait behind these."""
        few = self._wanted is not None or chunk_count(self._requests.size) <= RELAYED
        return self.chunk_priority if few else Priority.QUERY

    @property
    def wake_at(self) -> float:
        """When to call `step` with None, unless there is an answer before."""
        race = inf if self._race is None else self._race.wake_at
        chunks = inf if self._chunks is None else self._chunks.wake_at
        return min(self._deadline, self._requests.retry_at, race, chunks, self._stalled_at)

    def reasons(self) -> dict[PeerKey, str]:
        """Return the last failure or state of each provider, for a person."""
        return {p.peer: p.reason for p in [*self._requests.providers, *self._failed, *self._later]}

    def start(self, now: float, deadline_seconds: float) -> list[Action]:
        """Begin at `now`, in seconds of any clock; return the first actions."""
        self._requests.now = now
        self._deadline_seconds, self._deadline = deadline_seconds, now + deadline_seconds
        self._begin()
        return self._requests.take_actions()

    def step(self, answer: Answer | None, now: float) -> list[Action]:
        """Handle an answer, or with None what is due; return the actions that follow."""
        self._requests.now = now
        if now >= self._deadline and not self._over:
            self._end(f"not in {self._deadline_seconds:g} s")
        if answer is not None and not self._over:
            self._requests.answer(answer)
            self._check_stage()
        if not self._over:
            self._wake()
        return self._requests.take_actions()

    def _wake(self) -> None:
        """Do what is due."""
        if self._chunks is not None:
            self._stalled_at = max(self._stalled_at, self._chunks.stored_at + STALL_SECONDS)
        if self._stalled_at <= self._requests.now:
            self._replace_stalled()
        self._requests.repeat_due()
        if self._race is not None and self._race.wake_at <= self._requests.now and not self._over:
            self._ask_next()
        if self._chunks is not None and not self._over:
            self._chunks.wake()
        self._check_stage()

    # -- the end, and beginning again --------------------------------------------------------------------------------

    def _check_stage(self) -> None:
        """Act on the end of the stage of chunks."""
        end = None if self._chunks is None or self._over else self._chunks.end
        if end is StageEnd.COMPLETE:
            self._end()
        elif end is StageEnd.EXHAUSTED:
            self._exhausted()
        elif end is StageEnd.WRONG_SIZE:
            self._wrong_size()

    def _end(self, failure: str | None = None) -> None:
        self._over = True
        self._requests.act(EndFetch(failure))

    def _exhausted(self) -> None:
        """Go on with other providers, or fail: none of these is left."""
        providers = self._requests.providers
        if self._later:
            self._failed += providers
            self._requests.providers = self._next_providers()
            self._start_over()
        else:
            self._end("no provider is left" if providers else "nobody is known to hold it")

    def _next_providers(self, most: int = PROVIDERS) -> list[Provider]:
        return [self._later.popleft() for _ in range(min(most, len(self._later)))]

    def _replace_stalled(self) -> None:
        """Begin again with those that had no turn yet; the likeliest provider stays, and the rest come last."""
        likeliest, *others = self._requests.providers
        others.sort(key=lambda p: (p.had_turn, p.activity is not ProviderActivity.OUT))
        self._later.extend(p for p in others if not p.bad)
        self._failed += [p for p in others if p.bad]
        self._requests.providers = [likeliest, *self._next_providers(PROVIDERS - 1)]
        self._start_over()

    def _wrong_size(self) -> None:
        self._end(f"its size is not the {self._requests.size:,} bytes that were stated")

    def _start_over(self) -> None:
        """Cancel everything, and begin again with the providers that remain. The chunks that are here stay."""
        self._requests.cancel_all()
        self._chunks = self._race = None
        self._begin()

    def _begin(self) -> None:
        self._stalled_at = inf  # to check again what is on disk takes its time
        count = chunk_count(self._requests.size)
        if self._wanted is not None and any(i >= count for i in self._wanted):
            self._wrong_size()
        elif count <= 1:
            self._open([bytes(self._digest)][:count], self._wrong_size)  # the tree of one leaf is that leaf
        else:
            self._open(None, self._request_leaves)

    def _await_chunk(self) -> None:
        """Let others have their turn, if there are any, when no chunk comes from now on."""
        providers = len(self._requests.providers) + len(self._later)
        self._stalled_at = self._requests.now + STALL_SECONDS if providers > ACTIVE else inf

    def _query_failed(self, query: Query) -> None:
        """Go on without the provider: it gives no answer to this, or its answer was used up."""
        if not query.of_chunks:
            self._out_of_race(query.provider)
        elif self._chunks is not None:
            self._chunks.end_provider(query.provider)

    # -- leaf hashes -------------------------------------------------------------------------------------------------

    def _ask_next(self) -> None:
        race, now = self._race, self._requests.now
        if race is None:
            return
        if race.is_lost:
            self._exhausted()
            return
        for provider in [p for p, at in race.again.items() if at <= now]:
            del race.again[provider]
            race.waiting.append(provider)
        if race.waiting:
            provider = race.waiting.pop(0)
            race.running.add(provider.peer)
            race.next_at = now + HEDGE_SECONDS if race.waiting else inf
            self._requests.send(Query(provider, BlobOp.LEAVES, 0, self._leaves_given))

    def _out_of_race(self, provider: Provider) -> None:
        """Ask the next provider: this one gives no leaf hashes."""
        if self._race is not None and provider.peer in self._race.running:
            self._race.running.discard(provider.peer)
            self._race.pages.pop(provider.peer, None)
            self._requests.cancel_queries(lambda q: q.provider is provider and not q.of_chunks)
            self._race.given_up[provider.peer] += 1
            if not provider.bad:
                self._race.again[provider] = self._requests.again_at(self._race.given_up[provider.peer])
            self._ask_next()

    def _end_race(self) -> None:
        """Cancel the requests to the others: one has won."""
        for number in self._race.openings if self._race is not None else ():
            self._requests.cancel(number)
        self._race = None
        self._requests.cancel_queries(lambda q: not q.of_chunks)

    def _request_leaves(self) -> None:
        missing = range(chunk_count(self._requests.size)) if self._wanted is None else sorted(self._wanted)
        self._await_chunk()
        stage = self._chunks = self._stage(missing, opened=False)
        self._requests.request(ReserveEarly, lambda _: stage.begin_early())
        self._race = _Race(self._requests.usable())
        self._ask_next()

    def _leaves_given(self, query: Query, data: bytes) -> None:
        race, pages, provider = self._race, leaf_pages(self._requests.size), query.provider
        if race is None:
            return
        race.given_up.pop(provider.peer, None)
        received = race.pages.setdefault(provider.peer, {})
        received[query.index] = data
        if query.index == 0:  # alone at first: a stream that is gone costs one attempt
            for page in range(1, pages):
                self._requests.send(Query(provider, BlobOp.LEAVES, page, self._leaves_given))
        if len(received) == pages:
            raw = b"".join(received[page] for page in range(pages))
            leaves = [raw[i : i + 32] for i in range(0, len(raw), 32)]
            accusation = "sent leaf hashes that are not the blob's"
            number = self._open(leaves, lambda: self._requests.suspect(provider, accusation, of_chunks=False))
            race.openings.append(number)

    # -- chunks ------------------------------------------------------------------------------------------------------

    def _open(self, leaves: Sequence[bytes] | None, refused: Callable[[], None]) -> int:
        """Open the blob if it has these leaf hashes, else call `refused`; return the number of the action."""

        def opened(missing: Sequence[int] | None) -> None:
            if missing is None:
                refused()
                return
            self._end_race()
            self._await_chunk()
            if not missing:
                self._end()
            elif self._chunks is None:
                self._chunks = self._stage(missing, opened=True)
            else:
                self._chunks.open()

        return self._requests.request(lambda number: OpenBlob(number, self._requests.size, leaves), opened)

    def _stage(self, missing: Sequence[int], *, opened: bool) -> ChunkStage:
        count, priority = chunk_count(self._requests.size), self.chunk_priority
        picker = ChunkPicker(
            self._me,
            [p.peer for p in self._requests.providers],
            missing,
            count,
            relayed=count > RELAYED and self._wanted is None,  # other fetchers want other slices
            offset=int.from_bytes(bytes(self._digest)[:4], "big"),
            has=self._has,
            here=self._here,
            latency=lambda peer: self._streams.latency(peer, priority),
            loaded_latency=lambda peer: self._streams.loaded_latency(peer, priority),
            chance=self._chance,
        )
        return ChunkStage(self._requests, picker, count, priority=priority, streams=self._streams, opened=opened)


def _spread(peers: list[PeerKey], chance: random.Random) -> list[PeerKey]:
    """Return the likeliest first, and of the others, as many at a time as are active, in an order by chance.

    Those who fetch at once shall not all ask the same few.
    """
    spread = peers[:1]
    for i in range(1, len(peers), ACTIVE):
        neighbours = peers[i : i + ACTIVE]
        chance.shuffle(neighbours)
        spread += neighbours
    return spread
