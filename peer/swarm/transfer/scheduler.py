"""The scheduler of one fetch: what to request from which provider, and when again. A step function.

It has no I/O, clock or event loop. `start` and `step` return the actions that follow; the driver (`fetch.py`) carries
them out, answers with events, and calls `step` with None at `wake_at`. A fetch has these stages:

    size      if nobody stated the size: asked of one provider after the other, until one gives it
    leaves    the leaf hashes, likewise; meanwhile the first provider gives a few chunks (early)
    chunks    up to ACTIVE providers at once give chunks; `ChunkPicker` chooses which

Leaf hashes are checked against the digest, and chunks against the leaf hashes. A provider that gives wrong bytes is
dropped. One that is silent, busy, or not yet willing is asked again, or others are asked in its place.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from peer.swarm.transfer.actions import (
    Action,
    CancelRequest,
    CheckLeaves,
    CloseBlob,
    DropProvider,
    FailFetch,
    FinishFetch,
    LoadLeaves,
    OpenBlob,
    OpenChunkStream,
    QueryProvider,
    RequestChunk,
    RequestSlot,
    ReserveEarly,
)
from peer.swarm.transfer.chunk_picker import ChunkPicker
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
from peer.swarm.transfer.frames import (
    BITS_PER_PAGE,
    SIZE_BYTES,
    BlobOp,
    ReplyStatus,
    encode_size,
    leaf_pages,
    parse_size,
)
from peer.swarm.transfer.outcomes import ChunkCheck, Declined, Given, Lost, Outcome
from peer.swarm.transfer.providers import BITMAP_SECONDS, LOST_RETRIES, RETRIES, Activity, Pause, Provider
from peer.swarm.transfer.streams import Priority
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.merkle import CHUNK, chunk_count

BULK = 4 * 1024 * 1024
"""Blobs over this size have a stream of their own, so that smaller ones need not queue behind them."""

PROVIDERS = 32
"""Providers considered for one blob."""

ACTIVE = 8
"""Providers that chunks are requested from at the same time."""

RELAYED = 4
"""Of blobs with more chunks than this, fetchers give each other what they have before they ask a scarce seeder again.

For smaller ones it would only take longer."""

HEDGE_SECONDS = 0.5
"""After this time without a size or leaf hashes, another provider is asked for them."""

AGAIN_SECONDS = 3.0
"""A provider that had nothing of the blob is asked again after this time, while others still give it."""

EARLY, PROVED_EARLY = 3, 6
"""Chunks of one blob requested before their hashes are known, which wait in memory.

