"""Updates that travel while they are made: authors name chunks as they come to be, and others fetch these at once.

What is named (`Leaves`) is a hint for fetching, and nothing else: no round depends on it. Commit, then reveal stays as
it is: chunks are named to, and served to, those alone who have announced their own update in that round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import async_timeout

from peer.channel import UpdateGrows
from peer.node.directory import Directory
from peer.store import Ahead, Made, Store, StoreError, StoreFull
from peer.swarm.ahead import Deal
from peer.swarm.fetch import RELAYED
from protocol.chain import Chain
from protocol.errors import CairnError, MalformedError
from protocol.ids import Digest, PeerKey, Round, RunId, sha256
from protocol.merkle import chunk_count
from protocol.messages import MAX_LEAVES, Leaves, Signed, Signer
from protocol.rounds.machine import RoundMachine

log = logging.getLogger("peer.streaming")

TELL_SECONDS = 0.2
"""How often others are told what is new, when they are no more than CROWD; of more, each is told more rarely."""

CROWD = 32

STREAMS = 64
"""Updates of others that are fetched while they are made, at most."""

BEGINNINGS = 3
"""How often an author may begin anew in a round: its trainer may have died."""


class AheadSource(Protocol):
    """What a swarm offers for them (see `peer.swarm`)."""

    async def fetch_ahead(self, ahead: Ahead, author: PeerKey, deal: Deal, over: asyncio.Event) -> None: ...


@dataclass(frozen=True)
class Rules:
    """What the run's open round says. `announced(parent)`: who has announced in it, when it is the one after `parent`;
    `gathers(parent)`: every member gets every update in it; `may_serve`: as `RoundMachine.may_serve`."""

    run: RunId
    announced: Callable[[Digest], Collection[PeerKey]]
    gathers: Callable[[Digest], bool]
    may_serve: Callable[[Digest, PeerKey], str | None]
    is_member: Callable[[PeerKey], bool]

    @classmethod
    def of(cls, run: RunId, machine: RoundMachine, chain: Chain, directory: Directory) -> Rules:
        """A node's."""
        return cls(
            run,
            machine.announced,
            lambda parent: parent in chain and not chain.reduces(parent),
            machine.may_serve,
            directory.is_member,
        )


@dataclass
class _Own:
    """The update that is made here."""

    parent: Digest
    sequence: int
    name: Digest
    made: Made
    final: int = 0
    whole: asyncio.Event = field(default_factory=asyncio.Event)
    """All of it is there, as of just now."""
    has_header: bool = False
    told: Counter[PeerKey] = field(default_factory=Counter)
    """How many leaf hashes each was told."""


@dataclass
class _Coming:
    """One that another makes."""

    parent: Digest
    sequence: int
    name: Digest
    ahead: Ahead
    over: asyncio.Event
    fetching: asyncio.Task[None] | None = None


def stream_name(run: RunId, author: PeerKey, parent: Digest, sequence: int) -> Digest:
    """What the chunks of an update are asked for by while it has no digest."""
    return Digest(sha256(b"cairn/v1/growing", run, author, parent, sequence.to_bytes(8, "big")))


