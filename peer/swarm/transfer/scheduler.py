"""The scheduler of one fetch: what to request from which provider, and when again. A step function.

It has no I/O, clock or event loop. `start` and `step` return the actions that follow; the driver (`fetch.py`) carries
them out, answers with events, and calls `step` with None at `wake_at`. A fetch has these stages:

    size      if nobody stated the size: asked of one provider after the other, until one gives it
    leaves    the leaf hashes, likewise; meanwhile the first provider gives a few chunks (early)
    chunks    up to ACTIVE providers at once give chunks (`ChunkStage`); `ChunkPicker` chooses which

Leaf hashes are checked against the digest, and chunks against the leaf hashes. A provider that gives wrong bytes is
dropped. One that is silent, busy, or not yet willing is asked again, or others are asked in its place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from peer.swarm.transfer.actions import (
    Action,
    CancelRequest,
    CheckLeaves,
    CloseBlob,
    FailFetch,
    FinishFetch,
    LoadLeaves,
    OpenBlob,
    ReserveEarly,
)
from peer.swarm.transfer.chunk_picker import ChunkPicker
from peer.swarm.transfer.chunk_stage import OF_CHUNKS, ChunkStage, StageEnd, StreamView
from peer.swarm.transfer.events import (
    BlobMismatch,
    BlobOpened,
    ChunkChecked,
    EarlyReserved,
    Event,
    LeavesChecked,
    LeavesLoaded,
    Replied,
    SlotLost,
    SlotReady,
)
from peer.swarm.transfer.frames import BlobOp, encode_size, leaf_pages, parse_size
from peer.swarm.transfer.outcomes import Given, Outcome
from peer.swarm.transfer.providers import Provider
from peer.swarm.transfer.requests import Purpose, Query, Requests
from peer.swarm.transfer.streams import Priority
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.merkle import chunk_count

BULK = 4 * 1024 * 1024
"""Blobs over this size have a stream of their own, so that smaller ones need not queue behind them."""

PROVIDERS = 32
"""Providers considered for one blob."""

RELAYED = 4
"""Of blobs with more chunks than this, fetchers give each other what they have before they ask a scarce seeder again.

