"""Enters a run and stays in it: the identity, the spec, the admission and its renewal, the first addresses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peer.coordinator_client import CoordinatorClient, CoordinatorUnreachable, WrongCoordinator
from peer.errors import PeerError
from peer.keyfile import load_or_make
from peer.store import Store
from protocol.errors import CairnError, ProtocolError
from protocol.identity import Identity
from protocol.ids import RunId
from protocol.invite import Invite
from protocol.messages import Opener
from protocol.spec import RunSpec, open_spec

log = logging.getLogger("peer.membership")

SPEC, ADMISSION, ADDRESSES = "spec", "admission", "addresses"
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


@dataclass
class Membership:
    """What lets a peer into its run. `admission` is replaced when it is renewed; an observer has none, nor a client."""

    identity: Identity
    spec: RunSpec
    opener: Opener
    store: Store
    client: CoordinatorClient | None
    name: str
    admission: bytes
    addresses: list[str] = field(default_factory=list)
    clock_ahead: float = 0.0

    @classmethod
    async def enter(cls, invite: Invite, home: Path, store: Store, *, name: str) -> Membership:
        """By the coordinator, or, when it does not answer, by what an earlier visit left in the store.

        Raises PeerError with what to do when neither gives a spec and a valid admission.
        """
        identity = load_or_make(home / "identity.key")
        client = CoordinatorClient(invite)
        try:
            return await cls._enter(client, invite, identity, store, name)
        except BaseException:
            await client.close()
            raise

    @classmethod
    async def _enter(
        cls, client: CoordinatorClient, invite: Invite, identity: Identity, store: Store, name: str
    ) -> Membership:
        stored = store.read_value(SPEC)
        addresses = known_addresses(store)
        absent: CairnError | None = None
        try:
            reply = await client.get_run()
            sent, addresses = reply.sent, [*reply.addresses, *addresses]
        except ABSENT as e:
            if stored is None:
                raise
            absent, sent = e, stored
        spec = open_spec(sent, invite.run)
        if stored != sent:
            store.write_value(SPEC, sent)
        opener = Opener(spec.run_id, spec.owner_key)
        self = cls(identity, spec, opener, store, client, name, store.read_value(ADMISSION) or b"")
        self.addresses = list(dict.fromkeys([*addresses, *invite.addresses]))
        if absent is None:
            try:
                await self.renew()
            except ABSENT as e:
                absent = e
        if absent is not None and self.seconds_left() <= 0:
            raise PeerError(
                f"{absent}. And without the coordinator this peer cannot enter: it has no valid admission left; try "
                "again when the coordinator is back"
            )
        if absent is not None:
            log.warning("%s. Going on with the admission of an earlier visit (%.1f h left)", absent, self.hours_left)
        return self

    def seconds_left(self) -> float:
        """How long the admission lasts, by this clock; 0 when there is none that is valid."""
        try:
            admission = self.opener.admission_of(self.admission, self.identity.key)
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
        self.admission = reply.admission.sent
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

    def learn(self, addresses: Sequence[str]) -> None:
        """Remember addresses for the next start, the newest first."""
        self.addresses = list(dict.fromkeys([*addresses, *self.addresses]))[:MAX_SAVED_ADDRESSES]
        if set(known_addresses(self.store)) != set(self.addresses):
            self.store.write_value(ADDRESSES, "\n".join(self.addresses).encode())

    async def keep_valid(self) -> None:
        """For ever: renew when half of the admission's time is over; an outage of the coordinator only delays it."""
        half = self.spec.admission.seconds / 2
        while True:
            await asyncio.sleep(max(min(RENEW_SECONDS, half / 2), self.seconds_left() - half))
            try:
                await self.renew()
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