class Streaming:
    """Both sides of it. Updates have `size` bytes. `send` queues a message for one peer; `spawn` makes tasks."""

    def __init__(
        self,
        signer: Signer,
        store: Store,
        size: int,
        rules: Rules,
        *,
        source: Callable[[], AheadSource],
        send: Callable[[PeerKey, tuple[Signed, ...]], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ):
        self._run = rules.run
        self._signer = signer
        self._store = store
        self._size = size
        self._rules = rules
        self._source = source
        self._send = send
        self._spawn = spawn
        self._sequence = 0
        self._own: _Own | None = None
        self._coming: dict[PeerKey, _Coming] = {}
        self._begun: Counter[PeerKey] = Counter()
        """How often each has begun an update in this round; who lied may not again."""

    def wanted(self, parent: Digest) -> bool:
        """Whether updates after that record are streamed: not small ones, which are fetched in one go anyway."""
        return chunk_count(self._size) > RELAYED and self._rules.gathers(parent)

    def may_serve(self, blob: Digest, requester: PeerKey) -> str | None:
        """Why a blob, or what goes by such a name, must not be given to a peer yet; None when it may."""
        for stream in (self._own, *self._coming.values()):
            if stream is not None and stream.name == blob:
                open_to = self._rules.announced(stream.parent)
                return None if requester in open_to else "you have not announced an update in that round yet"
        return self._rules.may_serve(blob, requester)

    # -- the update that is made here ------------------------------------------------------------------------

    def grows(self, grown: UpdateGrows, round: Round) -> None:
        """The trainer has written so much of it."""
        own = self._own
        if own is None or own.parent != grown.parent:
            self.give_up()
            self._sequence = max(self._sequence + 1, int(time.time() * 1000))
            name = stream_name(self._run, self._signer.key, grown.parent, self._sequence)
            try:
                made = self._store.made(name, self._size, grown.path)
            except StoreError as e:
                log.info("an update is not sent while it is made: %s", e)
                return
            own = self._own = _Own(grown.parent, self._sequence, name, made)
            self._spawn(self._tell(own, round), "an update's first chunks")
        own.final = max(own.final, grown.final)
        if own.final >= self._size:
            own.whole.set()

    async def _tell(self, own: _Own, round: Round) -> None:
        """Name what is new to those who may have it."""
        try:
            while self._own is own and not own.has_header:
                own.whole.clear()
                if to := [k for k in self._rules.announced(own.parent) if k != self._signer.key]:
                    await asyncio.to_thread(own.made.grow, own.final)
                    known, said = own.made.known, dict[int, Signed[Leaves]]()
                    for key in to:
                        self._tell_one(own, round, key, known, said)
                with contextlib.suppress(asyncio.TimeoutError):
                    async with async_timeout.timeout(TELL_SECONDS * max(1.0, len(to) / CROWD)):
                        await own.whole.wait()
        except StoreError as e:
            log.info("an update is not sent on while it is made: %s", e)

    def _tell_one(self, own: _Own, round: Round, key: PeerKey, known: int, said: dict[int, Signed[Leaves]]) -> None:
        """Up to leaf `known`. `said`: what was signed for others just now, by its first index."""
        while (first := own.told[key]) < known:
            if first not in said:
                leaves = tuple(own.made.leaves[first : min(known, first + MAX_LEAVES)])
                said[first] = self._signer.sign(Leaves(self._run, round, own.parent, own.sequence, first, leaves))
            self._send(key, (said[first],))
            own.told[key] += len(said[first].body.leaves)

    def announced(self) -> None:
        """It has its header: there is nothing more to name. What was named is served until the round is over."""
        if self._own is not None:
            self._own.has_header = True

    def give_up(self) -> None:
        """It will not be finished, or its round is over."""
        own, self._own = self._own, None
        if own is not None:
            self._let_go(own.name)

    # -- those of others -------------------------------------------------------------------------------------

    def takes(self, message: Signed, sender: PeerKey) -> bool:
        """Whether a verified message is a word on an update that is being made: then it is dealt with here."""
        if not isinstance(message.body, Leaves):
            return False
        self._heard(message.body, message.author, sender)
        return True

    def _heard(self, word: Leaves, author: PeerKey, sender: PeerKey) -> None:
        me = self._signer.key
        announced = self._rules.announced(word.parent)
        if (
            sender != author
            or me not in announced  # we may not have it yet
            or author in announced  # it has its header: it is fetched as ever
            or not self._rules.is_member(author)
            or not self.wanted(word.parent)
        ):
            return
        stream = self._coming.get(author)
        if stream is None or stream.parent != word.parent or stream.sequence < word.sequence:
            stream = self._begin(author, word)
        elif stream.sequence > word.sequence:
            return
        if stream is not None and not stream.ahead.hint(word.first, word.leaves):
            self._bar(author, "it contradicts itself")

    def _begin(self, author: PeerKey, word: Leaves) -> _Coming | None:
        """The newest counts."""
        self._drop(author)
        self._begun[author] += 1
        if self._begun[author] > BEGINNINGS or len(self._coming) >= STREAMS:
            return None
        name = stream_name(self._run, author, word.parent, word.sequence)
        try:
            ahead = self._store.ahead(name, self._size)
        except StoreError as e:
            log.info("the update of %s is not fetched while it is made: %s", author.short, e)
            return None
        stream = self._coming[author] = _Coming(word.parent, word.sequence, name, ahead, asyncio.Event())
        stream.fetching = self._spawn(self._fetch(author, stream), "what comes of an update")
        return stream

    async def _fetch(self, author: PeerKey, stream: _Coming) -> None:
        try:
            await self._source().fetch_ahead(stream.ahead, author, lambda: self._deal(author, stream), stream.over)
        except MalformedError as e:
            self._bar(author, str(e))
        except CairnError as e:
            log.info("what comes of the update of %s is not fetched on: %s", author.short, e)
            if isinstance(e, StoreFull):
                self._drop(author)

    def _deal(self, author: PeerKey, stream: _Coming) -> Callable[[int], PeerKey]:
        """Each chunk is for one of those who may have it to ask of the author, and for the others of that one: so an
        author sends each about once."""
        me = self._signer.key
        those = sorted({me, *self._rules.announced(stream.parent)} - {author})
        turn = stream.name[0]

        def of_whom(index: int) -> PeerKey:
            dealt = those[(index + turn) % len(those)]
            return author if dealt == me else dealt

        return of_whom

    def _bar(self, author: PeerKey, why: str) -> None:
        """Nothing more of it in this round before its header."""
        log.info("what %s named of its update is not used: %s", author.short, why)
        self._drop(author)
        self._begun[author] = BEGINNINGS

    def _drop(self, author: PeerKey) -> None:
        if (stream := self._coming.pop(author, None)) is not None:
            stream.over.set()
            if stream.fetching is not None and stream.fetching is not asyncio.current_task():
                stream.fetching.cancel()
            self._let_go(stream.name)

    def _let_go(self, name: Digest) -> None:
        try:
            self._store.let_go(name)
        except StoreError as e:
            log.warning("%s", e)

    def became(self, blob: Digest, author: PeerKey) -> Callable[[], Awaitable[None]]:
        """The author's update has a header. What is to be done before its blob is fetched: that goes on from here."""
        return partial(self._became, blob, author)

    async def _became(self, blob: Digest, author: PeerKey) -> None:
        if (stream := self._coming.get(author)) is None or stream.over.is_set():
            return
        stream.over.set()
        if stream.fetching is not None:
            await asyncio.wait([stream.fetching])
        try:
            await asyncio.to_thread(self._store.became, stream.name, blob)
        except StoreError as e:
            log.info("what came of the update of %s is lost: %s", author.short, e)
        if self._coming.get(author) is stream:
            del self._coming[author]

    def turn(self, parent: Digest | None) -> None:
        """The open round is the one after this record now, or not known: what is of others is dropped."""
        if self._own is not None and self._own.parent != parent:
            self.give_up()
        for author in [a for a, stream in self._coming.items() if stream.parent != parent]:
            self._drop(author)
        self._begun.clear()
