"""Enrollment in a run: the identity, the spec, the admission and its renewal, and the first addresses."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from peer.coordinator_client import CoordinatorClient, CoordinatorUnreachable, RunInfo, WrongCoordinator
from peer.doctor.clock import clock_finding
from peer.errors import PeerError
from peer.keyfile import load_or_make
from peer.node.coordinator_discovery import SPEC, CoordinatorLocator, DiscoveredRun, discover_run
from peer.store import Store
from protocol.errors import CairnError, ProtocolError
from protocol.identity import Identity
from protocol.ids import RunId
from protocol.invite import Invite
from protocol.message_codec import MessageDecoder
from protocol.messages import Admission
from protocol.proof_of_work import find_proof, is_proof
from protocol.spec import RunSpec, open_spec

log = logging.getLogger(__name__)

ADMISSION, ADDRESSES, OWN_ADDRESSES, WORK = "admission", "addresses", "own-addresses", "proof-of-work"
"""Names of the values in the store."""

WORK_BATCH = 16
"""Tries of a proof of work in one go of a thread: about 0.15 s."""

SAY_SECONDS = 10.0
"""Seconds from one progress line of a proof of work to the next."""

MAX_SAVED_ADDRESSES, SAVED_OF_ONE = 64, 2
"""Multiaddresses kept for the next start, and of one peer: no few peers push out all others."""

RENEW_SECONDS = 60.0
"""Maximum seconds from a failed renewal to the next attempt."""

COORDINATOR_ABSENT = (CoordinatorUnreachable, WrongCoordinator)
"""Errors after which a peer with a valid admission goes on: nobody can distinguish a coordinator that is down from one
in whose place another server answers."""


def run_folder(home: Path, run: RunId) -> Path:
    """Return the folder of one run under a peer's home."""
    return home / "runs" / run.hex()[:12]


class RunIsOver(PeerError):
    """The run is over, and this peer has nothing that the coordinator still needs."""

    def __init__(self, info: RunInfo):
        super().__init__(f"the run {info.spec.name} is {info.over}")
        self.info = info


