"""The chunks of a blob of known size: which providers give them at the same time, and what each of them is doing."""

from __future__ import annotations

import enum
from collections import Counter
from math import inf
from typing import Protocol

from peer.swarm.transfer.actions import CancelRequest, ChunkCheck, Priority, RequestChunk, RequestSlot
from peer.swarm.transfer.chunk_picker import ChunkPicker
from peer.swarm.transfer.congestion import FIRST
from peer.swarm.transfer.frames import BITS_PER_PAGE, BlobOp, BlobReply, Lost, ReplyStatus
from peer.swarm.transfer.requests import BITMAP_SECONDS, Pause, Provider, ProviderActivity, Query, Requests
from protocol.ids import PeerKey

ACTIVE = 8
"""Providers that chunks are requested from at the same time."""

EARLY = FIRST - 1
PROVED_EARLY = 2 * EARLY
"""Chunks of one blob requested before their hashes are known, which wait in memory.

With EARLY, one less than a new stream allows, the hashes need not wait. PROVED_EARLY, for a provider that gave
other chunks on the same stream, keeps its uplink busy until the rest is requested."""

UNPROVED = FIRST
"""Chunks requested from a provider at once before one has arrived, unless it gave others on the same stream."""

IDLE_SECONDS = 0.02
"""Seconds between two checks if a provider has something to give."""

FEW, LAST_SECONDS = 16, 0.02
"""With at most FEW chunks left, bitmaps are requested this often: at the end, the cost of one more round trip shows."""


class StreamView(Protocol):
    """Measurements of the streams to providers, shared by all fetches."""

    def latency(self, peer: PeerKey, priority: Priority) -> float:
        """Return the recent seconds from a request to its reply; 0 when unknown."""
        ...

    def loaded_latency(self, peer: PeerKey, priority: Priority) -> float:
        """Return the same with a slow decay."""
        ...

    def has_given(self, peer: PeerKey, priority: Priority) -> bool:
        """Return whether a correct chunk has arrived on the open stream."""
        ...


class StageEnd(enum.Enum):
    """How the stage ends."""

    COMPLETE = "all that is wanted is here"
    EXHAUSTED = "no provider is left"
    WRONG_SIZE = "the blob has another size"


