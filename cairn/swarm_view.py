"""The coordinator's view of the swarm, from an observer node: the one place where `peer` and `coordinator` meet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cairn.announcements import Announcements
from cairn.resting_state import RestingStateClaims
from coordinator.checkpoints.archive import MODEL, Archive, ArchivedState
from coordinator.swarm import AnnouncedUpdate, ReceivedHeartbeat, RestingState
from coordinator.tasks import wait_at_most
from peer.node.events import MachineStepped, MessageVerified
from peer.node.node import Node
from peer.store import Store
from peer.store.disk import disk
from protocol.codec import make_codec
from protocol.coordinator_address import CoordinatorAddress
from protocol.errors import CairnError, MalformedError, ProtocolError
from protocol.ids import Digest, PeerKey, Round
from protocol.message_codec import MessageDecoder, claimed_certificate, encode_certificate
from protocol.messages import Certificate, Directive, Finalization, Rollback, Signed
from protocol.rounds import events
from protocol.rounds.policy import RoundPolicy
from protocol.spec import RunSpec
from protocol.state import state_layout

log = logging.getLogger("cairn.observer")

FETCH_SECONDS, FETCH_RATE = 120.0, 2_000_000
"""Maximum seconds to fetch a checkpoint, and the bytes a second for which a large one has more.

Chunks that came are kept. Afterwards the newest one is fetched, which may be another."""

DIRECTIVE_SECONDS = 20.0
"""Maximum seconds until the observer's own chain has a new directive."""

RETRY_SECONDS, MAX_RETRY_SECONDS = 10.0, 120.0
"""Seconds until what did not come is asked for again: the first for each failure in a row, at most the second."""