@dataclass
class Enrollment:
    """A peer's right to take part in its run (of a `Node` its membership), and what it needs. Close it at the end.

    `admission` (an encoded envelope) is replaced when it is renewed. An observer has none, and no client; a newcomer
    whose coordinator is away has none yet.
    """

    identity: Identity
    spec: RunSpec
    store: Store
    client: CoordinatorClient | None
    name: str
    admission: bytes
    addresses: list[str] = field(default_factory=list)
    invited: Sequence[str] = ()
    """The invite's multiaddresses: `learn` always keeps them."""

    decoder: MessageDecoder = field(init=False)
    locator: CoordinatorLocator = field(init=False)

    def __post_init__(self) -> None:
        self.decoder = MessageDecoder(self.spec.run_id, self.spec.owner_key)
        self.locator = CoordinatorLocator(self.store, self.spec, self.client)

    @classmethod
    async def enter(
        cls,
        invite: Invite,
        home: Path,
        store: Store,
        *,
        name: str,
        via: Sequence[str] = (),
        check: Callable[[RunSpec], Awaitable[None]] | None = None,
    ) -> Enrollment:
        """Enter a run by its coordinator, or without it by the spec and the admission that an earlier visit stored.

        Members at the addresses of the invite, of earlier visits and of `via` are asked for the coordinator's address
        when it does not answer. When members answer and the coordinator does not, the membership has no admission yet
        (`seconds_left` is 0): see `admission_wait`. `check` is called before admission: what it raises ends the entry.
        Raises PeerError, with what to do, when nobody gives a spec; CoordinatorRefused when the peer is refused. Raises
        RunIsOver when the run is over, unless this peer may bring the last state.
        """
        identity = load_or_make(home / "identity.key")
        client = CoordinatorClient(invite)

        def with_spec(encoded: bytes) -> Enrollment:
            spec = open_spec(encoded, invite.run)
            held = store.read_value(ADMISSION) or b""
            return cls(identity, spec, store, client, name, held, invited=invite.addresses)

        async with AsyncExitStack() as after_failure:
            after_failure.push_async_callback(client.close)
            earlier: Enrollment | None = None
            if (stored := store.read_value(SPEC)) is not None:
                try:
                    earlier = with_spec(stored)  # this also gives the client the coordinator's last address
                except ProtocolError as e:
                    log.warning("the stored spec is ignored: %s", e)
            addresses = list(dict.fromkeys([*via, *known_addresses(store), *invite.addresses]))
            search = _RunSearch(client, invite.run, stored if earlier is not None else None, addresses)
            encoded = await search.spec(patient=earlier is not None and earlier.seconds_left() > 0)
            self = earlier if earlier is not None and encoded == stored else with_spec(encoded)
            if encoded != stored:
                store.write_value(SPEC, encoded)
            if search.found is not None and search.found.coordinator_address is not None:
                self.locator.accept(search.found.coordinator_address.encoded)
            if search.info is not None and search.info.over and not _may_bring_state(search.info, store):
                raise RunIsOver(search.info)
            self.addresses = list(dict.fromkeys(search.addresses))
            if check is not None:
                await check(self.spec)
            absent, found = search.absent, search.found
            if absent is None:
                try:
                    await self.renew()
                except COORDINATOR_ABSENT as e:
                    absent = e
                    if found is None and not self.seconds_left():
                        log.info("%s. Asking members whether to wait with them", e)
                        found = await discover_run(invite.run, self.addresses)
                        if found is not None and found.coordinator_address is not None:
                            self.locator.accept(found.coordinator_address.encoded)
            if absent is not None:
                self._go_on_without(absent, found)
            after_failure.pop_all()
        return self

    def _go_on_without(self, absent: CairnError, found: DiscoveredRun | None) -> None:
        """Go on while the coordinator is absent. Raises CoordinatorUnreachable when that is impossible."""
        if self.seconds_left() > 0:
            log.warning("%s. Going on with the admission of an earlier visit (%.1f h left)", absent, self.hours_left)
        elif found is None:
            raise CoordinatorUnreachable(
                f"{absent}. And without the coordinator this peer cannot enter: it has no valid admission, and no "
                "member answers with which it could wait; try again when the coordinator is back"
            )
        else:
            log.warning("%s. %d members answer: waiting in the swarm until it is back", absent, found.members)
            self.learn(found.addresses)

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()

    def seconds_left(self) -> float:
        """Return the seconds for which the admission is valid by this clock; 0 when there is no valid one."""
        held = self._held_admission()
        return 0.0 if held is None else max(0.0, held.not_after - time.time())

    def _held_admission(self) -> Admission | None:
        try:
            return self.decoder.decode_admission(self.admission, self.identity.key)
        except ProtocolError:
            return None

    @property
    def hours_left(self) -> float:
        return self.seconds_left() / 3600

    async def renew(self) -> None:
        """Request an admission, and adopt it once half of the present one's time is over, or if it has another name.

        The request is made all the same: the coordinator may refuse. Raises CairnError then. An announced header keeps
        the admission that it was signed with (`StoreHeader`): two headers of one round are equivocation.
        """
        if self.client is None:
            raise PeerError("an observer is not admitted to anything")
        nonce = await self._proof_of_work()
        reply = await self.client.admit(self.identity, self.name, nonce=nonce)
        held, new = self._held_admission(), reply.admission.body
        if held is None or held.name != new.name or self.seconds_left() <= self.spec.admission.seconds / 2:
            self.admission = reply.admission.encoded
            self.store.write_value(ADMISSION, self.admission)
        self.learn(reply.addresses)
        if (clock := clock_finding(reply.clock_ahead)).verdict != "ok":
            log.warning("%s: %s", clock.found, clock.remedy)

    async def _proof_of_work(self) -> int:
        """Return the nonce that the run asks of this key (0: it asks for none): the stored one, or a new one.

        It is searched for on all cores, from a place chosen at random. A search that is stopped loses nothing: each try
        is as likely to succeed as any other.
        """
        bits, run, key = self.spec.admission.work_bits, self.spec.run_id, self.identity.key
        stored = int.from_bytes((self.store.read_value(WORK) or b"")[:8], "big")
        if not bits or await asyncio.to_thread(is_proof, run, key, stored, bits):
            return stored if bits else 0
        threads, began, said = os.cpu_count() or 1, time.monotonic(), -SAY_SECONDS
        start, tried = secrets.randbits(63), 0
        while True:
            parts = [range(start + i, start + WORK_BATCH * threads, threads) for i in range(threads)]
            found = await asyncio.gather(*(asyncio.to_thread(find_proof, run, key, bits, part) for part in parts))
            if nonce := next((n for n in found if n is not None), None):
                self.store.write_value(WORK, nonce.to_bytes(8, "big"))
                return nonce
            start, tried = start + WORK_BATCH * threads, tried + WORK_BATCH * threads
            if (elapsed := time.monotonic() - began) - said >= SAY_SECONDS:
                said, mean = elapsed, elapsed / tried * 2**bits
                log.info(
                    "proof of work for this key, once: %d of about %d tries, %.0f s on average", tried, 2**bits, mean
                )

    async def renew_anywhere(self, ask_members: Callable[[], Awaitable[None]]) -> None:
        """Renew, and when nobody answers, try once more at a newer address that `ask_members` finds.

        Raises CairnError when no admission is given.
        """
        try:
            await self.renew()
        except COORDINATOR_ABSENT:
            known = self.locator.newest
            await ask_members()
            if self.locator.newest is known:
                raise
            await self.renew()

    def learn(self, addresses: Sequence[str], own: Sequence[str] = ()) -> None:
        """Store multiaddresses for the next start, newest first; and our `own`, for invites. Raises StoreError."""
        if own and (text := "\n".join(own).encode()) != self.store.read_value(OWN_ADDRESSES):
            self.store.write_value(OWN_ADDRESSES, text)
        kept = _few_of_each([*addresses, *self.addresses])[: MAX_SAVED_ADDRESSES - len(self.invited)]
        self.addresses = list(dict.fromkeys([*kept, *self.invited]))
        if set(known_addresses(self.store)) != set(self.addresses):
            self.store.write_value(ADDRESSES, "\n".join(self.addresses).encode())

    async def keep_valid(self, ask_members: Callable[[], Awaitable[None]]) -> None:
        """Renew the admission whenever half of its time is over, until cancelled.

        While the coordinator is away, renewal is only delayed. `ask_members` as in `renew_anywhere`.
        """
        half = self.spec.admission.seconds / 2
        while True:
            # In short sleeps: a machine that is suspended stops their clock, and not the admission's.
            await asyncio.sleep(min(RENEW_SECONDS, half / 2))
            if self.seconds_left() > half:
                continue
            try:
                await self.renew_anywhere(ask_members)
                log.info("admission renewed: valid for %.1f h", self.hours_left)
            except CairnError as e:
                if self.seconds_left() > half:
                    log.warning(
                        "the admission is renewed, valid for %.1f h, but the disk failed: %s", self.hours_left, e
                    )
                    continue
                left = f"{self.hours_left:.1f} h left"
                if not self.seconds_left():
                    left = "it has ended: the others refuse this peer's updates until it is renewed"
                level = logging.WARNING if self.hours_left > 1 else logging.ERROR
                log.log(level, "the admission was not renewed (%s): %s", left, e)


