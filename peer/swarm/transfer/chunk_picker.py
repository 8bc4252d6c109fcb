"""The choice of the chunk to request from a provider: each of a scarce seeder once, the rarest first. Pure.

A *seeder* had the whole blob when it first said what it has; a *leecher* is fetching it, as this peer is. With fewer
seeders than fetchers, each chunk is assigned to one of the fetchers, by its index and their keys, so that all agree
without a message. That one requests it from a seeder, and the others get it from there. So a slow uplink sends each
chunk about once, whatever the number of fetchers.

When the assigned chunks are here, other fetchers' chunks are taken over if these do not progress. One more is taken for
every WAIT_SECONDS (or 1.5 times a seeder's latency, if longer) in which no leecher got anything. There is no such limit
if the leechers are together slower than a seeder would be alone. From a seeder as fast as the leechers everything is
requested.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from protocol.ids import PeerKey

WAIT_SECONDS = 0.5
LATE_SECONDS = 1.0
"""After this time without a chunk of a provider, another may be asked for the same chunks.

With less, several ask for the same chunks on a network path that many share. With half of it, 12 peers that exchanged
updates of 6 chunks sent 20% more."""

REQUESTS_PER_CHUNK, SILENT_SECONDS = 3, 5.0
"""Maximum concurrent requests for one chunk, without those to providers that gave nothing for SILENT_SECONDS.

After a power cut the first three may all be gone, and a stream needs 15 s to notice."""

FAST_SEEDER = 1.2
"""A seeder whose latency is at most this multiple of the leechers' median has as good a network path as theirs.

When all peers fetch from all, their latencies are alike. An author whose uplink was a fifth of each leecher's had 1.3
to 1.5 times theirs, since QUIC begins slowly on streams that are little used. With 1.5 it sent up to 2.5 copies. The
price: 8 peers at 20 Mbit/s that all fetch from all take 3 to 8% longer with 1.2, in the simulator."""

MIN_REQUESTS = 2
"""Chunks that may be requested from one provider at once, however few are left."""

RAREST_OF = 8
"""Chunks of other fetchers from which the rarest is chosen."""


class ProviderKind(enum.Enum):
    """The parts of the blob that a provider has."""

    UNKNOWN = "has not said yet what it has"
    SEEDER = "had it all from the start"
    LEECHER = "is fetching it too"
    IDLE = "does not give it now"


@dataclass(slots=True)
class _Holdings:
    kind: ProviderKind
    have: bytes = b""
    claimed: bytes = b""
    """All that it ever claimed to have: repeating a claim is no progress."""

    stack: list[int] = field(default_factory=list)
    """A leecher's chunks, the rarest last; some of them may be here by now."""

    requested: int = 0
    gave_at: float = float("-inf")
    """When a chunk of it arrived last: later requests are answered after that one."""

    waits_since: float | None = None
    """Since when a seeder has had no assigned chunk to give."""


@dataclass(frozen=True, slots=True)
class _ChunkRequest:
    peer: PeerKey
    at: float
    taken_over: bool


@dataclass(slots=True)
class _Progress:
    """Assigned chunks received from seeders, and chunks that leechers got, since the first request."""

    began: float | None = None
    received: int = 0
    received_at: float = 0.0
    grown: int = 0
    grown_at: float = 0.0

    def do_leechers_lag(self, now: float) -> bool:
        if self.began is None or self.received < 2:
            return False
        seeders = self.received / max(1e-3, self.received_at - self.began)
        return self.grown / max(1e-3, now - self.began) < seeders / 2