class ObserverView:
    """The coordinator's `SwarmView` over an observer node; it also fetches checkpoints for the archive."""

    def __init__(self, node: Node, spec: RunSpec, archive: Archive):
        self._node = node
        self._spec = spec
        self._archive = archive
        self._callbacks: list[Callable[[], None]] = []
        self._seen: tuple[Digest | None, ...] | None = None
        self._news = asyncio.Event()
        self.archive_problem = ""
        """The reason why the newest checkpoint is not archived, for people; empty when it is."""
        self.updates_problem = ""
        size = make_codec(spec.codec, spec.model.layout).size
        self._announcements = Announcements(node.chain, RoundPolicy.of(spec), lambda n: n == size)
        node.bus.subscribe(MessageVerified, lambda event: self._announcements.receive(event.message))
        self._resting = RestingStateClaims(node.chain, spec)
        node.bus.subscribe(MessageVerified, self._note_claim)
        node.bus.subscribe(MachineStepped, lambda _: self._changed())

    @property
    def problem(self) -> str:
        """Why the newest state, or an update between it and the head, is not here; empty when all are."""
        return "; ".join(p for p in (self.archive_problem, self.updates_problem) if p)

    @property
    def head(self) -> Digest:
        return self._node.chain.head

    @property
    def final(self) -> Signed[Finalization] | None:
        return self._node.chain.finalization

    async def certificates_after(self, record: Digest, limit: int) -> Sequence[Certificate] | None:
        if self._node.chain.is_below_root(record):
            return await self._node.older_certificates_after(record, limit)
        return self._node.chain.main_chain_after(record, limit)

    def certificate(self, record: Digest) -> Certificate | None:
        if (found := self._in_memory(record)) is not None:
            return found
        kept = self._read_certificate(record, self._node.chain.round_of(record))
        try:
            return None if kept is None else self._decoder_of_own(1).decode_certificate(kept)
        except ProtocolError as e:
            log.warning("the kept certificate of record %s is left out: %s", record.short, e)
            return None

    async def encoded_certificate(self, record: Digest) -> bytes | None:
        if (found := self._in_memory(record)) is not None:
            return encode_certificate(found)
        # Anybody may ask, and to verify the votes of 256 contributors takes 0.2 s: the store has only verified ones.
        return await asyncio.to_thread(self._read_certificate, record, self._node.chain.round_of(record))

    def _in_memory(self, record: Digest) -> Certificate | None:
        chain = self._node.chain
        return chain.certificate(record) if record in chain and record != chain.root else None

    def _read_certificate(self, record: Digest, round_: Round | None) -> bytes | None:
        """Return what the store's chain has, which the tree has dropped at its root, or values, which rollbacks left.

        `round_` is the one of a record below the tree's root; None for others.
        """
        store = self._node.store
        try:
            kept = store.read_value(record.hex()) if round_ is None else store.certificate(round_, record)
            if kept is not None and (claimed := claimed_certificate(kept)) != record:
                raise MalformedError(f"it is the one of record {claimed.short}")
        except CairnError as e:
            log.warning("the kept certificate of record %s is left out: %s", record.short, e)
            return None
        return kept

    def _decoder_of_own(self, remember: int) -> MessageDecoder:
        """Return a decoder for our own files: they have checksums, and only what was verified is written."""
        return MessageDecoder(self._spec.run_id, self._spec.owner_key, remember=remember, verifies=False)

    async def keep_abandoned(self, number: Round, tip: Digest, rollback: Rollback) -> None:
        await asyncio.to_thread(self._keep_abandoned, number, tip, rollback)

    def _keep_abandoned(self, number: Round, tip: Digest, rollback: Rollback) -> None:
        """Copy certificates from the chain's folder, which is swept, to values, which are not."""
        store, at = self._node.store, tip
        decoder = self._decoder_of_own(1024)
        for round_ in range(number, rollback.round - 1, -1):
            try:
                kept = store.read_value(at.hex())
                data = store.certificate(Round(round_), at) or kept
                if data is None:
                    raise CairnError("it is not in the store any more")
                found = decoder.decode_certificate(data)
                if found.digest != at:
                    raise MalformedError(f"it is the one of record {found.digest.short}")
            except CairnError as e:  # also of a damaged disk, which must not prevent the rollback
                log.error(
                    "rollback %d leaves rounds %d to %d, of which no certificates are kept: receipts of them cannot be "
                    "audited here. The certificate of round %d: %s", rollback.epoch, rollback.round, round_, round_, e,
                )  # fmt: skip
                return
            if data != kept:
                store.write_value(at.hex(), data)
            at = found.record.body.parent

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def listen(self, callback: Callable[[Signed[Any]], None]) -> None:
        self._node.bus.subscribe(MessageVerified, lambda event: callback(event.message))

    def heartbeats(self) -> Mapping[PeerKey, ReceivedHeartbeat]:
        now = time.monotonic()
        entries = self._node.network.peers.entries()
        return {
            # Nobody here reads the known headers, which are most of a heartbeat's bytes.
            key: ReceivedHeartbeat(replace(e.heartbeat.body, known_headers=()), max(0.0, now - e.last_news))
            for key, e in entries.items()
            if e.is_admitted  # anybody can make keys
        }

    def announced(self, parent: Digest) -> Sequence[AnnouncedUpdate]:
        return self._announcements.announced(parent)

    def addresses(self) -> Sequence[str]:
        own = self._node.network.addresses
        return [*own, *(a for a in self._node.network.peers.addresses() if a not in own)]

    async def publish_final(self, final: Signed[Finalization]) -> None:
        self._node.post(events.MessageReceived(final))
        self._node.network.broadcast(final)

    def own_addresses(self) -> Sequence[str]:
        return self._node.network.addresses

    @property
    def coordinator_address(self) -> Signed[CoordinatorAddress] | None:
        return self._node.membership.locator.newest

    async def publish_coordinator_address(self, address: Signed[CoordinatorAddress]) -> None:
        if not self._node.membership.locator.accept(address.encoded):  # else the node passes it on by itself
            self._node.network.send_to_all(address)

    @property
    def directive(self) -> Signed[Directive] | None:
        return self._node.chain.newest_directive

    async def publish_directive(self, directive: Signed[Directive]) -> None:
        self._node.post(events.MessageReceived(directive))
        end = time.monotonic() + DIRECTIVE_SECONDS
        chain, wanted = self._node.chain, directive.body.precedence
        while (newest := chain.newest_directive) is None or newest.body.precedence < wanted:
            if time.monotonic() > end:
                raise CairnError("the observer does not accept the owner's directive: its log says why")
            await asyncio.sleep(0.01)
        self._node.network.broadcast(directive)

    async def offer_state(self, state: Digest, record: Digest) -> None:
        chain = self._node.chain
        # A state that an earlier rollback has left can be nobody's target: members have dropped its records.
        first = chain.height(chain.root)
        archived = [a for a in self._archive.all() if a.round < first or chain.main_chain_at(a.round) == a.record]
        found = next((a for a in archived if (a.state, a.record) == (state, record)), None)
        if found is None:
            rounds = ", ".join(str(a.round) for a in archived if a.round) or "none"
            raise CairnError(
                "the state that the run is to go on from is not archived, or an earlier rollback has left it: those of "
                f"rounds {rounds} are there"
            )
        await self.offer(found)

    def held_state(self) -> int:
        return next(iter(self.held_states()), 0)

    def held_states(self) -> list[int]:
        """Return the rounds whose base states are archived, of those on the way to the head: newest first."""
        chain = self._node.chain
        return [a.round for a in reversed(self._archive.all()) if chain.main_chain_at(a.round) == a.record]

    def count_backed(self, path: Sequence[Digest]) -> int:
        chain = self._node.chain
        known = [record for record in path if record in chain and record != chain.root]
        if not known:  # a page of a ledger that was lost, or nothing: the record after these says whether they are
            after = chain.main_chain_after(chain.root, 1) or ()
            are_before = all(record == chain.root or chain.is_below_root(record) for record in path)
            return len(path) if path and are_before and chain.count_backed([c.digest for c in after]) else 0
        backed = chain.count_backed(known)
        return backed + len(path) - len(known) if backed else 0

    def has_blob(self, digest: Digest) -> bool:
        return self._node.store.has(digest)

    def _note_claim(self, event: MessageVerified) -> None:
        if self._resting.receive(event.message):
            self._news.set()

    def _changed(self) -> None:
        chain = self._node.chain
        now = (chain.head, *(None if m is None else m.digest for m in (chain.finalization, chain.newest_directive)))
        if now != self._seen:
            self._seen = now
            self._news.set()
            for callback in list(self._callbacks):
                callback()

    async def keep_archive(self) -> None:
        """Fetch and archive each new checkpoint that the chain vouches for, for ever."""
        failed: tuple[Digest, float] | None = None
        said, failures = "", 0
        while True:
            await wait_at_most(self._news, 5.0)
            self._news.clear()
            newest = self.unarchived_checkpoint()
            if newest is None or (failed is not None and newest[0] == failed[0] and time.monotonic() < failed[1]):
                continue
            state, record, tokens = newest
            number = self._node.chain.height(record)
            try:
                await self.archive(state, record, tokens)
            except (CairnError, asyncio.TimeoutError) as e:
                why = str(e) or "it did not come in time"
                if why != said:  # a full disk may stay full for days: log it once
                    log.warning(
                        "the checkpoint of round %d was not archived: %s. It is tried again; the chain is followed "
                        "meanwhile, but no round becomes final before a checkpoint is archived after it", number, why,
                    )  # fmt: skip
                said, failures = why, failures + 1
                self.archive_problem = f"the checkpoint of round {number} was not archived: see the coordinator's log"
                failed = (state, time.monotonic() + min(RETRY_SECONDS * failures, MAX_RETRY_SECONDS))
                continue
            if said:
                log.info("checkpoints are archived again")
            said, failures, self.archive_problem = "", 0, ""

    async def archive(self, state: Digest, record: Digest, tokens: int) -> None:
        """Fetch the state after a record from the members, and archive it. Raises CairnError."""
        number = self._node.chain.height(record)
        there = next((a for a in self._archive.all() if a.round == number), None)
        if there is not None and there.state != state and self._is_the_runs(there):
            raise CairnError("another state of that round is final: what the swarm shows now is not all of the run")
        size = state_layout(self._spec.model.layout, self._spec.outer).checkpoint_size
        network = self._node.network
        proof = self._proof_of_last_state(record, state)
        if not self._node.store.has(state):
            await asyncio.to_thread(self._archive.free_space, size)
        seconds = max(FETCH_SECONDS, size / FETCH_RATE)
        await network.fetch_blob(state, size, network.providers(state=state), deadline_seconds=seconds)
        # While a full disk prevents the rest, nothing else protects a run's last state, and its peers may be gone.
        await self._node.keep_checkpoint(state)
        store = self._node.store
        tokenizer = store.path(self._spec.tokenizer.name)
        await asyncio.to_thread(
            self._archive.add, store.path(state), tokenizer, round=number, state=state, record=record, tokens=tokens,
            certificate=proof[0], witnesses=proof[1],
        )  # fmt: skip
        await asyncio.to_thread(self._archive.drop, self._abandoned_states())
        for callback in list(self._callbacks):
            callback()
        log.info("archived the state of round %d (%s)", number, state.short)

    async def offer(self, archived: ArchivedState) -> None:
        """Put an archived state back into the observer's store, and check its digest. Raises CairnError.

        After a rollback members fetch the state from here.
        """
        store = self._node.store
        if not store.has(archived.state):
            with self._archive.reading(archived):
                await asyncio.to_thread(put_blob, store, archived.state, archived.folder / MODEL, link=True)
        await self._node.keep_checkpoint(archived.state)

    def unarchived_checkpoint(self) -> tuple[Digest, Digest, int] | None:
        """Return state, record and accepted tokens of the newest checkpoint; None if it is archived."""
        chain, every = self._node.chain, self._spec.checkpoint.every
        for record in chain.ancestors(chain.head):
            if record == chain.root:
                return None
            body = chain.certificate(record).record.body
            if record == chain.head and (last := self._last_state()) is not None:
                return None if self._is_archived(last[1], last[0]) else last
            if body.round % every == 0 and body.round:
                if self._is_archived(body.parent, body.base_state):
                    return None
                return body.base_state, body.parent, chain.weight(body.parent) * self._spec.data.window_tokens
        return None

    def _is_archived(self, record: Digest, state: Digest) -> bool:
        return any((a.record, a.state) == (record, state) for a in self._archive.all())

    def _abandoned_states(self) -> list[ArchivedState]:
        """Return the archived states of branches that lost: they are no states of the run any more.

        This chain may not have come to those that are the run's for sure.
        """
        chain = self._node.chain
        first = chain.height(chain.root)
        later = [a for a in self._archive.all() if a.round >= first and chain.main_chain_at(a.round) != a.record]
        return [a for a in later if not self._is_the_runs(a)]

    def _is_the_runs(self, archived: ArchivedState) -> bool:
        """Return whether a state was signed as final, and the newest rollback has not left it."""
        back = self._node.chain.rollback
        if back is None or archived.round <= back.round:
            return archived.final_epoch >= 0
        return archived.final_epoch >= back.epoch

    def _last_state(self) -> tuple[Digest, Digest, int] | None:
        """Return state, record and tokens of a stopped run, once enough contributors claim that state."""
        found = self._resting.agreed()
        return None if found is None else (found[0], self._node.chain.head, self._resting.tokens)

    def resting_state(self) -> RestingState | None:
        if not self._resting.is_stopped:
            return None
        head = self._node.chain.head
        return self._resting.resting_state(next((a.state for a in self._archive.all() if a.record == head), None))

    def _proof_of_last_state(self, record: Digest, state: Digest) -> tuple[bytes, list[bytes]]:
        """Return the proof of the state of a stopped run: its record's certificate, and the heartbeats that name it.

        An earlier state needs none: both are empty.
        """
        found = self._resting.agreed()
        if record != self._node.chain.head or found is None or found[0] != state:
            return b"", []
        return encode_certificate(self._node.chain.certificate(record)), [h.encoded for h in found[1]]


def put_blob(store: Store, digest: Digest, path: Path, *, link: bool = False) -> None:
    """Copy a file into the store; with `link`, for a file that never changes, link it if possible.

    Raises StoreError, and MalformedError if the file is another blob.
    """
    draft = store.scratch / f"import-{digest.hex()}"
    try:
        with disk(f"copying {path} into the store"):
            draft.unlink(missing_ok=True)
            if link:
                with contextlib.suppress(OSError):
                    os.link(path, draft)
            if not draft.exists():
                shutil.copyfile(path, draft)
        store.adopt(draft, digest)
    finally:
        draft.unlink(missing_ok=True)