EARLY is one less than a new stream allows, so that the hashes need not wait. PROVED_EARLY, for a provider that gave
other chunks on the same stream, keeps its uplink busy until the rest is requested."""

UNPROVED = 4
"""Chunks requested from a provider at once before one has arrived, unless it gave others on the same stream."""

IDLE_SECONDS = 0.02
"""Seconds between two checks if a provider has something to give."""

FEW, LAST_SECONDS = 16, 0.02
"""With at most FEW chunks left, bitmaps are requested this often: at the end, the cost of one more round trip shows."""


class StreamView(Protocol):
    """What is known of the streams to providers, shared by all fetches."""

    def latency(self, peer: PeerKey, priority: Priority) -> float:
        """Return the recent seconds from a request to its reply; 0 when unknown."""
        ...

    def loaded_latency(self, peer: PeerKey, priority: Priority) -> float:
        """Return the same with a slow decay."""
        ...

    def has_given(self, peer: PeerKey, priority: Priority) -> bool:
        """Return whether a correct chunk has arrived on the open stream."""
        ...


class _Purpose(enum.Enum):
    SIZE = "the blob's size"
    LEAVES = "its leaf hashes"
    LEAVES_SUSPICION = "the provider's size of a blob of which it gave wrong leaf hashes"
    CHUNK_SUSPICION = "the provider's size of a blob of which it gave a wrong chunk"
    BITMAP = "which chunks the provider has"


@dataclass(eq=False, slots=True)
class _Query:
    provider: Provider
    op: BlobOp
    index: int
    purpose: _Purpose
    accusation: str = ""
    """Of a suspicion: what is reported if it is justified."""

    retry_at: float = inf


@dataclass(slots=True)
class _Race:
    """Providers asked for a size or leaf hashes, one after the other, until one gives it."""

    purpose: _Purpose
    waiting: list[Provider]
    running: set[PeerKey] = field(default_factory=set)
    next_at: float = inf
    pages: dict[PeerKey, dict[int, bytes]] = field(default_factory=dict)
    """Leaf hashes received, by page."""


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
        self.providers = [Provider(peer) for peer in _spread(list(dict.fromkeys(peers))[:PROVIDERS], chance)]
        self._now = 0.0
        self._deadline = inf
        self._actions: list[Action] = []
        self._last_number = 0
        self._over = False
        self._source: Provider | None = None
        """The provider whose word the size is."""

        # What waits for an event, by the number of the action, or for a time:
        self._queries: dict[int, _Query] = {}
        self._retries: list[_Query] = []
        self._slots: dict[int, Provider] = {}
        self._chunks: dict[int, Provider] = {}
        self._checks: dict[int, tuple[Provider, Sequence[bytes]]] = {}
        self._loading: int | None = None
        self._opening: int | None = None

        # The attempt at a blob of `_size` bytes:
        self._size = 0
        self._race: _Race | None = None
        self._opened = False
        self._picker: ChunkPicker | None = None
        self._waiting: list[Provider] = []
        self._active: dict[PeerKey, Provider] = {}
        self._again: list[tuple[float, Provider]] = []

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
        times = [self._deadline, *(q.retry_at for q in self._retries), *(p.wake_at for p in self._active.values())]
        if self._race is not None:
            times.append(self._race.next_at)
        if self._again and self._opened:
            times.append(self._again[0][0])
        return min(times)

    def reasons(self) -> dict[PeerKey, str]:
        """Return what each provider did last, for a person."""
        return {p.peer: p.reason for p in self.providers}

    def start(self, now: float) -> list[Action]:
        """Begin at `now`, in seconds of any clock; return the first actions."""
        self._now = now
        self._deadline = now + self._deadline_seconds
        if self._stated_size is None:
            self._start_race(_Purpose.SIZE)
        else:
            self._get(self._stated_size)
        return self._taken_actions()

    def step(self, event: Event | None, now: float) -> list[Action]:
        """Handle an event, or with None what is due; return the actions that follow."""
        self._now = now
        if now >= self._deadline and not self._over:
            self._fail(f"not in {self._deadline_seconds:g} s")
        if not self._over:
            self._handle(event)
        if not self._over:
            self._wake()
        return self._taken_actions()

    def _taken_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _handle(self, event: Event | None) -> None:
        match event:
            case Replied(number, outcome):
                if (query := self._queries.pop(number, None)) is not None:
                    self._query_replied(query, outcome)
                elif (provider := self._chunks.get(number)) is not None:
                    self._chunk_replied(provider, number, outcome)
            case SlotReady(number):
                if (provider := self._slots.pop(number, None)) is not None:
                    self._slot_ready(provider, number)
            case SlotLost(number, lost):
                if (provider := self._slots.pop(number, None)) is not None:
                    self._slot_lost(provider, lost)
            case ChunkChecked(number, check):
                if (provider := self._chunks.get(number)) is not None:
                    self._chunk_checked(provider, number, check)
            case LeavesLoaded(number, leaves) if number == self._loading:
                self._loading = None
                self._leaves_loaded(leaves)
            case LeavesChecked(number, valid):
                if (check := self._checks.pop(number, None)) is not None:
                    self._leaves_checked(*check, valid)
            case BlobOpened(number, missing) if number == self._opening:
                self._opening = None
                self._blob_opened(missing)
            case BlobMismatch(number) if number == self._opening:
                self._opening = None
                self._wrong_size()
            case EarlyReserved():
                if not self._opened and self._waiting and not self._active:
                    self._begin_provider(self._waiting.pop(0))

    def _wake(self) -> None:
        """Do what is due."""
        for query in [q for q in self._retries if q.retry_at <= self._now]:
            if query in self._retries:
                self._retries.remove(query)
                self._send(query)
        if self._race is not None and self._race.next_at <= self._now:
            self._ask_next()
        for provider in [p for p in self._active.values() if p.wake_at <= self._now]:
            if provider.wake_at <= self._now:
                self._wake_provider(provider)
        if self._opened and self._again and self._again[0][0] <= self._now:
            while self._again and self._again[0][0] <= self._now:
                self._waiting.append(self._again.pop(0)[1])
            self._fill()

    # -- the end, and beginning again --------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._over = True
        self._actions.append(FinishFetch())

    def _fail(self, why: str) -> None:
        self._over = True
        self._actions.append(FailFetch(why))

    def _unavailable(self) -> None:
        """Fail, or ask the others for the size if a provider stated it: no provider is left for a blob of this size."""
        why, source = "no provider is left" if self.providers else "nobody is known to hold it", self._source
        if source is not None:
            source.bad = True  # no proof against it, so no report
        if source is None or all(p.bad for p in self.providers):
            self._fail(why)
        else:
            self._start_over()

    def _wrong_size(self) -> None:
        """Fail, or ask the others for the size if a provider stated it: the blob has another one."""
        source, accusation = self._source, f"stated a wrong size ({self._size:,} bytes)"
        if source is None:
            self._fail(f"its size is not the {self._size:,} bytes that were stated")
        else:
            self._active.pop(source.peer, None)  # all that it was asked for is cancelled below
            self._drop_bad(source, accusation)
            self._start_over()

    def _start_over(self) -> None:
        """Cancel everything and ask the remaining providers for the size."""
        for number in [*self._queries, *self._slots, *self._chunks, *self._checks, self._loading, self._opening]:
            if number is not None:
                self._actions.append(CancelRequest(number))
        for waiting in (self._queries, self._slots, self._chunks, self._checks, self._retries):
            waiting.clear()
        for provider in self._active.values():
            provider.begin()
        self._loading = self._opening = self._source = self._picker = None
        self._active, self._waiting, self._again, self._opened = {}, [], [], False
        self._actions.append(CloseBlob())
        self._start_race(_Purpose.SIZE)

    # -- providers that fail -----------------------------------------------------------------------------------------

    def _usable(self) -> list[Provider]:
        """Return the providers that are left: those without recent failures first, else in the caller's order."""
        return sorted((p for p in self.providers if not p.bad), key=lambda p: bool(p.counts))

    def _failed(self, provider: Provider, outcome: Declined | Lost) -> Pause | None:
        """Count a failure; return how long to wait before the next request. None: it is of no more use."""
        provider.reason = outcome.reason
        if isinstance(outcome, Lost):
            if outcome.hostile:
                self._drop_bad(provider, outcome.reason)
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

    def _gave(self, provider: Provider) -> None:
        provider.counts.clear()
        provider.reason = "was still sending"

    def _drop_bad(self, provider: Provider, reason: str) -> None:
        """Drop a provider that broke the rules in a way that no fault of the network explains."""
        if not provider.bad:
            provider.bad = True
            provider.reason = reason
            self._actions.append(DropProvider(provider.peer, reason))
        self._end_provider(provider)

    # -- queries -----------------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _query(self, provider: Provider, op: BlobOp, index: int, purpose: _Purpose, accusation: str = "") -> None:
        self._send(_Query(provider, op, index, purpose, accusation))

    def _send(self, query: _Query) -> None:
        if query.provider.bad:
            self._query_failed(query)
            return
        number = self._number()
        self._queries[number] = query
        limit = SIZE_BYTES if query.op is BlobOp.SIZE else CHUNK
        priority = self.query_priority
        self._actions.append(QueryProvider(number, query.provider.peer, priority, query.op, query.index, limit))

    def _cancel_queries(self, unwanted: Callable[[_Query], bool]) -> None:
        for number in [n for n, query in self._queries.items() if unwanted(query)]:
            del self._queries[number]
            self._actions.append(CancelRequest(number))
        self._retries = [query for query in self._retries if not unwanted(query)]

    def _query_replied(self, query: _Query, outcome: Outcome) -> None:
        provider = query.provider
        if isinstance(outcome, Given):
            self._gave(provider)
            self._query_given(query, outcome.data)
        elif (pause := self._failed(provider, outcome)) is None:
            self._query_failed(query)
        else:
            if query.purpose is _Purpose.BITMAP:
                self._bitmap_delayed(provider)
                query.index = 0
            query.retry_at = self._now + pause.seconds
            self._retries.append(query)

    def _query_given(self, query: _Query, data: bytes) -> None:
        provider = query.provider
        match query.purpose:
            case _Purpose.SIZE:
                self._size_given(provider, data)
            case _Purpose.LEAVES:
                self._leaves_given(provider, query.index, data)
            case _Purpose.BITMAP:
                self._bitmap_given(provider, data)
            case _Purpose.LEAVES_SUSPICION | _Purpose.CHUNK_SUSPICION:
                # It is the provider's doing only if it holds the blob for one of the same size as we do. Otherwise the
                # one that stated the size may have lied, to set us against honest providers.
                if data == encode_size(self._size):
                    self._drop_bad(provider, query.accusation)
                else:
                    provider.reason = f"takes the blob for one of another size than {self._size:,} bytes"
                self._query_failed(query)

    def _query_failed(self, query: _Query) -> None:
        """The provider gives no answer to this, or its answer was used up: it is of no more use here."""
        if query.purpose in (_Purpose.BITMAP, _Purpose.CHUNK_SUSPICION):
            self._end_provider(query.provider)
        else:
            self._out_of_race(query.provider)

    # -- size and leaf hashes ----------------------------------------------------------------------------------------

    def _start_race(self, purpose: _Purpose) -> None:
        self._race = _Race(purpose, self._usable())
        self._ask_next()

    def _ask_next(self) -> None:
        race = self._race
        if race is None:
            return
        if race.waiting:
            provider = race.waiting.pop(0)
            race.running.add(provider.peer)
            race.next_at = self._now + HEDGE_SECONDS if race.waiting else inf
            op = BlobOp.SIZE if race.purpose is _Purpose.SIZE else BlobOp.LEAVES
            self._query(provider, op, 0, race.purpose)
        elif not race.running:
            self._unavailable()

    def _out_of_race(self, provider: Provider) -> None:
        """It gives no size, or no leaf hashes: the next one is asked."""
        if self._race is not None and provider.peer in self._race.running:
            self._race.running.discard(provider.peer)
            self._race.pages.pop(provider.peer, None)
            self._cancel_queries(lambda q: q.provider is provider and q.purpose in _OF_RACES)
            self._ask_next()

    def _end_race(self) -> None:
        """One has won."""
        self._race = None
        self._cancel_queries(lambda q: q.purpose in _OF_RACES)
        for number in self._checks:
            self._actions.append(CancelRequest(number))
        self._checks.clear()

    def _size_given(self, provider: Provider, data: bytes) -> None:
        try:
            size = parse_size(data)
        except MalformedError as e:
            self._drop_bad(provider, str(e))
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
            self._loading = self._number()
            self._actions.append(LoadLeaves(self._loading, size))

    def _leaves_loaded(self, leaves: Sequence[bytes] | None) -> None:
        if leaves is not None:
            self._open(leaves)
            return
        self._begin_chunks(range(chunk_count(self._size)) if self._wanted is None else sorted(self._wanted))
        self._start_race(_Purpose.LEAVES)
        if not self._over:
            self._actions.append(ReserveEarly())

    def _leaves_given(self, provider: Provider, index: int, data: bytes) -> None:
        race, pages = self._race, leaf_pages(self._size)
        if race is None:
            return
        received = race.pages.setdefault(provider.peer, {})
        received[index] = data
        if index == 0:  # alone at first: a stream that is gone costs one attempt
            for page in range(1, pages):
                self._query(provider, BlobOp.LEAVES, page, _Purpose.LEAVES)
        if len(received) == pages:
            raw = b"".join(received[page] for page in range(pages))
            leaves = [raw[i : i + 32] for i in range(0, len(raw), 32)]
            number = self._number()
            self._checks[number] = (provider, leaves)
            self._actions.append(CheckLeaves(number, self._size, leaves))

    def _leaves_checked(self, provider: Provider, leaves: Sequence[bytes], valid: bool) -> None:
        if valid:
            self._end_race()
            self._open(leaves)
        else:
            accusation = "sent leaf hashes that are not the blob's"
            self._query(provider, BlobOp.SIZE, 0, _Purpose.LEAVES_SUSPICION, accusation)

    def _open(self, leaves: Sequence[bytes]) -> None:
        self._opening = self._number()
        self._actions.append(OpenBlob(self._opening, self._size, leaves))

    def _blob_opened(self, missing: Sequence[int]) -> None:
        self._opened = True
        if not missing:
            self._finish()
            return
        if self._picker is None:
            self._begin_chunks(missing)
        for provider in [p for p in self._active.values() if p.activity is Activity.EARLY]:
            self._turn(provider)
        self._fill()

    # -- chunks: providers come and go -------------------------------------------------------------------------------

    def _begin_chunks(self, missing: Sequence[int]) -> None:
        count, priority = chunk_count(self._size), self.chunk_priority
        self._picker = ChunkPicker(
            self._me,
            [p.peer for p in self.providers],
            missing,
            count,
            relayed=count > RELAYED and self._wanted is None,  # of a slice, other fetchers want other chunks
            offset=int.from_bytes(bytes(self._digest)[:4], "big"),
            has=self._has,
            latency=lambda peer: self._streams.latency(peer, priority),
            loaded_latency=lambda peer: self._streams.loaded_latency(peer, priority),
            chance=self._chance,
        )
        self._waiting = self._usable()

    def _fill(self) -> None:
        """Begin with waiting providers while there is room."""
        while self._waiting and len(self._active) < ACTIVE:
            self._begin_provider(self._waiting.pop(0))
        if not self._active and self._opened and not self._over:
            self._unavailable()

    def _begin_provider(self, provider: Provider) -> None:
        provider.begin()
        self._active[provider.peer] = provider
        if provider.bad:
            self._end_provider(provider)
        elif self._chunk_picker.needs_bitmap(provider.peer):
            self._actions.append(OpenChunkStream(provider.peer, self.chunk_priority))
            self._request_bitmap(provider)
        else:
            self._turn(provider)

    def _end_provider(self, provider: Provider) -> None:
        """It gives no chunks for now: cancel what it was asked for."""
        if self._active.pop(provider.peer, None) is None:
            return
        if provider.slot is not None:
            self._slots.pop(provider.slot, None)
            self._actions.append(CancelRequest(provider.slot))
        for number in list(provider.requests):
            self._actions.append(CancelRequest(number))
            self._release(provider, number)
        self._cancel_queries(lambda q: q.provider is provider and q.purpose not in _OF_RACES)
        provider.begin()
        self._chunk_picker.set_idle(provider.peer)
        if provider.counts.pop(ReplyStatus.MISSING.name, 0) and not provider.bad:
            self._again.append((self._now + AGAIN_SECONDS, provider))
        if self._opened:
            self._fill()

    @property
    def _chunk_picker(self) -> ChunkPicker:
        assert self._picker is not None
        return self._picker

    # -- chunks: one provider ----------------------------------------------------------------------------------------

    def _turn(self, provider: Provider) -> None:
        """Request a slot for one more chunk, unless as many are under way as may be."""
        provider.wake_at = inf
        if provider.requests and (provider.suspected or len(provider.requests) >= self._limit(provider)):
            provider.activity = Activity.FULL
            return
        provider.activity = Activity.SLOT
        provider.slot = self._number()
        self._slots[provider.slot] = provider
        self._actions.append(RequestSlot(provider.slot, provider.peer, self.chunk_priority))

    def _limit(self, provider: Provider) -> float:
        """Return how many chunks may be under way from it, whatever the window of its stream."""
        gave = provider.proved or self._streams.has_given(provider.peer, self.chunk_priority)
        proved = gave and not provider.counts
        if not self._opened:
            return PROVED_EARLY if proved else EARLY
        return inf if proved else UNPROVED

    def _slot_ready(self, provider: Provider, slot: int) -> None:
        provider.slot = None
        index = self._chunk_picker.next(provider.peer, self._now) if provider.pause is None else None
        if index is not None:
            number = self._number()
            provider.requests[number] = index
            self._chunks[number] = provider
            self._actions.append(RequestChunk(number, slot, provider.peer, index))
            self._turn(provider)
            return
        self._actions.append(CancelRequest(slot))
        if provider.pause is not None:
            self._drain(provider)
        else:
            self._idle(provider)

    def _slot_lost(self, provider: Provider, lost: Lost) -> None:
        provider.slot = None
        provider.pause = self._stream_lost(provider, lost)
        if provider.pause is None:
            self._end_provider(provider)
        else:
            self._drain(provider)

    def _stream_lost(self, provider: Provider, lost: Lost) -> Pause | None:
        """Count it, unless the hashes are awaited: then the provider is asked for these too, where it counts."""
        return self._failed(provider, lost) if lost.hostile or self._opened else Pause(0.0)

    def _chunk_replied(self, provider: Provider, number: int, outcome: Outcome) -> None:
        match outcome:
            case Given():
                self._gave(provider)
                return  # the driver writes it
            case Declined():
                early = not self._opened or provider.pause is not None
                pause = Pause(0.0) if early else self._failed(provider, outcome)
            case Lost():
                pause = provider.pause or self._stream_lost(provider, outcome)
        self._release(provider, number)
        if pause is None:
            self._end_provider(provider)
        elif provider.peer in self._active:
            provider.pause = provider.pause or pause
            self._request_over(provider)

    def _chunk_checked(self, provider: Provider, number: int, check: ChunkCheck) -> None:
        index = provider.requests[number]
        match check:
            case ChunkCheck.STORED:
                provider.proved = True
                self._chunk_picker.received(index, self._now, provider.peer)
                self._release(provider, number)
                if self._chunk_picker.left:
                    self._request_over(provider)
                else:
                    self._finish()
            case ChunkCheck.WRONG_SIZE:
                self._wrong_size()
            case ChunkCheck.WRONG:
                provider.suspected = True
                accusation = f"sent a chunk {index} that is not the blob's"
                self._query(provider, BlobOp.SIZE, 0, _Purpose.CHUNK_SUSPICION, accusation)

    def _release(self, provider: Provider, number: int) -> None:
        """A chunk request is over."""
        self._chunks.pop(number, None)
        if (index := provider.requests.pop(number, None)) is not None:
            self._chunk_picker.release(provider.peer, index)

    def _request_over(self, provider: Provider) -> None:
        if provider.activity is Activity.FULL:
            self._turn(provider)
        elif provider.activity is Activity.DRAINING:
            self._drain(provider)

    def _drain(self, provider: Provider) -> None:
        """It failed: once nothing is under way from it, wait."""
        provider.activity = Activity.DRAINING
        if provider.requests:
            return
        if not self._opened:
            provider.pause = None
            provider.activity = Activity.EARLY
        elif provider.pause is not None:
            provider.activity = Activity.PAUSED
            provider.wake_at = self._now + provider.pause.seconds

    def _idle(self, provider: Provider) -> None:
        """There is nothing to request from it now."""
        picker = self._chunk_picker
        picker.refresh(self._now)
        if not picker.left:
            self._finish()
        elif picker.is_growing(provider.peer) and self._now >= provider.bitmap_due:
            self._request_bitmap(provider)
        else:
            provider.activity = Activity.IDLE
            provider.wake_at = self._now + IDLE_SECONDS

    def _wake_provider(self, provider: Provider) -> None:
        provider.wake_at = inf
        absent = False
        if provider.activity is Activity.PAUSED and provider.pause is not None:
            absent, provider.pause = provider.pause.absent, None
        if absent:
            self._request_bitmap(provider)
        else:
            self._turn(provider)

    # -- chunks: which ones a provider has ---------------------------------------------------------------------------

    def _request_bitmap(self, provider: Provider) -> None:
        provider.activity = Activity.BITMAP
        provider.pages, provider.bitmap_failures = [], 0
        self._query(provider, BlobOp.HAVE, 0, _Purpose.BITMAP)

    def _bitmap_delayed(self, provider: Provider) -> None:
        """It has no bitmap for us now, and is asked again from the first page on."""
        provider.pages = []
        provider.bitmap_failures += 1
        if provider.bitmap_failures > 1:  # the first time it may just be about to begin
            self._chunk_picker.set_idle(provider.peer)

    def _bitmap_given(self, provider: Provider, page: bytes) -> None:
        picker, count = self._chunk_picker, chunk_count(self._size)
        provider.pages.append(page)
        if len(provider.pages) < -(-count // BITS_PER_PAGE):
            self._query(provider, BlobOp.HAVE, len(provider.pages), _Purpose.BITMAP)
            return
        have = b"".join(provider.pages)[: -(-count // 8)]  # anything beyond would only cost time
        fastest, slowest = BITMAP_SECONDS
        news = picker.update(provider.peer, have, self._now)
        provider.bitmap_seconds = fastest if news else min(slowest, 1.5 * provider.bitmap_seconds)
        last = picker.left <= FEW
        provider.bitmap_due = self._now + (
            min(LAST_SECONDS, provider.bitmap_seconds) if last else provider.bitmap_seconds
        )
        self._turn(provider)


_OF_RACES = {_Purpose.SIZE, _Purpose.LEAVES, _Purpose.LEAVES_SUSPICION}


def _spread(peers: list[PeerKey], chance: random.Random) -> list[PeerKey]:
    """Return the likeliest first, the others by chance: those who fetch at once shall not all ask the same few."""
    others = peers[1:]
    chance.shuffle(others)
    return peers[:1] + others
