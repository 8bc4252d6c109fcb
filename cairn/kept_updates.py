"""The updates that lead from the newest archived state to the head, kept by the coordinator's observer for newcomers.

A newcomer replays them from that state. So a run goes on for it when no member is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cairn.swarm_view import MAX_RETRY_SECONDS, RETRY_SECONDS, ObserverView
from coordinator.checkpoints.settings import ArchiveTable
from coordinator.tasks import wait_at_most
from peer.node.node import Node
from peer.store import StoreError
from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate
from protocol.units import byte_size

log = logging.getLogger("cairn.observer")

POLL_SECONDS = 5.0

PATIENCE = 2
"""Failures before it is reported that a round does not come though contributors of it are here."""

NAMED = 5
"""Contributors that a message names."""


@dataclass(frozen=True)
class _Problem:
    """A problem for people. It is logged once for as long as `topic` stays the same; "": there is none."""

    topic: str = ""
    text: str = ""


NONE = _Problem()


@dataclass(frozen=True)
class _Failure:
    count: int
    retry_at: float
    reason: str


class KeptUpdates:
    """The blobs that are applied after the newest archived state. While few members are here, they are fetched.

    When a newer state is archived, those before it are removed. Only the record of the round after a state names it.
    So they stay until that round is here: else a newcomer could reach neither.

    `settings` is [archive] of coordinator.toml. `name_of` gives names for messages. `view.updates_problem` says what is
    missing.
    """

    def __init__(self, node: Node, view: ObserverView, settings: ArchiveTable, name_of: Callable[[PeerKey], str]):
        self._node = node
        self._view = view
        self._files = node.work.jobs.files
        self._few_members, self._most_bytes = settings.few_members, settings.updates
        self._reserve = settings.reserve
        self._name_of = name_of
        self._news = asyncio.Event()
        self._protected: frozenset[Digest] = frozenset()
        self._checked: set[Digest] = set()
        """Records whose blobs were compared with their digests since the start."""
        self._failures: dict[Digest, _Failure] = {}
        self._problem = NONE

    async def run(self) -> None:
        """Follow the chain and the archive, for ever."""
        self._news.set()
        unsubscribe = self._view.subscribe(self._news.set)
        try:
            while True:
                await wait_at_most(self._news, POLL_SECONDS)
                self._news.clear()
                try:
                    await self._protect()
                    self._report(await self._fetch())
                except StoreError as e:  # it is tried again
                    self._report(_Problem("disk", str(e)))
        finally:
            unsubscribe()

    def _since(self, round_: int) -> tuple[Certificate, ...]:
        """Return the records of this round and of all later ones, as far back as members keep updates."""
        chain, kept = self._node.chain, self._node.membership.spec.checkpoint
        oldest = chain.height(chain.head) - kept.every * (kept.keep + 2)
        return chain.path(chain.main_chain_at(max(round_, oldest)) or chain.root, chain.head)

    def _starts(self) -> list[int]:
        """Return the rounds whose archived base state newcomers begin with, newest first.

        A record names that state, at a multiple of `checkpoint.every`, or the owner's rollback does: then none before
        it is needed. Nothing names the last state of a stopped run.
        """
        chain, every = self._node.chain, self._node.membership.spec.checkpoint.every
        first = 0 if chain.rollback is None else chain.rollback.round
        named = range(first + 1, chain.height(chain.head))
        return [r for r in self._view.held_states() if r == first or (r in named and r % every == 0)] or [0]

    def _path(self) -> tuple[Certificate, ...]:
        """Return the records since the newest archived state that a newcomer can reach.

        If no such path is within the bound, it is the longest that is, or the one since the newest state.
        """
        newest, *older = map(self._since, self._starts())
        path = newest
        for longer in older:
            if not path or self._is_here(path[0]) or sum(self._sizes(longer).values()) > self._most_bytes:
                break
            path = longer
        return path

    def _sizes(self, path: Sequence[Certificate]) -> dict[Digest, int]:
        return {blob: size for certificate in path for blob, size in self._files.blob_sizes(certificate).items()}

    async def _protect(self) -> None:
        """Protect that state and the blobs of the records since then, and remove those of other records."""
        path = self._path() if self._most_bytes else ()
        records = {certificate.digest for certificate in path}
        self._checked &= records
        self._failures = {record: failure for record, failure in self._failures.items() if record in records}
        before = self._protected
        start = {c.record.body.base_state for c in path[:1]}
        self._protected = frozenset(start.union(*map(self._files.blob_sizes, path)))
        self._node.retention.protect_blobs(self._protected)
        if before - self._protected:
            await self._node.retention.prune()

    async def _fetch(self) -> _Problem:
        """Fetch what is missing, the newest round first: it is needed for the longest. Return what is wrong.

        Many members will not all be gone before a newer state is archived; a few may.
        """
        path, starts = self._path(), self._starts()
        if not self._most_bytes or self._count_members(path) > self._few_members:
            return NONE
        if (problem := self._room_problem(self._since(starts[0]))) is not NONE:
            return problem
        archived = {self._node.chain.main_chain_at(round_) for round_ in starts}
        if not self._view.archive_problem and (soon := self._view.unarchived_checkpoint()) is not None:
            archived.add(soon[1])
        wanted: list[Certificate] = []
        for certificate in reversed(path):
            wanted.insert(0, certificate)
            if not self._is_here(certificate) and self._is_due(certificate):
                if (problem := self._room_problem(wanted)) is not NONE:
                    return problem  # it leads back further than to the newest state
                await self._fetch_round(certificate)
                if self._news.is_set():
                    break  # the head, or the newest archived state, may have changed
            if certificate.record.body.parent in archived and self._is_here(certificate):
                break  # a newcomer begins here
        return self._missing_problem([c for c in wanted if not self._is_here(c)])

    def _count_members(self, path: Sequence[Certificate]) -> int:
        """Return how many contributors of a path are here. An admission alone may be idle, and holds no updates."""
        member_seconds = self._node.membership.spec.round.member_seconds
        here = {key for key, h in self._view.heartbeats().items() if h.seconds_since <= member_seconds}
        return len(here & {key for certificate in path for key in certificate.record.body.contributors})

    def _room_problem(self, path: Sequence[Certificate]) -> _Problem:
        sizes, store = self._sizes(path), self._node.store
        total = sum(sizes.values())
        if total > self._most_bytes:
            return _Problem(
                "bound",
                f"the updates since round {path[0].record.body.round} take {byte_size(total)}, and archive.updates "
                f"allows {byte_size(self._most_bytes)}: no more are kept until a newer state is archived",
            )
        missing = sum(size for blob, size in sizes.items() if not store.has(blob))
        if missing and missing + self._reserve > (free := store.free_bytes):
            text = f"the disk has no room for {byte_size(missing)} of updates ({byte_size(free)} are free): free some"
            return _Problem("disk", text)
        return NONE

    def _is_here(self, certificate: Certificate) -> bool:
        return certificate.digest in self._checked and all(
            map(self._node.store.has, self._files.blob_sizes(certificate))
        )

    def _is_due(self, certificate: Certificate) -> bool:
        failure = self._failures.get(certificate.digest)
        return failure is None or time.monotonic() >= failure.retry_at

    async def _fetch_round(self, certificate: Certificate) -> None:
        """Fetch a round's blobs from those that are here. A held one is compared with its digest once."""
        record, before = certificate.digest, self._failures.get(certificate.digest)
        try:
            await self._files.round_files(certificate)
        except StoreError:
            raise  # not their fault
        except (CairnError, asyncio.TimeoutError) as e:
            count = 1 if before is None else before.count + 1
            pause = min(RETRY_SECONDS * count, MAX_RETRY_SECONDS)
            self._failures[record] = _Failure(count, time.monotonic() + pause, str(e) or "no answer in time")
        else:
            self._failures.pop(record, None)
            self._checked.add(record)

    def _missing_problem(self, missing: Sequence[Certificate]) -> _Problem:
        failed = [c for c in missing if c.digest in self._failures]
        if not failed:
            return NONE
        first, last, failure = failed[0], failed[-1], self._failures[failed[0].digest]
        contributors = first.record.body.contributors
        what = f"the updates of round {first.record.body.round}"
        if first is not last:
            what = f"the updates of rounds {first.record.body.round} to {last.record.body.round}"
        here = self._node.network.peers.entries()
        if any(key in here for key in contributors):
            text = f"{what} do not come: {failure.reason}"
            return _Problem(f"late {first.digest}", text) if failure.count >= PATIENCE else NONE
        names = ", ".join(sorted(map(self._name_of, contributors))[:NAMED])
        more = f" and {len(contributors) - NAMED} more" if len(contributors) > NAMED else ""
        have = "has" if len(contributors) == 1 else "have"
        return _Problem(f"gone {first.digest}", f"{what} are held by nobody here: {names}{more} {have} them")

    def _report(self, problem: _Problem) -> None:
        """Show a problem, and log a new one."""
        if problem.topic and problem.topic != self._problem.topic:
            log.warning("%s. Until then a newcomer cannot go on from the head while no member is here", problem.text)
        elif self._problem.topic and not problem.topic:
            log.info("newcomers can go on from the head again")
        self._problem, self._view.updates_problem = problem, problem.text
