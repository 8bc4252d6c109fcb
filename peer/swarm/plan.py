"""Which chunk of a blob to ask of whom next: each of a scarce source once, the rarest first. Pure: no I/O, no clock.

A *source* had the whole blob when we first heard of it; a *fellow* is fetching it as we are. With fewer sources than
fetchers, each chunk is the *share* of one of those who fetch, by its index and their keys, so that all agree without a
word: it is asked of a source by that one, and the others get it from there. So a slow uplink sends each chunk about
once, however many want it. When our share is here, others' are taken over from fellows that do not get on: one chunk
more with every WAIT_SECONDS (or a source's latency) in which they all got nothing; without such a limit from
fellows that are slower together than a source would be alone. A source as quick as they gives all that it is asked for.
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
"""After so long, in which a holder gave nothing, another may be asked the same. With less, a line that many share is
asked for the same chunks by several: with 12 who exchange updates of 6 chunks 20% more was sent with half of it."""

ASKED_AT_ONCE, MUTE_SECONDS = 3, 5.0
"""Holders asked for one chunk, at most, but for those of whom nothing came for so long: after a power cut the first
three may all be gone, and a stream takes 15 s to say so."""

QUICK = 1.5
"""A source that answers within so many times what a fellow takes (the median) has a line as good as theirs."""

LEAST_SHARE = 2
"""Chunks that may be asked of one holder at once, however few are left."""


class Kind(enum.Enum):
    UNHEARD = "has not said yet what it has"
    SOURCE = "had it all from the start"
    FELLOW = "is fetching it too"
    IDLE = "does not give it now"


@dataclass(slots=True)
class _Holder:
    kind: Kind
    have: bytes = b""
    said: bytes = b""
    """All that it ever said to have: what it says again is no news of how it gets on."""

    stack: list[int] = field(default_factory=list)
    """Of a fellow: what it has, the rarest last; some of it may be here by now."""

    asked: int = 0
    gave_at: float = float("-inf")
    """When a chunk of it came last: what was asked of it later is behind that one."""

    waits_since: float | None = None
    """A source has had no chunk of our share to give since."""


@dataclass(frozen=True, slots=True)
class _Asked:
    peer: PeerKey
    at: float
    taken_over: bool


@dataclass(slots=True)
class _Rates:
    """Chunks of our share that came of sources, and chunks that fellows got, since the first was asked for."""

    began: float | None = None
    came: int = 0
    came_at: float = 0.0
    grew: int = 0
    grew_at: float = 0.0

    def fellows_lag(self, now: float) -> bool:
        if self.began is None or self.came < 2:
            return False
        sources = self.came / max(1e-3, self.came_at - self.began)
        return self.grew / max(1e-3, now - self.began) < sources / 2


class Plan:
    """Of one fetch. `missing` are the chunks that are wanted and not here; `count` is how many the whole blob has.

    `here` says whether a chunk has come by another way; `latency` how long a holder's reply takes of late, in seconds,
    and `laden` the same with what was slow forgotten slowly (`latency`, if that is not said). `turn` is any number that
    all who fetch this blob agree on, and that is another for another blob. Unless `relayed`, holders are asked without
    their saying first what they have, and nobody waits for fellows. The first of `peers` is taken for a source until it
    says otherwise.
    """

    def __init__(
        self,
        me: PeerKey,
        peers: Iterable[PeerKey],
        missing: Sequence[int],
        count: int,
        *,
        relayed: bool,
        turn: int = 0,
        here: Callable[[int], bool],
        latency: Callable[[PeerKey], float] = lambda peer: 0.0,
        laden: Callable[[PeerKey], float] | None = None,
    ):
        self._me = me
        self._count = count
        self._missing = set(missing)
        self._todo = set(missing)  # neither here nor asked for
        self._asked: dict[int, list[_Asked]] = {}
        self.relayed = relayed
        self._turn = turn
        self._here = here
        self._latency = latency
        self._laden = laden or latency
        self._holders = {peer: _Holder(Kind.UNHEARD if relayed else Kind.SOURCE) for peer in peers}
        for first in list(self._holders.values())[:1]:
            first.kind = Kind.SOURCE
        self._seen: Counter[int] = Counter()  # how many fellows have it
        self._rates = _Rates()
        self._share: list[int] = []
        self._rest: list[int] = []
        self._shared = False
        self._fetchers: list[PeerKey] = []
        self._deal()

    @property
    def left(self) -> int:
        """How many chunks are still to come."""
        return len(self._missing)

    # -- what is heard of holders ------------------------------------------------------------------------------------

    def learn(self, peer: PeerKey, have: bytes, now: float) -> bool:
        """A holder's bitmap (lowest bit first). Whether there is something new in it that we want."""
        holder = self._holders[peer]
        if holder.kind is not Kind.FELLOW and self._is_whole(have):
            holder.kind = Kind.SOURCE
            self._deal()
            return True
        before, holder.have, holder.kind = holder.have, have, Kind.FELLOW
        new = [i for i in _new_bits(before, have) if i < self._count]
        self._seen.update(new)
        self._seen.subtract(i for i in _new_bits(have, before) if i < self._count)
        wanted = [i for i in new if i in self._missing]
        holder.stack = [i for i in {*holder.stack, *wanted} if _bit(have, i)]
        random.shuffle(holder.stack)
        holder.stack.sort(key=lambda i: -self._seen[i])
        if got := sum(not _bit(holder.said, i) for i in wanted):
            self._rates.grew += got
            self._rates.grew_at = now
        holder.said = _either(holder.said, have)
        self._deal()
        return bool(wanted)

    def gives_nothing(self, peer: PeerKey) -> None:
        """It does not answer, refuses, or has nothing of it: for now nobody should wait for its share."""
        holder = self._holders[peer]
        if self.relayed and holder.kind is not Kind.IDLE:
            holder.kind = Kind.IDLE
            self._seen.subtract(i for i in _new_bits(b"", holder.have) if i < self._count)
            holder.have = b""
            holder.stack.clear()
            self._deal()

    def is_unheard(self, peer: PeerKey) -> bool:
        """Whether it has to say what it has before it can be asked for anything: it never did, or had nothing."""
        return self._holders[peer].kind in (Kind.UNHEARD, Kind.IDLE)

    def has_more_soon(self, peer: PeerKey) -> bool:
        """Whether it may have more than it said: it is fetching too."""
        holder = self._holders[peer]
        return holder.kind is Kind.FELLOW and not self._is_whole(holder.have)

    # -- asking ------------------------------------------------------------------------------------------------------

    def next(self, peer: PeerKey, now: float) -> int | None:
        """The chunk to ask of this holder, which counts as asked from now until `over`; None: nothing, as yet."""
        holder = self._holders[peer]
        if self._rates.began is None:
            self._rates.began = now
        while self._missing:
            taken_over = False
            index = None
            if self._shared and holder.kind is Kind.SOURCE and self._is_as_quick_as_fellows(peer):
                holder.waits_since = None
                if (index := self._pop_share()) is None:
                    index, taken_over = self._rarest(), True
            elif holder.asked < self._most():
                if holder.kind is Kind.FELLOW:
                    index = self._pop(holder.stack)
                elif holder.kind is Kind.SOURCE:
                    index = self._pop_share()
                    if index is None and self._shared:
                        index, taken_over = self._take_over(peer, holder, now), True
                    else:
                        holder.waits_since = None
            if index is None:
                index = self._late(peer, now)
            if index is not None and self._here(index):
                self.came(index, now)
                continue
            if index is not None:
                self._todo.discard(index)
                self._asked.setdefault(index, []).append(_Asked(peer, now, taken_over))
                holder.asked += 1
            return index
        return None

    def came(self, index: int, now: float, peer: PeerKey | None = None) -> None:
        """The chunk is here, from this holder (None: by another way)."""
        if peer is not None:
            self._holders[peer].gave_at = now
        self._missing.discard(index)
        self._todo.discard(index)
        for asked in self._asked.pop(index, []):
            if peer in (None, asked.peer) and self._holders[asked.peer].kind is Kind.SOURCE and not asked.taken_over:
                self._rates.came += 1
                self._rates.came_at = now

    def over(self, peer: PeerKey, index: int) -> None:
        """What was asked of this holder is answered or given up; unless the chunk came, it is asked for again."""
        self._holders[peer].asked -= 1
        if index not in self._missing:
            return
        left = [a for a in self._asked.pop(index, []) if a.peer != peer]
        if left:
            self._asked[index] = left
            return
        self._todo.add(index)
        self._offer(index)

    def look(self, now: float) -> None:
        """Find what has come by another way."""
        for index in [i for i in self._missing if self._here(i)]:
            self.came(index, now)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_whole(self, have: bytes) -> bool:
        every = (1 << self._count) - 1
        return int.from_bytes(have, "little") & every == every

    def _most(self) -> int:
        """Of one holder at once: an even part of what is left, so that a slow one never holds up much at the end."""
        if not self.relayed:
            return self.left  # small: quicker from one than shared out
        active = sum(h.kind in (Kind.SOURCE, Kind.FELLOW) for h in self._holders.values())
        return self.left if active <= 1 else max(LEAST_SHARE, -(-self.left // active))

    def _deal(self) -> None:
        """Say anew whose share is what, when those who fetch are others than before."""
        kinds = [h.kind for h in self._holders.values()]
        fetchers = [p for p, h in self._holders.items() if h.kind in (Kind.FELLOW, Kind.UNHEARD)]
        fetchers = sorted([self._me, *fetchers], key=bytes)
        shared = self.relayed and len(fetchers) > max(1, kinds.count(Kind.SOURCE))
        if not shared:
            fetchers = [self._me]
        if fetchers == self._fetchers:
            return
        self._fetchers, self._shared = fetchers, shared
        self._share = [i for i in self._todo if self._is_ours(i)]
        self._rest = [i for i in self._todo if not self._is_ours(i)]
        random.shuffle(self._share)
        random.shuffle(self._rest)

    def _is_ours(self, index: int) -> bool:
        return self._fetchers[(index + self._turn) % len(self._fetchers)] == self._me

    def _offer(self, index: int) -> None:
        """It may be asked of anybody who has it."""
        (self._share if self._is_ours(index) else self._rest).append(index)
        for holder in self._holders.values():
            if holder.kind is Kind.FELLOW and _bit(holder.have, index):
                holder.stack.append(index)

    def _pop(self, stack: list[int]) -> int | None:
        while stack:
            if (index := stack.pop()) in self._todo:
                return index
        return None

    def _pop_share(self) -> int | None:
        """The next one of our share that no fellow has: one that has it gives it sooner than a scarce source."""
        while (index := self._pop(self._share)) is not None and self._shared and self._seen[index] > 0:
            self._rest.append(index)
        return index

    def _take_over(self, peer: PeerKey, source: _Holder, now: float) -> int | None:
        """One of others' shares."""
        if source.waits_since is None:
            source.waits_since = now
        unit = max(WAIT_SECONDS, 1.5 * self._latency(peer))
        under_way = sum(a.taken_over and a.peer == peer for asked in self._asked.values() for a in asked)
        if now - source.waits_since < WAIT_SECONDS or not self._rates.fellows_lag(now):
            if under_way >= int((now - max(source.waits_since, self._rates.grew_at)) / unit):
                return None
        return self._rarest()

    def _is_as_quick_as_fellows(self, peer: PeerKey) -> bool:
        """A source whose line is no scarcer than others': to wait for fellows would only take longer."""
        others = (p for p, h in self._holders.items() if h.kind in (Kind.FELLOW, Kind.UNHEARD))
        theirs = [t for p in others if (t := self._laden(p))]
        return bool(theirs) and 0 < self._laden(peer) <= QUICK * median(theirs)

    def _rarest(self) -> int | None:
        """Of a few of others' shares."""
        few = [i for i in (self._pop(self._rest) for _ in range(8)) if i is not None]
        few.sort(key=lambda i: -self._seen[i])
        index = few.pop() if few else None
        self._rest += few
        return index

    def _late(self, peer: PeerKey, now: float) -> int | None:
        """One that was asked of others and is late, and that this holder has and gives sooner."""
        mine = self._latency(peer)
        holder = self._holders[peer]
        for index, asked in self._asked.items():
            last = asked[-1]
            waited, theirs = now - last.at, self._latency(last.peer)
            silent = min(waited, now - self._holders[last.peer].gave_at)
            if (
                waited > max(LATE_SECONDS, mine)
                and (silent > max(LATE_SECONDS, 1.5 * theirs) or mine < 0.5 * theirs)
                and sum(not self._is_mute(a, now) for a in asked) < ASKED_AT_ONCE
                and (holder.kind is Kind.SOURCE or _bit(holder.have, index))
                and all(a.peer != peer for a in asked)
            ):
                return index
        return None

    def _is_mute(self, asked: _Asked, now: float) -> bool:
        """Nothing comes of it any more, however slow it is."""
        heard_at = max(asked.at, self._holders[asked.peer].gave_at)
        return now - heard_at > max(MUTE_SECONDS, 2 * self._latency(asked.peer))


def _bit(bits: bytes, index: int) -> bool:
    return index >> 3 < len(bits) and bool(bits[index >> 3] >> (index & 7) & 1)


def _either(a: bytes, b: bytes) -> bytes:
    """The bits of both."""
    return (int.from_bytes(a, "little") | int.from_bytes(b, "little")).to_bytes(max(len(a), len(b)), "little")


def _new_bits(before: bytes, after: bytes) -> Iterable[int]:
    """Indices of the bits that are set in `after` only."""
    for at, byte in enumerate(after):
        if new := byte & ~(before[at] if at < len(before) else 0):
            yield from (8 * at + bit for bit in range(8) if new >> bit & 1)
