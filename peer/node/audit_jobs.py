"""The jobs of audits, with all that they need in the store: for this node's audits, and for `cairn audit update`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from peer.auditor.job import MAX_SCREENED, SCREENED_BACK, AuditJob, ClaimedUpdate, Rebase, ScreenJob, StateFiles
from peer.errors import AuditError, UncheckableUpdate
from peer.node.audit_disk import AuditDisk
from peer.node.blob_retention import BlobRetention
from peer.node.network import Network
from peer.node.options import NodeOptions
from peer.node.round_blob_fetcher import RoundBlobFetcher
from peer.node.state_fetcher import StateFetcher, StateStart
from peer.node.trainer_files import base_file, data_shards, fetch_training_files, spec_file, write_spec
from peer.store import Store
from protocol.audits import SCREENED_UPDATES
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey
from protocol.messages import AuditCheck, Certificate, Signed, UpdateHeader
from protocol.rounds.blobs import applied_blobs
from protocol.rounds.policy import RoundPolicy
from protocol.rounds.retention import kept_starts
from protocol.spec import RunSpec


@dataclass(eq=False)
class AuditJobs:
    """Makes jobs, one at a time. `begin` comes first, unless a trainer has begun.

    `retention` keeps what the present one reads. `disk` bounds what is fetched; None: by the store's limit alone.
    """

    spec: RunSpec
    options: NodeOptions
    store: Store
    chain: Chain
    updates: RoundBlobFetcher
    files: StateFetcher
    retention: BlobRetention
    disk: AuditDisk | None = None

    def __post_init__(self) -> None:
        self._policy = RoundPolicy.of(self.spec)
        self._chooser = SystemRandom()

    async def begin(self, network: Network) -> None:
        """Fetch the data that jobs need, and write the spec for them. Raises CairnError, and TimeoutError."""
        write_spec(self.spec, self.options.folder)
        await fetch_training_files(self.spec, self.store, network, private_data=self.options.private_data)

    def release(self) -> None:
        """Note that the present job is over."""
        self.retention.protect_check(frozenset())

    def screen(self, certificate: Certificate, update: Digest) -> ScreenJob:
        """Return the job of a screen, of what the store has. Raises UncheckableUpdate when that is too little.

        It is compared with updates of keys with stake: others may all be one person's.
        """
        audited, path = _update_of(certificate, update), self.chain.path(self.chain.root, certificate.digest)
        record = [audited, *self._held(certificate, MAX_SCREENED - 1, without=audited.author)]
        if len(record) < SCREENED_UPDATES or not self.store.has(audited.body.blob):
            raise UncheckableUpdate("the store does not have enough updates of its round to compare it with")
        earlier = [self._held(path[-1 - back], MAX_SCREENED) for back in SCREENED_BACK if back < len(path)]
        self.retention.protect_check(frozenset(u.body.blob for updates in [record, *earlier] for u in updates))
        paths = [tuple(self.store.path(u.body.blob) for u in updates) for updates in [record, *earlier] if updates]
        return ScreenJob(spec_file(self.options.folder), paths[0], tuple(paths[1:]), self.options.threads)

    def _held(
        self, certificate: Certificate, most: int, *, without: PeerKey | None = None
    ) -> Sequence[Signed[UpdateHeader]]:
        """Return at most that many updates of a record, by keys with stake, whose blobs are here: a draw."""
        stakes = self.chain.stakes(certificate.record.body.parent)
        held = [u for u in certificate.record.body.updates
                if u.author != without and stakes.get(u.author) and self.store.has(u.body.blob)]  # fmt: skip
        return held if len(held) <= most else self._chooser.sample(held, most)

    async def _blob(self, digest: Digest, holders: Sequence[PeerKey]) -> Path:
        """Return the file of an update, read once more: one that the disk has spoilt since would fail every check.

        Raises BlobCorrupt for such a file, which is removed, other CairnErrors, and TimeoutError.
        """
        path = await self.updates.ensure(digest, holders)
        await asyncio.to_thread(self.store.verify, digest)
        return path

    async def job(
        self,
        certificate: Certificate,
        update: Digest,
        check: AuditCheck,
        seed: bytes | None,
        *,
        own: PeerKey | None = None,
    ) -> AuditJob:
        """Return the job of a check of an update of a record, with all that it needs in the store.

        `seed`: of the record's audits, which a replay does not need. `own`: the author of an update of the same record
        that a loss check may measure beside it, if the store has it. Raises CairnError, and TimeoutError.
        """
        chain, audited = self.chain, _update_of(certificate, update)
        path = chain.path(chain.root, certificate.digest)
        header, body = audited.body, certificate.record.body
        has_rebase = check == "replay" and header.rebase_window > header.first_window
        if has_rebase and len(path) < 2:
            raise AuditError("the record before the update's own is not in memory")
        at = len(path) - 1 - has_rebase
        before = path[at].record.body

        async def make_room(start: StateStart) -> None:
            self.retention.protect_check(_blobs_of(path[start.index :]) | {start.state})
            if self.disk is not None:
                missing = self.files.missing(start, path[: at + has_rebase])
                if not self.store.has(header.blob):
                    missing[header.blob] = self.updates.codec.size
                await self.disk.make_room(missing)

        possible = self.files.starts(path[: at + 1], kept_starts(self._policy, path[: at + 1]))
        start, checkpoint, rounds = await self.files.collect(possible, path[:at], make_room)
        rebase = None
        if has_rebase:
            rounds_after = await self.files.round_files(path[at])
            rebase = Rebase(rounds_after, body.base_state, chain.weight(body.parent))
        beside = next((u for u in body.updates if u.author == own and self.store.has(u.body.blob)), None)
        return AuditJob(
            check=check,
            spec_path=spec_file(self.options.folder),
            audit_seed=None if seed is None else Digest(seed),
            update=_claimed(audited, await self._blob(header.blob, [audited.author, *body.contributors])),
            start=StateFiles(checkpoint, start.state, rounds, before.base_state, chain.weight(before.parent)),
            rebase=rebase,
            own=None if beside is None else _claimed(beside, self.store.path(beside.body.blob)),
            device=self.options.device if self.options.audit_device == "auto" else self.options.audit_device,
            threads=self.options.threads,
            shards=data_shards(self.spec, self.store),
            private_data=self.options.private_data,
            gpu_memory=self.options.gpu_share(replayable=self.spec.audit.replayable),
            base=base_file(self.spec, self.store),
        )


def _update_of(certificate: Certificate, digest: Digest) -> Signed[UpdateHeader]:
    for update in certificate.record.body.updates:
        if update.digest == digest:
            return update
    raise AuditError("the record lists no such update")


def _claimed(update: Signed[UpdateHeader], blob: Path) -> ClaimedUpdate:
    header = update.body
    return ClaimedUpdate(update.author, header.first_window, header.rebase_window, header.end_window, blob)


def _blobs_of(path: Sequence[Certificate]) -> frozenset[Digest]:
    """Return the blobs of these records' states, and of all their updates."""
    listed = (u.body.blob for c in path for u in c.record.body.updates)
    return frozenset(listed).union(*map(applied_blobs, path))