For smaller ones it would only take longer."""

HEDGE_SECONDS = 0.5
"""After this time without a size or leaf hashes, another provider is asked for them."""


@dataclass(slots=True)
class _Race:
    """Providers asked for a size or leaf hashes, one after the other, until one gives it."""

    purpose: Purpose
    waiting: list[Provider]
    running: set[PeerKey] = field(default_factory=set)
    next_at: float = inf
    pages: dict[PeerKey, dict[int, bytes]] = field(default_factory=dict)
    """Leaf hashes received, by page."""

    checks: dict[int, tuple[Provider, Sequence[bytes]]] = field(default_factory=dict)
    """Leaf hashes that are being checked, by the number of the action."""


class Scheduler:
    """The decisions of one fetch.

    `peers` are the providers, the likeliest first. `size` is the blob's size in bytes that somebody signed for; with
    None the providers state it, and at most `max_size` is accepted. With `chunks`, only these are fetched. `has` says
    whether a chunk is in the store. All chance comes from `chance`.
    """

    def __init__(
        self,
        me: PeerKey,
        peers: Iterable[PeerKey],
        digest: Digest,
        size: int | None,
        *,
        max_size: int,
        chunks: Collection[int] | None,
        deadline_seconds: float,
        streams: StreamView,
        has: Callable[[int], bool],
        chance: random.Random,
    ):
        self._me = me
        self._digest = digest
        self._stated_size = size
        self._max_size = max_size
        self._wanted = chunks
        self._deadline_seconds = deadline_seconds
        self._streams = streams
        self._has = has
        self._chance = chance
        self._requests = Requests(_spread(list(dict.fromkeys(peers))[:PROVIDERS], chance), self.query_priority, chance)
        self._deadline = inf
        self._over = False

        # The attempt at a blob of `_size` bytes, as `_source` stated it (None: the caller):
        self._size = 0
        self._source: Provider | None = None
        self._race: _Race | None = None
        self._loading: int | None = None
        self._opening: int | None = None
        self._chunks: ChunkStage | None = None

    # -- the interface -----------------------------------------------------------------------------------------------

    @property
    def chunk_priority(self) -> Priority:
        """The priority of chunk requests."""
        size = self._stated_size or self._max_size
        return Priority.BULK if size > BULK else Priority.SMALL

    @property
    def query_priority(self) -> Priority:
        """The priority of everything else. Of many chunks it must not wait behind these."""
        few = self._wanted is not None or chunk_count(self._stated_size or self._max_size) <= RELAYED
        return self.chunk_priority if few else Priority.QUERY

    @property
    def wake_at(self) -> float:
        """When to call `step` with None, unless there is an event before."""
        race = inf if self._race is None else self._race.next_at
        chunks = inf if self._chunks is None else self._chunks.wake_at
        return min(self._deadline, self._requests.retry_at, race, chunks)

    def reasons(self) -> dict[PeerKey, str]:
        """Return the last failure or state of each provider, for a person."""
        return {p.peer: p.reason for p in self._requests.providers}

    def start(self, now: float) -> list[Action]:
        """Begin at `now`, in seconds of any clock; return the first actions."""
        self._requests.now = now
        self._deadline = now + self._deadline_seconds
        if self._stated_size is None:
            self._start_race(Purpose.SIZE)
        else:
            self._get(self._stated_size)
        return self._requests.take_actions()

    def step(self, event: Event | None, now: float) -> list[Action]:
        """Handle an event, or with None what is due; return the actions that follow."""
        self._requests.now = now
        if now >= self._deadline and not self._over:
            self._fail(f"not in {self._deadline_seconds:g} s")
        if not self._over:
            self._handle(event)
        if not self._over:
            self._wake()
        return self._requests.take_actions()

    def _handle(self, event: Event | None) -> None:
        match event:
            case Replied(number, outcome):
                if (query := self._requests.answered(number)) is not None:
                    self._query_replied(query, outcome)
                elif self._chunks is not None:
                    self._chunks.chunk_replied(number, outcome)
            case SlotReady(number) if self._chunks is not None:
                self._chunks.slot_ready(number)
            case SlotLost(number, lost) if self._chunks is not None:
                self._chunks.slot_lost(number, lost)
            case ChunkChecked(number, check) if self._chunks is not None:
                self._chunks.chunk_checked(number, check)
            case EarlyReserved() if self._chunks is not None:
                self._chunks.begin_early()
            case LeavesLoaded(number, leaves) if number == self._loading:
                self._leaves_loaded(leaves)
            case LeavesChecked(number, valid) if self._race is not None and number in self._race.checks:
                self._leaves_checked(*self._race.checks.pop(number), valid)
            case BlobOpened(number, missing) if number == self._opening:
                self._blob_opened(missing)
            case BlobMismatch(number) if number == self._opening:
                self._wrong_size()
        self._check_stage()

    def _wake(self) -> None:
        """Do what is due."""
        for query in self._requests.take_due():
            self._send(query)
        if self._race is not None and self._race.next_at <= self._requests.now:
            self._ask_next()
        if self._chunks is not None and not self._over:
            self._chunks.wake()
        self._check_stage()

    # -- the end, and beginning again --------------------------------------------------------------------------------

    def _check_stage(self) -> None:
        """Act on the end of the stage of chunks."""
        end = None if self._chunks is None or self._over else self._chunks.end
        if end is StageEnd.COMPLETE:
            self._finish()
        elif end is StageEnd.EXHAUSTED:
            self._exhausted()
        elif end is StageEnd.WRONG_SIZE:
            self._wrong_size()

    def _finish(self) -> None:
        self._over = True
        self._requests.act(FinishFetch())

    def _fail(self, why: str) -> None:
        self._over = True
        self._requests.act(FailFetch(why))

    def _exhausted(self) -> None:
        """Fail, or ask the others for the size if a provider stated it: no provider is left for a blob of this size."""
        providers, source = self._requests.providers, self._source
        if source is not None:
            source.bad = True  # no proof against it, so no report
        if source is None or all(p.bad for p in providers):
            self._fail("no provider is left" if providers else "nobody is known to hold it")
        else:
            self._start_over()

    def _wrong_size(self) -> None:
        """Fail, or ask the others for the size if a provider stated it: the blob has another one."""
        if self._source is None:
            self._fail(f"its size is not the {self._size:,} bytes that were stated")
        else:
            self._requests.drop(self._source, f"stated a wrong size ({self._size:,} bytes)")
            self._start_over()

    def _start_over(self) -> None:
        """Cancel everything and ask the remaining providers for the size."""
        self._requests.cancel(lambda query: True)
        if self._chunks is not None:
            self._chunks.cancel()
        for number in [self._loading, self._opening, *(self._race.checks if self._race is not None else ())]:
            if number is not None:
                self._requests.act(CancelRequest(number))
        self._loading = self._opening = self._source = self._chunks = None
        self._requests.act(CloseBlob())
        self._start_race(Purpose.SIZE)

    # -- queries -----------------------------------------------------------------------------------------------------

    def _send(self, query: Query) -> None:
        if not self._requests.send(query):
            self._query_failed(query)

    def _query_replied(self, query: Query, outcome: Outcome) -> None:
        if isinstance(outcome, Given):
            self._requests.gave(query.provider)
            self._query_given(query, outcome.data)
        elif (pause := self._requests.failed(query.provider, outcome)) is None:
            self._query_failed(query)
        else:
            if query.purpose is Purpose.BITMAP and self._chunks is not None:
                self._chunks.bitmap_delayed(query)
            self._requests.repeat(query, pause.seconds)

    def _query_given(self, query: Query, data: bytes) -> None:
        provider = query.provider
        match query.purpose:
            case Purpose.SIZE:
                self._size_given(provider, data)
            case Purpose.LEAVES:
                self._leaves_given(provider, query.index, data)
            case Purpose.BITMAP:
                if self._chunks is not None:
                    self._chunks.bitmap_given(provider, data)
            case Purpose.LEAVES_SUSPICION | Purpose.CHUNK_SUSPICION:
                # It is the provider's doing only if it holds the blob for one of the same size as we do. Otherwise the
                # one that stated the size may have lied, to set us against honest providers.
                if data == encode_size(self._size):
                    self._requests.drop(provider, query.accusation)
                else:
                    provider.reason = f"takes the blob for one of another size than {self._size:,} bytes"
                self._query_failed(query)

    def _query_failed(self, query: Query) -> None:
        """Go on without the provider: it gives no answer to this, or its answer was used up."""
        if query.purpose not in OF_CHUNKS:
            self._out_of_race(query.provider)
        elif self._chunks is not None:
            self._chunks.end_provider(query.provider)

    # -- size and leaf hashes ----------------------------------------------------------------------------------------

    def _start_race(self, purpose: Purpose) -> None:
        self._race = _Race(purpose, self._requests.usable())
        self._ask_next()

    def _ask_next(self) -> None:
        race = self._race
        if race is None:
            return
        if race.waiting:
            provider = race.waiting.pop(0)
            race.running.add(provider.peer)
            race.next_at = self._requests.now + HEDGE_SECONDS if race.waiting else inf
            op = BlobOp.SIZE if race.purpose is Purpose.SIZE else BlobOp.LEAVES
            self._send(Query(provider, op, 0, race.purpose))
        elif not race.running:
            self._exhausted()

    def _out_of_race(self, provider: Provider) -> None:
        """Ask the next provider: this one gives no size, or no leaf hashes."""
        if self._race is not None and provider.peer in self._race.running:
            self._race.running.discard(provider.peer)
            self._race.pages.pop(provider.peer, None)
            self._requests.cancel(lambda q: q.provider is provider and q.purpose not in OF_CHUNKS)
            self._ask_next()

    def _end_race(self) -> None:
        """Cancel the queries to the others: one has won."""
        if self._race is not None:
            for number in self._race.checks:
                self._requests.act(CancelRequest(number))
        self._race = None
        self._requests.cancel(lambda q: q.purpose not in OF_CHUNKS)

    def _size_given(self, provider: Provider, data: bytes) -> None:
        try:
            size = parse_size(data)
        except MalformedError as e:
            self._requests.drop(provider, str(e))
            self._out_of_race(provider)
            return
        if size > self._max_size:
            provider.reason = f"states a size of {size:,} bytes, and at most {self._max_size:,} are accepted"
            self._out_of_race(provider)
            return
        self._end_race()
        self._source = provider
        self._get(size)

    def _get(self, size: int) -> None:
        """Get a blob of this size."""
        self._size = size
        if chunk_count(size) <= 1:
            self._open([bytes(self._digest)][: chunk_count(size)])  # the tree of one leaf is that leaf
        else:
            self._loading = self._requests.number()
            self._requests.act(LoadLeaves(self._loading, size))

    def _leaves_loaded(self, leaves: Sequence[bytes] | None) -> None:
        self._loading = None
        if leaves is not None:
            self._open(leaves)
            return
        missing = range(chunk_count(self._size)) if self._wanted is None else sorted(self._wanted)
        self._chunks = self._stage(missing, opened=False)
        self._requests.act(ReserveEarly())
        self._start_race(Purpose.LEAVES)

    def _leaves_given(self, provider: Provider, index: int, data: bytes) -> None:
        race, pages = self._race, leaf_pages(self._size)
        if race is None:
            return
        received = race.pages.setdefault(provider.peer, {})
        received[index] = data
        if index == 0:  # alone at first: a stream that is gone costs one attempt
            for page in range(1, pages):
                self._send(Query(provider, BlobOp.LEAVES, page, Purpose.LEAVES))
        if len(received) == pages:
            raw = b"".join(received[page] for page in range(pages))
            leaves = [raw[i : i + 32] for i in range(0, len(raw), 32)]
            number = self._requests.number()
            race.checks[number] = (provider, leaves)
            self._requests.act(CheckLeaves(number, self._size, leaves))

    def _leaves_checked(self, provider: Provider, leaves: Sequence[bytes], valid: bool) -> None:
        if valid:
            self._end_race()
            self._open(leaves)
        else:
            accusation = "sent leaf hashes that are not the blob's"
            self._send(Query(provider, BlobOp.SIZE, 0, Purpose.LEAVES_SUSPICION, accusation))

    # -- chunks ------------------------------------------------------------------------------------------------------

    def _open(self, leaves: Sequence[bytes]) -> None:
        self._opening = self._requests.number()
        self._requests.act(OpenBlob(self._opening, self._size, leaves))

    def _blob_opened(self, missing: Sequence[int]) -> None:
        self._opening = None
        if not missing:
            self._finish()
        elif self._chunks is None:
            self._chunks = self._stage(missing, opened=True)
        else:
            self._chunks.open()

    def _stage(self, missing: Sequence[int], *, opened: bool) -> ChunkStage:
        count, priority = chunk_count(self._size), self.chunk_priority
        picker = ChunkPicker(
            self._me,
            [p.peer for p in self._requests.providers],
            missing,
            count,
            relayed=count > RELAYED and self._wanted is None,  # of a slice, other fetchers want other chunks
            offset=int.from_bytes(bytes(self._digest)[:4], "big"),
            has=self._has,
            latency=lambda peer: self._streams.latency(peer, priority),
            loaded_latency=lambda peer: self._streams.loaded_latency(peer, priority),
            chance=self._chance,
        )
        return ChunkStage(self._requests, picker, count, priority=priority, streams=self._streams, opened=opened)


def _spread(peers: list[PeerKey], chance: random.Random) -> list[PeerKey]:
    """Return the likeliest first, the others by chance: those who fetch at once shall not all ask the same few."""
    others = peers[1:]
    chance.shuffle(others)
    return peers[:1] + others