@dataclass
class _RunSearch:
    """The search for a run's signed spec: at the coordinator, then at members, then at the address that members give.

    `absent` is the reason why the coordinator did not answer (None: it did), `info` its answer, `found` those of
    members.
    """

    client: CoordinatorClient
    run: RunId
    encoded: bytes | None
    addresses: list[str]
    found: DiscoveredRun | None = None
    absent: CairnError | None = None
    info: RunInfo | None = None

    async def spec(self, *, patient: bool) -> bytes:
        """Return the signed spec. `patient`: only ask the coordinator, with all attempts; the admission still holds.

        Raises CairnError when nobody gives the spec.
        """
        # Without an admission the coordinator gets one attempt first: members may know its new address.
        await self._ask_coordinator(attempts=None if patient else 1)
        if self.absent is not None and not patient:
            log.info("%s. Asking members where it is now", self.absent)
            self.found = await discover_run(self.run, self.addresses)
            if self.found is not None:
                self.encoded, self.addresses = self.found.encoded, [*self.addresses, *self.found.addresses]
                if self.found.coordinator_address is not None:
                    self.client.moved(self.found.coordinator_address.body)
            await self._ask_coordinator(attempts=None if self.found is None else 1)
        if self.encoded is None:
            error = WrongCoordinator if isinstance(self.absent, WrongCoordinator) else CoordinatorUnreachable
            raise error(
                f"{self.absent}. Nor does any member at the addresses in the invite: ask the run's owner for the "
                "current invite, or somebody who trains in this run for what `cairn peer invite` prints there"
            )
        return self.encoded

    async def _ask_coordinator(self, *, attempts: int | None) -> None:
        try:
            reply = await self.client.get_run(attempts=attempts)
        except COORDINATOR_ABSENT as e:
            self.absent = e
            return
        self.absent, self.info = None, reply
        self.encoded, self.addresses = reply.encoded, [*reply.addresses, *self.addresses]


def _may_bring_state(info: RunInfo, store: Store) -> bool:
    """Return whether the coordinator is without the last state of a run in which this peer has been."""
    return info.last is not None and info.last.state is None and next(store.certificates(), None) is not None


def _few_of_each(addresses: Iterable[str]) -> list[str]:
    """Return at most SAVED_OF_ONE multiaddresses of each peer, the first ones, in the order of the peers."""
    found: dict[str, list[str]] = {}
    for address in dict.fromkeys(addresses):
        found.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    return [a for of_peer in found.values() for a in of_peer[:SAVED_OF_ONE]]


def known_addresses(store: Store) -> list[str]:
    """Return the multiaddresses by which the swarm was entered in earlier visits. Raises StoreError."""
    text = (store.read_value(ADDRESSES) or b"").decode(errors="replace")
    return [line for line in text.splitlines() if line.startswith("/")]
