"""The node's side of the swarm: who is there, who is introduced to whom, and what is sent to whom.

It keeps one `Swarm` running for as long as the node lives. A peer that was not known is told of the others, and the
others of it, so that members find each other however the DHT fares.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from peer.errors import PeerError
from peer.node.briefs import Briefs
from peer.node.directory import Directory
from peer.node.inbox import MAX_MESSAGES
from peer.node.membership import Membership
from peer.node.outbox import NETWORK_ERRORS, Outbox
from peer.node.relaying import Relaying
from peer.store import StoreError
from peer.swarm import Handlers, Swarm
from peer.swarm.addresses import parse_address
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey, sha256, short_id
from protocol.messages import MAX_UNREACHABLE, Goodbye, Heartbeat, Signed
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("peer.network")

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0",)
DISCOVER_SECONDS = 15.0
LONELY_SECONDS = 1.0
"""How often to look for others while nobody is known."""

SEARCHED_FOR = 4
"""Members out of sight that are dialled at a time: after a cut that lasted, those on both sides have forgotten each
other, and nobody else may be left who knows both."""

PRESENCE_SECONDS = 60.0

UNHEARD_BEATS = 3.0
"""A member of whom nothing came first-hand for the time of so many heartbeats is not heard."""

PASSED_ON = 16
"""Messages of one author that are passed on within the time of a heartbeat: an honest one says a few a round."""

CROWD = 32
"""Among more members than so many not everyone introduces a newcomer: of a thousand, each would send 700 KB to it, and
its heartbeat to everyone."""

INTRODUCERS = 4
"""Who introduces it all the same when another has: that one may lose a packet, or leave."""

TOLD_BY = 2
"""So many others must have told us of a newcomer before we leave its introduction to them: one may be a liar."""

PASSED_ON_REMEMBERED = 8192
"""Messages that were passed on and are not passed on again."""

MAX_WRONG = 1024

TO_STRANGERS = 8
"""Packets under way to those who are no members: anybody can make keys, take calls, and not answer them."""

STRANGERS_DIALLED = 16
"""Newcomers that are no members are dialled while fewer than so many are; of members, each once at a time."""

INTRODUCED_BEATS = 2
"""Within so many heartbeats nobody is introduced twice."""


class Network:
    """`start` it, run `discover` and `mend` for as long as the node lives, then `stop`."""

    def __init__(
        self,
        membership: Membership,
        handlers: Handlers,
        *,
        listen: Sequence[str],
        announce: Sequence[str],
        discovered: Callable[[wire.Packet], Awaitable[None]],
        refused: Callable[[PeerKey], bool] = lambda key: False,
    ):
        """`discovered` takes a packet of heartbeats that the DHT gave: unchecked, like any other packet. `refused`: the
        run's owner has banned this peer."""
        spec = membership.spec
        self._membership = membership
        self._on_packet = handlers.on_packet
        self.briefs = Briefs(
            ask=lambda of, names: self.swarm.ask_headers(of, names),
            take=self._take_packet,
            spawn=self._spawn,
            is_member=lambda key: self.directory.is_member(key),
            charge=lambda sender, size: self.swarm.charge(sender, size),
        )
        self._handlers = replace(
            handlers, on_packet=self._take_packet, on_headers_asked=self.briefs.answer, is_known=self.is_known
        )
        self._listen = listen or DEFAULT_LISTEN
        self._announce = announce
        self._discovered = discovered
        self._refused = refused
        self._swarm: Swarm | None = None
        self._bytes = (0, 0)
        """Up and down, of the swarms before this one."""
        # Who comes back finds its own address among those that others told it.
        self._entry_peers = [k for k in _by_peer(membership.addresses) if k != membership.identity.key]
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_strangers = asyncio.Semaphore(TO_STRANGERS)
        self._dialling: set[PeerKey] = set()
        self._introduced: dict[PeerKey, float] = {}
        self._heartbeat: Signed[Heartbeat] | None = None
        self._relaying, self._relaying_due = Relaying({}), 0.0
        self._passed: Counter[PeerKey] = Counter()
        self._passed_on: dict[Digest, None] = {}
        self.listeners: list[Callable[[Signed], None]] = []
        """Called with each verified message of another member that is not banned, before the machine has it; also with
        those that come too late to count."""
        self._told: dict[PeerKey, set[PeerKey]] = {}
        """Who has told us of a peer: TOLD_BY of them at most."""
        self._word: Signed[Any] | None = None
        self._observers: frozenset[PeerKey] = frozenset()
        """Those that this word names."""
        self._unheard: tuple[int, ...] = ()
        self._unheard_due = 0.0
        self._wrong: dict[PeerKey, None] = {}
        """Who served wrong bytes, the newest last; at most MAX_WRONG."""
        self.outbox = Outbox(self._send, self.briefs.encode)
        self.directory = Directory(
            membership.identity.key,
            forget_seconds=max(60.0, 3 * spec.round.member_seconds),
            limit=spec.round.max_members,
        )

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, and enter by the addresses that the membership has. Raises CairnError."""
        m = self._membership
        self._swarm = await Swarm.start(
            m.identity,
            m.spec.run_id,
            store=m.store,
            listen=self._listen,
            announce=self._announce,
            initial=m.addresses,
            handlers=self._handlers,
        )
        log.info("listening at %s", ", ".join(self._swarm.addresses) or "no address that others can dial")

    async def mend(self) -> None:
        """For ever: when libp2p's daemon ends by itself, start another."""
        while True:
            cause = await self.swarm.wait_lost()
            log.error("libp2p's daemon ended (%s): starting another", cause)
            await self.swarm.stop()
            self._bytes, self._swarm = (self.bytes_up, self.bytes_down), None
            await asyncio.sleep(LONELY_SECONDS)
            await self.start()

    async def discover(self) -> None:
        """For ever: keep our heartbeat in the DHT, and learn of those there."""
        while True:
            try:
                swarm = self.swarm
                if self._heartbeat is not None:
                    await swarm.publish(self._heartbeat.encoded, PRESENCE_SECONDS)
                await self._ask_the_dht(swarm)
                await swarm.refresh_addresses()
                if await self._search(swarm):  # who knows others, perhaps
                    await self._ask_the_dht(swarm)
            except NETWORK_ERRORS as e:
                what = str(e) or type(e).__name__
                log.warning("the DHT does not answer: %s; members are still found through each other", what)
            for key in self.directory.forget_silent(time.monotonic()):
                log.debug("%s has not been heard of for long", key.short)
            await asyncio.to_thread(self._save_addresses, self.directory.addresses())
            await asyncio.sleep(DISCOVER_SECONDS if self.directory.peers() else LONELY_SECONDS)

    async def _ask_the_dht(self, swarm: Swarm) -> None:
        found = await swarm.discover()
        for i in range(0, len(found), MAX_MESSAGES):
            await self._discovered(wire.Packet(messages=found[i : i + MAX_MESSAGES]))

    async def _search(self, swarm: Swarm) -> list[PeerKey]:
        """Dial those who may be there and are not heard of: a few, and while we are alone all whom we may have entered
        by. Who answers hears of us, and is returned."""
        here, lost = self.directory, self.directory.lost()
        known = {self._membership.identity.key, *here.peers()}
        entries = _by_peer(self._membership.addresses)
        away = [k for k in {**lost, **entries} if k not in known and not self._refused(k)]
        sought = [k for k in away if not here.has_left(k)]
        chosen = random.sample(sought, min(SEARCHED_FOR, len(sought)))
        if len(known) == 1:  # who left may be back, unheard by us
            chosen = list(dict.fromkeys([*(k for k in away if k in entries), *chosen]))
        ways = {k: [*entries.get(k, ()), *_by_peer(lost.get(k, ())).get(k, ())] for k in chosen}
        found = await swarm.connect(dict.fromkeys(a for addresses in ways.values() for a in addresses), soon=True)
        if self._heartbeat is not None:
            self.outbox.broadcast(found, self._heartbeat)
        return found

    async def stop(self, seconds: float = 1.0) -> None:
        """Send what waits, at most this long; then hang up."""
        if self._swarm is not None:
            await self.outbox.flush(seconds)
        await self.outbox.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._save_addresses(self.directory.addresses())
        if self._swarm is not None:
            await self._swarm.stop()

    # -- who -------------------------------------------------------------------------------------------------

    @property
    def swarm(self) -> Swarm:
        if self._swarm is None:
            raise PeerError("libp2p's daemon is not running (yet)")
        return self._swarm

    @property
    def addresses(self) -> list[str]:
        """Own multiaddresses; none before the start."""
        return self._swarm.addresses if self._swarm is not None else []

    @property
    def bytes_up(self) -> int:
        return self._bytes[0] + (self._swarm.bytes_up if self._swarm is not None else 0)

    @property
    def bytes_down(self) -> int:
        return self._bytes[1] + (self._swarm.bytes_down if self._swarm is not None else 0)

    def everyone(self) -> list[PeerKey]:
        """All that may hold blobs: those heard of, and those whose addresses we entered by."""
        return list(dict.fromkeys([*self.directory.peers(), *self._entry_peers]))

    def is_known(self, key: PeerKey) -> bool:
        """A member, the coordinator's observer, or whose address we entered by: not anybody who made a key."""
        return self.directory.is_member(key) or key in self._entry_peers or key in self._coordinators()

    def _coordinators(self) -> frozenset[PeerKey]:
        """The coordinator's observer, by the owner's newest word."""
        word = self._membership.locator.newest
        if word is not self._word:
            named = _by_peer(word.body.addresses) if word is not None else ()
            self._word, self._observers = word, frozenset(named)
        return self._observers

    def note(self, message: Signed, sender: PeerKey) -> None:
        """Learn from a verified message who is there; introduce newcomers; pass on what others do not hear."""
        direct = sender == message.author
        news = None
        self.briefs.heard(message)
        for listener in self.listeners:
            listener(message)
        if isinstance(message.body, Heartbeat):
            news = self.directory.hear(
                message, time.monotonic(), direct=direct, welcome=message.author in self._coordinators()
            )
        if direct and (news is not None or not isinstance(message.body, Heartbeat)):
            self._pass_on(message)
        if isinstance(message.body, Heartbeat) and sender not in (message.author, self._membership.identity.key):
            told = self._told.setdefault(message.author, set())
            if len(told) < TOLD_BY:
                told.add(sender)
            while len(self._told) > PASSED_ON_REMEMBERED:
                del self._told[next(iter(self._told))]
        if isinstance(message.body, Goodbye):
            self.directory.goodbye(message.author, message.body.sequence)
        if not news or not isinstance(message.body, Heartbeat):
            return
        # The first is the way in; after that, hundreds may come and go.
        level = logging.INFO if len(self.directory.peers()) == 1 else logging.DEBUG
        log.log(level, "in the swarm: heard of %s", message.author.short)
        if len(self.directory.peers()) <= CROWD or self._is_introducer(message.author):
            self._introduce(message)
        elif direct:
            self._spawn(self._introduce_if_nobody_does(message))
        ways = _by_peer(message.body.addresses).get(message.author)
        room = self.directory.limit if message.body.admission else STRANGERS_DIALLED
        if ways and message.author not in self._dialling and len(self._dialling) < room:
            self._dialling.add(message.author)
            self._spawn(self._dial(message.author, ways))

    def _introduce(self, message: Signed[Heartbeat]) -> None:
        """Tell a newcomer of the others, and the others of it."""
        now, beat = time.monotonic(), self._membership.spec.round.heartbeat_seconds
        for key in [k for k, then in self._introduced.items() if now - then > INTRODUCED_BEATS * beat]:
            del self._introduced[key]
        if message.author in self._introduced:
            return
        self._introduced[message.author] = now
        self.outbox.send(message.author, self.directory.heartbeats())
        if (word := self._membership.locator.newest) is not None:
            self.outbox.send(message.author, (word,))
        if message.body.admission:
            # Not of strangers, whom anybody can make: they would crowd out what matters. They speak for themselves.
            for key in self.directory.peers():
                if key != message.author:
                    self.outbox.send(key, (message,))

    def _is_introducer(self, newcomer: PeerKey) -> bool:
        """Whether we are one of the few whom the newcomer's key chooses."""
        me = self._membership.identity.key
        mine = sha256(newcomer, me)
        nearer = (k for k in self.directory.peers() if k != newcomer and sha256(newcomer, k) < mine)
        return sum(1 for _ in islice(nearer, INTRODUCERS)) < INTRODUCERS

    async def _introduce_if_nobody_does(self, message: Signed[Heartbeat]) -> None:
        """It may have entered by us, and be known to nobody else: then nobody tells us of it within a heartbeat."""
        await asyncio.sleep(self._membership.spec.round.heartbeat_seconds)
        if len(self._told.get(message.author, ())) < TOLD_BY:
            self._introduce(message)

    def _pass_on(self, message: Signed) -> None:
        """To the members who do not hear its author, if that is for us to do: once, and no more than a member says."""
        me, author, relaying = self._membership.identity.key, message.author, self.relaying
        if message.digest in self._passed_on or self._passed[author] >= PASSED_ON:
            return
        to = [k for k in relaying.needy(author) if me in relaying.relays(author, k)]
        if not to:
            return
        self._passed[author] += 1
        self._passed_on[message.digest] = None
        while len(self._passed_on) > PASSED_ON_REMEMBERED:
            del self._passed_on[next(iter(self._passed_on))]
        self.outbox.broadcast(to, message)

    @property
    def relaying(self) -> Relaying:
        """Who hears whom, by the newest heartbeats."""
        now = time.monotonic()
        if now >= self._relaying_due:
            # As heartbeats come and go; not anew for every message, of which there may be thousands.
            beats = {k: e.heartbeat for k, e in self.directory.entries().items()}
            if self._heartbeat is not None:
                beats[self._membership.identity.key] = self._heartbeat
            self._relaying = Relaying(beats)
            self._relaying_due = now + self._membership.spec.round.heartbeat_seconds
            self._passed.clear()
        return self._relaying

    def relays(self, author: PeerKey) -> list[PeerKey]:
        """Who hears us and a member of whom we hear nothing first-hand: none when we hear it ourselves."""
        me, relaying = self._membership.identity.key, self.relaying
        return relaying.relays(author, me) if relaying.misses(me, author) else []

    def unheard(self) -> tuple[int, ...]:
        """For heartbeats: the members that others are to pass on to us."""
        now, beat = time.monotonic(), self._membership.spec.round.heartbeat_seconds
        if now >= self._unheard_due:
            found = self.directory.unheard(now, UNHEARD_BEATS * beat)[:MAX_UNREACHABLE]
            self._unheard, self._unheard_due = tuple(short_id(k) for k in found), now + beat / 2
        return self._unheard

    async def _dial(self, peer: PeerKey, addresses: Sequence[str]) -> None:
        try:
            await self.swarm.connect(addresses)
        except NETWORK_ERRORS as e:
            log.debug("cannot dial: %s", str(e) or type(e).__name__)
        finally:
            self._dialling.discard(peer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that ends with the network."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, to: PeerKey, packet: wire.Packet, seconds: float) -> None:
        if self.is_known(to):
            await self.swarm.send(to, packet, seconds)
        else:
            async with self._to_strangers:
                await self.swarm.send(to, packet, seconds)

    async def _take_packet(self, sender: PeerKey, packet: wire.Packet) -> None:
        """What came in, with records in the place of their briefs."""
        done = self._on_packet(sender, self.briefs.unfold(sender, packet))
        if done is not None:
            await done

    # -- what ------------------------------------------------------------------------------------------------

    def broadcast(self, message: Signed) -> None:
        """To everyone heard of; to those whose addresses we entered by while nobody is."""
        if isinstance(message.body, Heartbeat):
            self._heartbeat = message
        self.briefs.heard(message)
        self.outbox.broadcast(self.directory.peers() or self._entry_peers, message)

    async def fetch_blob(
        self,
        digest: Digest,
        size: int | None,
        holders: Sequence[PeerKey],
        *,
        deadline_seconds: float,
        chunks: Collection[int] | None = None,
    ) -> None:
        """A blob, or these chunks of it, into the store (see `Swarm.fetch_blob`). Who served wrong bytes of any blob is
        asked last.

        Raises CairnError.
        """
        ordered = sorted(holders, key=lambda h: h in self._wrong)
        await self.swarm.fetch_blob(
            digest, size, ordered, deadline_seconds=deadline_seconds, on_bad=self._served_wrong, chunks=chunks
        )

    def _served_wrong(self, holder: PeerKey, reason: str) -> None:
        log.warning("%s served wrong bytes and is not asked for this blob again: %s", holder.short, reason)
        self._wrong[holder] = None
        while len(self._wrong) > MAX_WRONG:
            del self._wrong[next(iter(self._wrong))]

    def _save_addresses(self, fresh: Sequence[str]) -> None:
        """Keep the addresses of members for the next start."""
        # Of those that name a member: nobody has us dial, or tell others of, whom it likes.
        fresh = [a for k, ways in _by_peer(fresh).items() if self.directory.is_member(k) for a in ways]
        if fresh:
            try:
                self._membership.learn(fresh, own=self.addresses)
            except StoreError as e:
                log.warning("addresses of members were not kept: %s", e)


def _by_peer(addresses: Sequence[str]) -> dict[PeerKey, list[str]]:
    """Multiaddresses by the peer that they name; those that name none are left out."""
    found: dict[PeerKey, list[str]] = {}
    for address in addresses:
        try:
            found.setdefault(parse_address(address)[0], []).append(address)
        except MalformedError:
            continue
    return found
