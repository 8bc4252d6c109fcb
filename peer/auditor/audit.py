"""One job, from its files to its scores: the only place that builds a model for an audit."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from peer.auditor.job import AuditJob
from peer.auditor.loss_check import LossCheck
from peer.auditor.replay import Replayed, compare, replay
from peer.errors import AuditError
from peer.training.data import WindowReader
from peer.training.device import out_of_memory
from peer.training.round_files import RoundFiles
from peer.training.single_process import SingleProcessBackend
from protocol.ids import Digest
from protocol.messages import Score
from protocol.spec import RunSpec, parse_spec


def audit(job: AuditJob, device: torch.device) -> tuple[Score, ...]:
    """Make the check of a job on a device. Raises CairnError, and OSError for a file that cannot be read."""
    spec = parse_spec(job.spec_path.read_bytes())
    _check_fields(job, spec)
    try:
        return _audit(job, spec, device)
    except torch.OutOfMemoryError:
        raise out_of_memory(device, "make an audit") from None


def _audit(job: AuditJob, spec: RunSpec, device: torch.device) -> tuple[Score, ...]:
    files = RoundFiles.of(spec)
    files.check_checkpoint(job.start.checkpoint, job.start.checkpoint_digest)
    if spec.model.adapter is not None and job.base is None:
        raise AuditError("the run's frozen base model is not here, and nothing is measured without it")
    backend = _backend(job, spec, device, files)
    vocabulary = spec.model.config.get("vocab_size")
    reader = WindowReader(
        spec.data,
        {Digest.parse(d): Path(p) for d, p in job.shards.items() if p},
        vocabulary=vocabulary if isinstance(vocabulary, int) else None,
        private_data=job.private_data,
    )
    announced = files.update(job.update.blob)
    if job.check == "loss":
        if job.audit_seed is None:
            raise AuditError("a loss check needs the seed that draws its windows")
        own = None if job.own is None else (job.own, files.update(job.own.blob))
        return LossCheck(spec, job.audit_seed, backend, reader).scores(job.update, announced, own)

    def replayed(backend: SingleProcessBackend) -> Replayed:
        found = replay(spec, backend, reader, files, job.update, job.start.accepted_windows, job.rebase)
        if job.rebase is not None:
            _check_state(backend, job.rebase.state, job.threads)
        return found

    replays = [replayed(backend)]
    scores = compare(backend.outer.codec, announced, replays)
    if any(not s.passed for s in scores):
        in_bf16 = not backend.inner.in_bf16
        if spec.model.adapter is not None and device.type == "cuda":
            # A frozen base in fp32 takes twice the memory: there is none for both.
            del backend
            gc.collect()  # modules that refer to themselves
            torch.cuda.empty_cache()
            backend = _backend(job, spec, device, files, exact=True)
        else:
            _load(job, backend, files)
        backend.inner.in_bf16 = in_bf16
        replays.append(replayed(backend))
        scores = compare(backend.outer.codec, announced, replays)
    return scores


def _backend(
    job: AuditJob, spec: RunSpec, device: torch.device, files: RoundFiles, *, exact: bool = False
) -> SingleProcessBackend:
    """Return a backend whose base is the state that the job starts from."""
    backend = SingleProcessBackend(spec, device, lambda: None, base=job.base, exact=exact)
    backend.outer.replayable = True  # in any run: an audit has no error feedback
    _load(job, backend, files)
    return backend


def _load(job: AuditJob, backend: SingleProcessBackend, files: RoundFiles) -> None:
    """Make the base the state that the job starts from."""
    backend.load_state(job.start.checkpoint)
    for update in job.start.rounds:
        if update.parts:
            backend.outer.advance_reduced(update.parts)
        else:
            backend.outer.advance(files.contributions(update))
    _check_state(backend, job.start.state, job.threads)


def _check_state(backend: SingleProcessBackend, expected: Digest, threads: int) -> None:
    """Raise AuditError unless the base is the state that the chain names: an audit of another one accuses anybody."""
    if (found := backend.store_state(threads, None)) != expected:
        raise AuditError(f"the state here is {found.short}, and the chain says {expected.short}")


def _check_fields(job: AuditJob, spec: RunSpec) -> None:
    """Raise AuditError for a job whose fields contradict each other, or the spec."""
    update, batch = job.update, spec.inner.batch
    if not update.first_window <= update.rebase_window <= update.end_window or update.windows < 1:
        raise AuditError("the windows of the update are not in order")
    if job.check == "loss":
        if job.rebase is not None:
            raise AuditError("a loss check has no rebase: it measures from one state")
        return
    if not spec.audit.replayable:
        raise AuditError("the updates of this run depend on what only their authors have: none can be replayed")
    if job.own is not None:
        raise AuditError("a replay has no other update beside it")
    if (job.rebase is not None) != (update.rebase_window > update.first_window):
        raise AuditError("a replay needs the record of the rebase if there was one, and only then")
    if update.windows % batch or (update.rebase_window - update.first_window) % batch:
        raise AuditError(f"the windows of the update are not whole steps of {batch}")
