"""Two rounds of two peers in a replayable run, an audit of an update of the second one, and fakes of that update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from peer.auditor.audit import audit
from peer.auditor.job import AuditJob, ClaimedUpdate, Rebase, StateFiles
from peer.auditor.replay import replay
from peer.channel import Apply, RoundUpdates, UpdateMade
from peer.training.data import WindowReader
from peer.training.round_files import RoundFiles
from peer.training.single_process import SingleProcessBackend
from peer.training.trainer import Trainer
from protocol.codec import Codec, make_codec
from protocol.ids import Digest, sha256
from protocol.messages import Score
from protocol.spec import AdapterSettings, OuterSpec, Schedule
from tests.support.local_trainer import loaded, train, update
from tests.support.trainer_world import BATCH, World, accepted_round, apply, peer_key

CPU = torch.device("cpu")
SEED = Digest(sha256(b"c"))
AUTHOR, OTHER = 1, 2
STEPS, EARLY = 24, 6
"""Steps of each update of the second round, and those of them before the rebase."""


@dataclass(frozen=True)
class Audited:
    """The things that an auditor has: the run's files, the first record, and both updates of the second round."""

    world: World
    first: RoundUpdates
    accepted: int
    """Windows of the first record."""
    states: tuple[Digest, Digest]
    """State digests: the genesis, and after the first record."""
    made: Mapping[int, UpdateMade]
    loaded_at_once: UpdateMade
    """An update of the second round that was trained on one state alone."""

    def job(self, check: str = "replay", *, of: int = AUTHOR, blob: Path | None = None, own: bool = False) -> AuditJob:
        """Return the job of a check of an update, whose blob may be another."""
        made = self.made[of]
        at_genesis = StateFiles(self.world.genesis, self.states[0], (), self.states[0], 0)
        after = StateFiles(self.world.genesis, self.states[0], (self.first,), self.states[1], self.accepted)
        has_rebase = check == "replay" and made.rebase_window > made.first_window
        start = self.world.start(of)
        return AuditJob(
            check="loss" if check == "loss" else "replay",
            spec_path=start.spec_path,
            audit_seed=SEED,
            update=claimed(made, of, blob),
            start=at_genesis if has_rebase else after,
            rebase=Rebase(self.first, self.states[1], self.accepted) if has_rebase else None,
            own=claimed(self.made[OTHER], OTHER) if own else None,
            device="cpu",
            shards=start.shards,
            base=start.base,
        )

    @property
    def codec(self) -> Codec:
        return make_codec(self.world.spec.codec, self.world.spec.model.layout)

    def reader(self) -> WindowReader:
        start = self.world.start(AUTHOR)
        return WindowReader(self.world.spec.data, {Digest.parse(d): Path(p) for d, p in start.shards.items()})


def claimed(made: UpdateMade, author: int, blob: Path | None = None) -> ClaimedUpdate:
    return ClaimedUpdate(peer_key(author), made.first_window, made.rebase_window, made.end_window,
                         blob or made.blob_path)  # fmt: skip


def make(
    folder: Path, *, replayable: bool = True, vocabulary: int = 64, adapter: AdapterSettings | None = None
) -> Audited:
    """Train two rounds. The data are random tokens below 64, so an update helps its own windows alone."""
    text = np.random.default_rng(1).integers(0, 64, 16_384).astype(np.uint32)
    world = World.make(
        folder, replayable=replayable, text=text, config={"vocab_size": vocabulary}, outer=OuterSpec(),
        adapter=adapter, optimizer="muon", lr=1e-2,
        schedule=Schedule(kind="cosine", warmup_tokens=100, total_tokens=20_000),
    )  # fmt: skip
    trainers = {n: loaded(world, n) for n in (AUTHOR, OTHER)}
    firsts = {}
    for n, trainer in trainers.items():
        train(trainer, 12)
        firsts[n] = update(trainer, folder / f"first-{n}.blob")
    record = accepted_round(0, *firsts.items())
    accepted = sum(u.windows for u in record.updates)
    made, states = {}, set()
    for n, trainer in trainers.items():
        train(trainer, EARLY)
        states.add(_apply(trainer, record, firsts[n], accepted))
        train(trainer, STEPS - EARLY)
        made[n] = update(trainer, folder / f"second-{n}.blob")
    late = loaded(world, 3)
    states.add(apply(late, Apply(record, (), 0, accepted)).state_digest)
    train(late, STEPS)
    (state,) = states
    return Audited(world, record, accepted, (world.spec.genesis.name, state), made, update(late, folder / "late.blob"))


def _apply(trainer: Trainer, record: RoundUpdates, mine: UpdateMade, accepted: int) -> Digest:
    return apply(trainer, Apply(record, (), mine.end_window, accepted)).state_digest


def scores(job: AuditJob) -> dict[str, Score]:
    return {s.name: s for s in audit(job, CPU)}


def passed(found: Mapping[str, Score]) -> bool:
    return all(s.passed for s in found.values())