class ChunkStage:
    """The chunks of one attempt at a blob of `count` chunks. `end` is set when it is over.

    Until `open` is called the hashes are not known. Then only a few chunks are requested, of one provider (early).
    """

    def __init__(
        self,
        requests: Requests,
        picker: ChunkPicker,
        count: int,
        *,
        priority: Priority,
        streams: StreamView,
        opened: bool,
    ):
        self.end: StageEnd | None = None
        self.stored_at = -inf
        """When a chunk was stored last."""
        self._requests = requests
        self._picker = picker
        self._count = count
        self._priority = priority
        self._streams = streams
        self._opened = opened
        self._waiting = requests.usable()
        self._active: dict[PeerKey, Provider] = {}
        self._again: dict[Provider, float] = {}
        """When to begin again with those that ended, while others are left."""
        self._given_up: Counter[PeerKey] = Counter()
        """How often each failed for good since its last chunk. To have nothing of the blob yet is no such failure."""
        for provider in requests.providers:
            provider.begin()
        if opened:
            self._fill()

    @property
    def wake_at(self) -> float:
        """When to call `wake`."""
        again = self._again.values() if self._opened else ()
        return min((*again, *(p.wake_at for p in self._active.values())), default=inf)

    # -- what the scheduler calls ------------------------------------------------------------------------------------

    def begin_early(self) -> None:
        """Request a few chunks of the likeliest provider before the hashes are known."""
        if not self._opened and self._waiting and not self._active:
            self._begin(self._waiting.pop(0))

    def open(self) -> None:
        """Request chunks of all providers: the hashes are known."""
        self._opened = True
        for provider in [p for p in self._active.values() if p.activity is ProviderActivity.EARLY]:
            self._turn(provider)
        self._fill()

    def wake(self) -> None:
        """Do what is due, and end the providers that turned out to be bad."""
        now = self._requests.now
        for provider in [p for p in self._active.values() if p.wake_at <= now]:
            if provider.wake_at <= now:
                self._wake_provider(provider)
        if self._opened and (due := [p for p, at in self._again.items() if at <= now]):
            for provider in due:
                del self._again[provider]
            self._waiting += due
            self._fill()
        for provider in [p for p in self._active.values() if p.bad]:
            self.end_provider(provider)

    # -- providers come and go ---------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Begin with waiting providers while there is room. Those that were given up do not keep the stage going."""
        while self._waiting and len(self._active) < ACTIVE:
            self._begin(self._waiting.pop(0))
        left = (*self._active, *(p.peer for p in self._waiting))
        if self._opened and self.end is None and all(self._given_up[peer] for peer in left):
            self.end = StageEnd.EXHAUSTED

    def _begin(self, provider: Provider) -> None:
        provider.begin()
        provider.had_turn = True
        self._active[provider.peer] = provider
        if provider.bad:
            self.end_provider(provider)
        elif self._picker.needs_bitmap(provider.peer):
            self._open_stream(provider)
            self._request_bitmap(provider)
        else:
            self._turn(provider)

    def end_provider(self, provider: Provider) -> None:
        """Cancel what a provider was asked for: it gives no chunks for now."""
        if self._active.pop(provider.peer, None) is None:
            return
        if provider.slot is not None:
            self._requests.cancel(provider.slot)
        for number in list(provider.requests):
            self._requests.cancel(number)
            self._release(provider, number)
        self._requests.cancel_queries(lambda q: q.provider is provider and q.of_chunks)
        provider.begin()
        self._picker.set_idle(provider.peer)
        self._given_up[provider.peer] += ReplyStatus.MISSING.name not in provider.counts
        provider.counts.clear()  # or it would never have its turn while many others have nothing to give
        if not provider.bad:
            self._again[provider] = self._requests.again_at(self._given_up[provider.peer])
        if self._opened:
            self._fill()

    # -- one provider ------------------------------------------------------------------------------------------------

    def _open_stream(self, provider: Provider) -> None:
        """Open the stream for chunks in advance. A failure shows when a slot is requested."""
        slot = self._requests.request(
            lambda number: RequestSlot(number, provider.peer),
            lambda lost: self._requests.act(CancelRequest(slot)) if lost is None else None,
        )

    def _turn(self, provider: Provider) -> None:
        """Request a slot for one more chunk, unless as many are under way as may be."""
        provider.wake_at = inf
        if provider.requests and (provider.suspected or len(provider.requests) >= self._limit(provider)):
            provider.activity = ProviderActivity.FULL
            return
        provider.activity = ProviderActivity.SLOT
        provider.slot = slot = self._requests.request(
            lambda number: RequestSlot(number, provider.peer),
            lambda lost: self._slot_answered(provider, slot, lost),
        )

    def _limit(self, provider: Provider) -> float:
        """Return how many chunks may be under way from it, whatever the window of its stream."""
        gave = provider.proved or self._streams.has_given(provider.peer, self._priority)
        proved = gave and not provider.counts
        if not self._opened:
            return PROVED_EARLY if proved else EARLY
        return inf if proved else UNPROVED

    def _slot_answered(self, provider: Provider, slot: int, lost: Lost | None) -> None:
        """Request a chunk with a slot, or return it. Pause or end a provider whose stream broke."""
        provider.slot = None
        if lost is not None:
            provider.pause = self._stream_lost(provider, lost)
            if provider.pause is None:
                self.end_provider(provider)
            else:
                self._drain(provider)
            return
        index = self._picker.next(provider.peer, self._requests.now) if provider.pause is None else None
        if index is not None:
            number = self._requests.request(
                lambda number: RequestChunk(number, slot, provider.peer, index),
                lambda outcome: self._chunk_answered(provider, number, outcome),
            )
            provider.requests[number] = index
            self._turn(provider)
            return
        self._requests.act(CancelRequest(slot))
        if provider.pause is not None:
            self._drain(provider)
        else:
            self._idle(provider)

    def _stream_lost(self, provider: Provider, lost: Lost) -> Pause | None:
        """Count it, unless the hashes are awaited: then the provider is asked for these too, where it counts."""
        return self._requests.failed(provider, lost) if lost.hostile or self._opened else Pause(0.0)

    def _chunk_answered(self, provider: Provider, number: int, outcome: ChunkCheck | BlobReply | Lost) -> None:
        if isinstance(outcome, ChunkCheck):
            self._requests.gave(provider)
            self._chunk_checked(provider, number, outcome)
            return
        if isinstance(outcome, Lost):
            pause = provider.pause or self._stream_lost(provider, outcome)
        elif provider.pause is not None or not self._opened:
            pause = Pause(0.0)
        else:
            pause = self._requests.failed(provider, outcome)
        self._release(provider, number)
        if pause is None:
            self.end_provider(provider)
        else:
            provider.pause = provider.pause or pause
            self._request_over(provider)

    def _chunk_checked(self, provider: Provider, number: int, check: ChunkCheck) -> None:
        index = provider.requests[number]
        match check:
            case ChunkCheck.STORED:
                provider.proved = True
                del self._given_up[provider.peer]
                self.stored_at = self._requests.now
                self._picker.received(index, self._requests.now, provider.peer)
                self._release(provider, number)
                if self._picker.left:
                    self._request_over(provider)
                else:
                    self.end = StageEnd.COMPLETE
            case ChunkCheck.WRONG_SIZE:
                self.end = StageEnd.WRONG_SIZE
            case ChunkCheck.WRONG:
                provider.suspected = True
                self._requests.suspect(provider, f"sent a chunk {index} that is not the blob's", of_chunks=True)

    def _release(self, provider: Provider, number: int) -> None:
        """Forget a request for a chunk: it is over."""
        self._picker.release(provider.peer, provider.requests.pop(number))

    def _request_over(self, provider: Provider) -> None:
        if provider.activity is ProviderActivity.FULL:
            self._turn(provider)
        elif provider.activity is ProviderActivity.DRAINING:
            self._drain(provider)

    def _drain(self, provider: Provider) -> None:
        """Wait until nothing is under way from a provider that failed, then pause it."""
        provider.activity = ProviderActivity.DRAINING
        if provider.requests:
            return
        if not self._opened:
            provider.pause = None
            provider.activity = ProviderActivity.EARLY
        elif provider.pause is not None:
            provider.activity = ProviderActivity.PAUSED
            provider.wake_at = self._requests.now + provider.pause.seconds

    def _idle(self, provider: Provider) -> None:
        """Look for chunks of other fetches, or for a newer bitmap: there is nothing to request from it now."""
        now = self._requests.now
        self._picker.refresh(now)
        if not self._picker.left:
            self.end = StageEnd.COMPLETE
        elif self._picker.is_growing(provider.peer) and now >= provider.bitmap_due:
            self._request_bitmap(provider)
        else:
            provider.activity = ProviderActivity.IDLE
            provider.wake_at = now + IDLE_SECONDS

    def _wake_provider(self, provider: Provider) -> None:
        provider.wake_at = inf
        absent = False
        if provider.activity is ProviderActivity.PAUSED and provider.pause is not None:
            absent, provider.pause = provider.pause.absent, None
        if absent:
            self._request_bitmap(provider)
        else:
            self._turn(provider)

    # -- bitmaps -----------------------------------------------------------------------------------------------------

    def _request_bitmap(self, provider: Provider, page: int = 0) -> None:
        provider.activity = ProviderActivity.BITMAP
        if page == 0:
            provider.pages = []
        query = Query(provider, BlobOp.HAVE, page, self._bitmap_given, of_chunks=True, delayed=self._bitmap_delayed)
        self._requests.send(query)

    def _bitmap_delayed(self, query: Query) -> None:
        """Prepare to request a bitmap again, from its first page on."""
        query.index, query.provider.pages = 0, []
        if query.repeats > 1:  # the first time it may just be about to begin
            self._picker.set_idle(query.provider.peer)

    def _bitmap_given(self, query: Query, page: bytes) -> None:
        """Note a page of a bitmap; request the next page, or chunks."""
        provider = query.provider
        provider.pages.append(page)
        if len(provider.pages) < -(-self._count // BITS_PER_PAGE):
            self._request_bitmap(provider, len(provider.pages))
            return
        have = b"".join(provider.pages)[: -(-self._count // 8)]  # anything beyond would only cost time
        fastest, slowest = BITMAP_SECONDS
        news = self._picker.update(provider.peer, have, self._requests.now)
        seconds = provider.bitmap_seconds = fastest if news else min(slowest, 1.5 * provider.bitmap_seconds)
        if self._picker.left <= FEW:
            seconds = min(LAST_SECONDS, seconds)
        provider.bitmap_due = self._requests.now + seconds
        self._turn(provider)