class ChunkPicker:
    """The choice of chunks for one fetch.

    `missing` are the wanted chunks that are not here; `count` is the number of chunks of the whole blob. `has` says
    whether a chunk is here, by this fetch or another, and `here` how many are. `latency` gives the recent seconds from
    a provider's request to its reply, and `loaded_latency` the same with a slow decay (by default `latency`).

    `offset` is any number on which all fetchers of this blob agree, and which differs between blobs. Unless `relayed`,
    providers are asked before they say what they have, and nobody waits for leechers. The first of `peers` counts as a
    seeder until it says otherwise.
    """

    def __init__(
        self,
        me: PeerKey,
        peers: Iterable[PeerKey],
        missing: Sequence[int],
        count: int,
        *,
        relayed: bool,
        offset: int = 0,
        has: Callable[[int], bool],
        here: Callable[[], int],
        latency: Callable[[PeerKey], float] = lambda peer: 0.0,
        loaded_latency: Callable[[PeerKey], float] | None = None,
        chance: random.Random,
    ):
        self._me = me
        self._count = count
        self._missing = set(missing)
        self._todo = set(missing)  # neither here nor requested
        self._requests: dict[int, list[_ChunkRequest]] = {}
        self.relayed = relayed
        self._offset = offset
        self._has = has
        self._here = here
        self._noted = float("-inf")  # as many as are `here`, unless one has arrived that is still in `_missing`
        self._latency = latency
        self._loaded_latency = loaded_latency or latency
        self._chance = chance
        self._providers = {p: _Holdings(ProviderKind.UNKNOWN if relayed else ProviderKind.SEEDER) for p in peers}
        for first in list(self._providers.values())[:1]:
            first.kind = ProviderKind.SEEDER
        self._copies: Counter[int] = Counter()  # the number of leechers that have a chunk
        self._progress = _Progress()
        self._assigned: list[int] = []
        self._others: list[int] = []
        self._shared = False
        self._fetchers: list[PeerKey] = []
        self._assign()

    @property
    def left(self) -> int:
        """The number of chunks still to come."""
        return len(self._missing)

    # -- what providers have -----------------------------------------------------------------------------------------

    def update(self, peer: PeerKey, have: bytes, now: float) -> bool:
        """Note a provider's bitmap (lowest bit first); return whether it has new chunks that are wanted."""
        provider = self._providers[peer]
        if provider.kind is not ProviderKind.LEECHER and self._is_whole(have):
            provider.kind = ProviderKind.SEEDER
            self._assign()
            return True
        before, provider.have, provider.kind = provider.have, have, ProviderKind.LEECHER
        new = [i for i in _new_bits(before, have) if i < self._count]
        self._copies.update(new)
        lost = {i for i in _new_bits(have, before) if i < self._count}
        self._copies.subtract(lost)
        wanted = [i for i in new if i in self._missing]
        provider.stack = [i for i in {*provider.stack, *wanted} if i not in lost]
        self._chance.shuffle(provider.stack)
        provider.stack.sort(key=self._copies.__getitem__, reverse=True)
        if got := sum(not _bit(provider.claimed, i) for i in wanted):
            self._progress.grown += got
            self._progress.grown_at = now
        provider.claimed = _either(provider.claimed, have)
        self._assign()
        return bool(wanted)

    def set_idle(self, peer: PeerKey) -> None:
        """Note that it does not answer, refuses, or has no chunk: for now nobody should wait for its assigned ones."""
        provider = self._providers[peer]
        if self.relayed and provider.kind is not ProviderKind.IDLE:
            provider.kind = ProviderKind.IDLE
            self._copies.subtract(i for i in _new_bits(b"", provider.have) if i < self._count)
            provider.have = b""
            provider.stack.clear()
            self._assign()

    def needs_bitmap(self, peer: PeerKey) -> bool:
        """Return whether it must say what it has before anything is requested: it never did, or had nothing."""
        return self._providers[peer].kind in (ProviderKind.UNKNOWN, ProviderKind.IDLE)

    def is_growing(self, peer: PeerKey) -> bool:
        """Return whether it may have more than it said, as it is fetching too."""
        provider = self._providers[peer]
        return provider.kind is ProviderKind.LEECHER and not self._is_whole(provider.have)

    # -- requests ----------------------------------------------------------------------------------------------------

    def next(self, peer: PeerKey, now: float) -> int | None:
        """Return the chunk to request from a provider now, which counts as requested until `release`; None: nothing."""
        provider = self._providers[peer]
        if self._progress.began is None:
            self._progress.began = now
        while self._missing:
            taken_over = False
            index = None
            if self._shared and provider.kind is ProviderKind.SEEDER and self._is_as_fast_as_leechers(peer):
                provider.waits_since = None
                if (index := self._pop_assigned()) is None:
                    index, taken_over = self._rarest(), True
            elif provider.requested < self._max_requests():
                if provider.kind is ProviderKind.LEECHER:
                    index = self._pop(provider.stack)
                elif provider.kind is ProviderKind.SEEDER:
                    index = self._pop_assigned()
                    if index is None and self._shared:
                        index, taken_over = self._take_over(peer, provider, now), True
                    else:
                        provider.waits_since = None
            if index is None:
                index = self._late(peer, now)
            if index is not None and self._has(index):
                self.received(index, now)
                continue
            if index is not None:
                self._todo.discard(index)
                self._requests.setdefault(index, []).append(_ChunkRequest(peer, now, taken_over))
                provider.requested += 1
            return index
        return None

    def received(self, index: int, now: float, peer: PeerKey | None = None) -> None:
        """Note that a chunk is here, from this provider (None: by another fetch)."""
        if peer is not None:
            self._providers[peer].gave_at = now
        if index in self._missing:
            self._missing.discard(index)
            self._noted += 1
        self._todo.discard(index)
        for request in self._requests.pop(index, []):
            is_seeder = self._providers[request.peer].kind is ProviderKind.SEEDER
            if peer in (None, request.peer) and is_seeder and not request.taken_over:
                self._progress.received += 1
                self._progress.received_at = now

    def release(self, peer: PeerKey, index: int) -> None:
        """Note that a request is answered or cancelled; a chunk that is not here will be requested again."""
        self._providers[peer].requested -= 1
        if index not in self._missing:
            return
        left = [r for r in self._requests.pop(index, []) if r.peer != peer]
        if left:
            self._requests[index] = left
            return
        self._todo.add(index)
        self._offer(index)

    def refresh(self, now: float) -> None:
        """Note the chunks that have arrived by another fetch. It searches only when more are here than noted."""
        if (here := self._here()) == self._noted:
            return
        for index in [i for i in self._missing if self._has(i)]:
            self.received(index, now)
        self._noted = here  # counted before the search: a chunk that arrives meanwhile is searched for again

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_whole(self, have: bytes) -> bool:
        every = (1 << self._count) - 1
        return int.from_bytes(have, "little") & every == every

    def _max_requests(self) -> int:
        """Return how many chunks one provider may be asked for at once.

        It is an even share of what is left, so that a slow provider never delays much at the end.
        """
        if not self.relayed:
            return self.left  # a small blob is here sooner from one provider than from several
        active = sum(p.kind in (ProviderKind.SEEDER, ProviderKind.LEECHER) for p in self._providers.values())
        return self.left if active <= 1 else max(MIN_REQUESTS, -(-self.left // active))

    def _assign(self) -> None:
        """Assign the chunks again if the fetchers have changed."""
        kinds = [p.kind for p in self._providers.values()]
        fetchers = [
            peer for peer, p in self._providers.items() if p.kind in (ProviderKind.LEECHER, ProviderKind.UNKNOWN)
        ]
        fetchers = sorted([self._me, *fetchers], key=bytes)
        shared = self.relayed and len(fetchers) > max(1, kinds.count(ProviderKind.SEEDER))
        if not shared:
            fetchers = [self._me]
        if fetchers == self._fetchers:
            return
        self._fetchers, self._shared = fetchers, shared
        self._assigned = [i for i in self._todo if self._is_ours(i)]
        self._others = [i for i in self._todo if not self._is_ours(i)]
        self._chance.shuffle(self._assigned)
        self._chance.shuffle(self._others)

    def _is_ours(self, index: int) -> bool:
        return self._fetchers[(index + self._offset) % len(self._fetchers)] == self._me

    def _offer(self, index: int) -> None:
        """Make a chunk available for requests to every provider that has it."""
        (self._assigned if self._is_ours(index) else self._others).append(index)
        for provider in self._providers.values():
            if provider.kind is ProviderKind.LEECHER and _bit(provider.have, index):
                provider.stack.append(index)

    def _pop(self, stack: list[int]) -> int | None:
        while stack:
            if (index := stack.pop()) in self._todo:
                return index
        return None

    def _pop_assigned(self) -> int | None:
        """Return the next assigned chunk that no leecher has: a leecher gives it sooner than a scarce seeder."""
        while (index := self._pop(self._assigned)) is not None and self._shared and self._copies[index] > 0:
            self._others.append(index)
        return index

    def _take_over(self, peer: PeerKey, seeder: _Holdings, now: float) -> int | None:
        """Return a chunk assigned to another fetcher, if it is time to take one over."""
        if seeder.waits_since is None:
            seeder.waits_since = now
        unit = max(WAIT_SECONDS, 1.5 * self._latency(peer))
        under_way = sum(r.taken_over and r.peer == peer for requests in self._requests.values() for r in requests)
        if now - seeder.waits_since < WAIT_SECONDS or not self._progress.do_leechers_lag(now):
            if under_way >= int((now - max(seeder.waits_since, self._progress.grown_at)) / unit):
                return None
        return self._rarest()

    def _is_as_fast_as_leechers(self, peer: PeerKey) -> bool:
        """Return whether a seeder's uplink is no scarcer than others': then waiting for leechers only takes longer."""
        kinds = (ProviderKind.LEECHER, ProviderKind.UNKNOWN)
        theirs = [t for peer, p in self._providers.items() if p.kind in kinds and (t := self._loaded_latency(peer))]
        return bool(theirs) and 0 < self._loaded_latency(peer) <= FAST_SEEDER * median(theirs)

    def _rarest(self) -> int | None:
        """Return the rarest of a few chunks assigned to other fetchers."""
        few = [i for i in (self._pop(self._others) for _ in range(RAREST_OF)) if i is not None]
        few.sort(key=lambda i: -self._copies[i])
        index = few.pop() if few else None
        self._others += few
        return index

    def _late(self, peer: PeerKey, now: float) -> int | None:
        """Return a chunk requested from other providers that is late, and that this one has and gives sooner."""
        mine = self._latency(peer)
        provider = self._providers[peer]
        for index, requests in self._requests.items():
            last = requests[-1]
            waited, theirs = now - last.at, self._latency(last.peer)
            silent = min(waited, now - self._providers[last.peer].gave_at)
            if (
                waited > max(LATE_SECONDS, mine)
                and (silent > max(LATE_SECONDS, 1.5 * theirs) or mine < 0.5 * theirs)
                and sum(not self._is_silent(r, now) for r in requests) < REQUESTS_PER_CHUNK
                and (provider.kind is ProviderKind.SEEDER or _bit(provider.have, index))
                and all(r.peer != peer for r in requests)
            ):
                return index
        return None

    def _is_silent(self, request: _ChunkRequest, now: float) -> bool:
        """Return whether the provider gave nothing for longer than its slowness explains."""
        active_at = max(request.at, self._providers[request.peer].gave_at)
        return now - active_at > max(SILENT_SECONDS, 2 * self._latency(request.peer))


def _bit(bits: bytes, index: int) -> bool:
    return index >> 3 < len(bits) and bool(bits[index >> 3] >> (index & 7) & 1)


def _either(a: bytes, b: bytes) -> bytes:
    """Return the bits of both."""
    return (int.from_bytes(a, "little") | int.from_bytes(b, "little")).to_bytes(max(len(a), len(b)), "little")


def _new_bits(before: bytes, after: bytes) -> Iterable[int]:
    """Yield the indices of the bits that are set in `after` only."""
    for at, byte in enumerate(after):
        if new := byte & ~(before[at] if at < len(before) else 0):
            yield from (8 * at + bit for bit in range(8) if new >> bit & 1)