def after_huge_update(audited: Audited, folder: Path, records: int) -> AuditJob:
    """Return the replay of an update whose author announced one with matrices of huge scales before it.

    That one is of the record after `records` others. All windows of the update come before its rebase.
    """
    codec, honest = audited.codec, (audited.first, accepted_round(1, *audited.made.items()))
    mine = next(u for u in honest[records].updates if u.author == peer_key(AUTHOR))
    values = {t.name: torch.zeros(t.shape) for t in codec.layout.tensors}
    codec.add_to(mine.blob.read_bytes(), values)
    file = folder / "huge.blob"
    file.write_bytes(codec.encode({n: v.sign() * 2.0**28 if v.ndim == 2 else v for n, v in values.items()}))
    updates = tuple(replace(u, blob=file) if u is mine else u for u in honest[records].updates)
    record, before = replace(honest[records], updates=updates), honest[:records]
    accepted = [sum(u.windows for r in some for u in r.updates) for some in (before, (*before, record))]
    states = [_backend(audited, some).store_state(1, None) for some in (before, (*before, record))]
    start, first = audited.world.start(AUTHOR), audited.made[AUTHOR].end_window
    end, genesis = first + STEPS * BATCH, audited.states[0]
    job = AuditJob(
        check="replay",
        spec_path=start.spec_path,
        audit_seed=SEED,
        update=ClaimedUpdate(peer_key(AUTHOR), first, end, end, folder / "after.blob"),
        start=StateFiles(audited.world.genesis, genesis, before, states[0], accepted[0]),
        rebase=Rebase(record, states[1], accepted[1]),
        device="cpu",
        shards=start.shards,
    )
    job.update.blob.write_bytes(replayed(audited, job, job.update))
    return job


def replayed(audited: Audited, job: AuditJob, update: ClaimedUpdate) -> bytes:
    """Return the update that an honest author announces for this claim, on the states of a job."""
    spec, files = audited.world.spec, RoundFiles.of(audited.world.spec)
    backend = _backend(audited, job.start.rounds)
    return replay(spec, backend, audited.reader(), files, update, job.start.accepted_windows, job.rebase).blob


# -- fakes -------------------------------------------------------------------------------------------------------


def fakes(audited: Audited, folder: Path) -> dict[str, Path]:
    """Return the files of fakes of the author's update, by name."""
    blobs = dict(_altered(audited) | _trained(audited))
    folder.mkdir(exist_ok=True)
    files = {}
    for name, blob in blobs.items():
        files[name] = folder / f"{name}.blob"
        files[name].write_bytes(blob)
    return files


def _altered(audited: Audited) -> dict[str, bytes]:
    """Return fakes that cost no training."""
    codec = audited.codec
    honest = audited.made[AUTHOR].blob_path.read_bytes()
    chance = torch.Generator().manual_seed(3)

    def encoded(how) -> bytes:
        values = {t.name: torch.zeros(t.shape) for t in codec.layout.tensors}
        codec.add_to(honest, values)
        return bytes(codec.encode({n: how(v).contiguous() for n, v in values.items()}))

    return {
        "noise": encoded(lambda v: v.abs() * (torch.randint(0, 2, v.shape, generator=chance) * 2 - 1)),
        "copy": audited.made[OTHER].blob_path.read_bytes(),
        "flipped": encoded(lambda v: -v),
        "huge": encoded(lambda v: 8 * v),
        "tiny": encoded(lambda v: v / 8),
        "tenth_flipped": encoded(lambda v: torch.where(torch.rand(v.shape, generator=chance) < 0.1, -v, v)),
    }


def _trained(audited: Audited) -> dict[str, bytes]:
    """Return fakes that were trained in another way than they claim."""
    honest, accepted = claimed(audited.made[AUTHOR], AUTHOR), audited.accepted
    rebase = Rebase(audited.first, audited.states[1], accepted)
    moved = replace(honest, first_window=500, rebase_window=500 + EARLY * BATCH, end_window=500 + honest.windows)
    half = honest.first_window + honest.windows // 2
    return {
        "half": _retrained(audited, replace(honest, end_window=half), rebase, at_start=True),
        "other_windows": _retrained(audited, moved, rebase, at_start=True),
        "fresh": _retrained(audited, honest, None, at_start=False),
        "stale": _stale(audited, honest),
    }  # fmt: skip


def in_bf16(audited: Audited) -> bytes:
    """Return the author's honest update as a GPU makes it: the forward passes are in bf16."""
    backend = _backend(audited)
    backend.inner.in_bf16 = True
    honest, rebase = claimed(audited.made[AUTHOR], AUTHOR), Rebase(audited.first, audited.states[1], audited.accepted)
    spec = audited.world.spec
    return replay(spec, backend, audited.reader(), RoundFiles.of(spec), honest, 0, rebase).blob


def _backend(audited: Audited, rounds: Sequence[RoundUpdates] = ()) -> SingleProcessBackend:
    backend = SingleProcessBackend(audited.world.spec, CPU, lambda: None, base=audited.world.start(AUTHOR).base)
    backend.outer.replayable = True
    backend.load_state(audited.world.genesis)
    for record in rounds:
        backend.outer.advance(RoundFiles.of(audited.world.spec).contributions(record))
    return backend


def _retrained(audited: Audited, update: ClaimedUpdate, rebase: Rebase | None, *, at_start: bool) -> bytes:
    spec, files = audited.world.spec, RoundFiles.of(audited.world.spec)
    backend = _backend(audited, () if at_start else (audited.first,))
    return replay(spec, backend, audited.reader(), files, update, 0 if at_start else audited.accepted, rebase).blob


def _stale(audited: Audited, update: ClaimedUpdate) -> bytes:
    """Return an update that was trained on the genesis alone, less the author's first update: never rebased."""
    spec, files = audited.world.spec, RoundFiles.of(audited.world.spec)
    backend = _backend(audited)
    (before,) = (c.blob for c in files.contributions(audited.first) if c.author == update.author)
    local = backend.outer
    base = {n: t.clone() for n, t in (local.base or {}).items()}
    values = {n: torch.zeros_like(t) for n, t in local.local.items()}
    local.codec.add_to(before, values)
    local.base = {n: t - values[n] if n in values else t for n, t in base.items()}
    return replay(spec, backend, audited.reader(), files, update, 0, None).blob
