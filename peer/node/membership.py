"""Enters a run and stays in it: the identity, the spec, the admission and its renewal, the first addresses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peer.coordinator_client import CoordinatorClient, CoordinatorUnreachable, WrongCoordinator
from peer.errors import PeerError
from peer.keyfile import load_or_make
from peer.node.finding import Found, find
from peer.node.locator import SPEC, Locator
from peer.store import Store
from protocol.errors import CairnError, ProtocolError
from protocol.identity import Identity
from protocol.ids import RunId
from protocol.invite import Invite
from protocol.message_codec import MessageDecoder
from protocol.spec import RunSpec, open_spec

log = logging.getLogger("peer.membership")

ADMISSION, ADDRESSES, OWN_ADDRESSES = "admission", "addresses", "own-addresses"
MAX_SAVED_ADDRESSES = 64
CLOCK_SECONDS = 3.0
"""hivemind's DHT takes nothing from a clock that is further off."""

RENEW_SECONDS = 60.0
"""How long after a failed renewal the next one is tried, at most."""

ABSENT = (CoordinatorUnreachable, WrongCoordinator)
"""Nobody can tell a coordinator that is down from one in whose place another answers: a peer that was in goes on."""


def run_folder(home: Path, run: RunId) -> Path:
    """Where a peer keeps what belongs to one run."""
    return home / "runs" / run.hex()[:12]


async def _nobody_to_ask() -> None:
    return


@dataclass
class Membership:
    """What lets a peer into its run. `admission` is replaced when it is renewed; an observer has none, nor a client; a
    newcomer whose coordinator is away has none yet."""

    identity: Identity
    spec: RunSpec
    decoder: MessageDecoder
    store: Store
    client: CoordinatorClient | None
    name: str
    admission: bytes
    addresses: list[str] = field(default_factory=list)
    clock_ahead: float = 0.0
    ask: Callable[[], Awaitable[None]] = field(default_factory=lambda: _nobody_to_ask, init=False)
    """Asks members where the coordinator is, for `locator`: the node's, once there is one."""

    def __post_init__(self):
        self.locator = Locator(self.store, self.spec)
        if (client := self.client) is not None:
            self.locator.listeners.append(lambda word: client.moved(word.body))
            if self.locator.newest is not None:
                client.moved(self.locator.newest.body)

    @classmethod
    async def enter(cls, invite: Invite, home: Path, store: Store, *, name: str, via: Sequence[str] = ()) -> Membership:
        """By the coordinator, wherever it is; or, when it does not answer, by what an earlier visit left in the store.

        Members at the addresses of the invite, of earlier visits and of `via` are asked where the coordinator is. When
        they answer and it does not, the peer is in without an admission (`seconds_left` is 0): see `waiting`.
        Raises PeerError with what to do when nobody gives a spec, and for a refusal.
        """
        identity = load_or_make(home / "identity.key")
        client = CoordinatorClient(invite)
        try:
            return await cls._enter(client, invite, identity, store, name, via)
        except BaseException:
            await client.close()
            raise

    @classmethod
    async def _enter(
        cls, client: CoordinatorClient, invite: Invite, identity: Identity, store: Store, name: str, via: Sequence[str]
    ) -> Membership:
        def made(sent: bytes) -> Membership:
            spec = open_spec(sent, invite.run)
            decoder, admission = MessageDecoder(spec.run_id, spec.owner_key), store.read_value(ADMISSION) or b""
            return cls(identity, spec, decoder, store, client, name, admission)

        before: Membership | None = None
        if (stored := store.read_value(SPEC)) is not None:
            try:
                before = made(stored)  # with it the client knows where the coordinator was last
            except ProtocolError as e:
                log.warning("the stored spec is left out: %s", e)
        addresses = list(dict.fromkeys([*via, *known_addresses(store), *invite.addresses]))
        sent = stored if before is not None else None
        may_go_on = before is not None and before.seconds_left() > 0
        found: Found | None = None
        absent: CairnError | None = None
        try:
            # Members may know better than to try there for long.
            reply = await client.get_run(attempts=None if may_go_on else 1)
            sent, addresses = reply.sent, [*reply.addresses, *addresses]
        except ABSENT as e:
            absent = e
        if absent is not None and not may_go_on:
            log.info("%s. Asking members where it is now", absent)
            found = await find(invite.run, addresses)
            if found is not None:
                sent, addresses = found.sent, [*addresses, *found.addresses]
                if found.coordinator_address is not None:
                    client.moved(found.coordinator_address.body)
            try:
                reply = await client.get_run(attempts=None if found is None else 1)
                sent, absent, addresses = reply.sent, None, [*reply.addresses, *addresses]
            except ABSENT as e:
                absent = e
        if sent is None:
            raise type(absent or PeerError())(
                f"{absent}. Nor does any member at the addresses in the invite: ask the run's owner for the current "
                "invite, or somebody who trains in this run for what `cairn peer invite` prints there"
            )
        self = before if before is not None and sent == stored else made(sent)
        if sent != stored:
            store.write_value(SPEC, sent)
        if found is not None and found.coordinator_address is not None:
            self.locator.take(found.coordinator_address.encoded)
        self.addresses = list(dict.fromkeys(addresses))
        if absent is None:
            try:
                await self.renew()
            except ABSENT as e:
                absent = e
        if absent is not None:
            self._go_on_without(absent, found)
        return self

    def _go_on_without(self, absent: CairnError, found: Found | None) -> None:
        """Raises PeerError when this cannot be."""
        if self.seconds_left() > 0:
            log.warning("%s. Going on with the admission of an earlier visit (%.1f h left)", absent, self.hours_left)
        elif found is None:
            raise PeerError(
                f"{absent}. And without the coordinator this peer cannot enter: it has no valid admission left; try "
                "again when the coordinator is back"
            )
        else:
            log.warning("%s. %d members answer: waiting in the swarm until it is back", absent, found.members)
            self.learn(found.addresses)

    async def close(self) -> None:
        """For a membership that no node has taken over."""
        if self.client is not None:
            await self.client.close()

    def seconds_left(self) -> float:
        """How long the admission lasts, by this clock; 0 when there is none that is valid."""
        try:
            admission = self.decoder.decode_admission(self.admission, self.identity.key)
        except ProtocolError:
            return 0.0
        return max(0.0, admission.not_after - time.time())

    @property
    def hours_left(self) -> float:
        return self.seconds_left() / 3600

    async def renew(self) -> None:
        """Ask for a new admission. Raises CairnError when it is not given."""
        if self.client is None:
            raise PeerError("an observer is not admitted to anything")
        reply = await self.client.admit(self.identity, self.name)
        self.admission = reply.admission.encoded
        self.clock_ahead = reply.clock_ahead
        self.store.write_value(ADMISSION, self.admission)
        self.learn(reply.addresses)
        if abs(reply.clock_ahead) > CLOCK_SECONDS:
            log.warning(
                "this machine's clock is %.0f s %s the coordinator's: set it (chrony, systemd-timesyncd), else other "
                "members do not list this peer in their DHT",
                abs(reply.clock_ahead),
                "ahead of" if reply.clock_ahead > 0 else "behind",
            )

    async def renew_wherever(self, ask: Callable[[], Awaitable[None]]) -> None:
        """As `renew`; when nobody answers, `ask` asks members where the coordinator is now. Raises CairnError."""
        try:
            await self.renew()
        except ABSENT:
            known = self.locator.newest
            await ask()
            if self.locator.newest is known:
                raise
            await self.renew()

    def learn(self, addresses: Sequence[str], own: Sequence[str] = ()) -> None:
        """Remember addresses for the next start, the newest first; one's `own`, for invites."""
        if own and (text := "\n".join(own).encode()) != self.store.read_value(OWN_ADDRESSES):
            self.store.write_value(OWN_ADDRESSES, text)
        self.addresses = list(dict.fromkeys([*addresses, *self.addresses]))[:MAX_SAVED_ADDRESSES]
        if set(known_addresses(self.store)) != set(self.addresses):
            self.store.write_value(ADDRESSES, "\n".join(self.addresses).encode())

    async def keep_valid(self) -> None:
        """For ever: renew when half of the admission's time is over; an outage of the coordinator only delays it."""
        half = self.spec.admission.seconds / 2
        while True:
            await asyncio.sleep(max(min(RENEW_SECONDS, half / 2), self.seconds_left() - half))
            try:
                await self.renew_wherever(self.ask)
                log.info("admission renewed: valid for %.1f h", self.hours_left)
            except CairnError as e:
                left = f"{self.hours_left:.1f} h left"
                if not self.seconds_left():
                    left = "it has ended: the others refuse this peer's updates until it is renewed"
                level = logging.WARNING if self.hours_left > 1 else logging.ERROR
                log.log(level, "the admission was not renewed (%s): %s", left, e)


def known_addresses(store: Store) -> list[str]:
    """Where the swarm was entered by in earlier visits. Raises StoreError."""
    text = (store.read_value(ADDRESSES) or b"").decode(errors="replace")
    return [line for line in text.splitlines() if line.startswith("/")]
