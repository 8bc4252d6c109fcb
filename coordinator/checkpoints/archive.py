"""Archives states as folders that `transformers` loads: weights, config, tokenizer, and origin.

checkpoints/round-000030/model.safetensors   the checkpoint itself: its blob digest is the state digest
                         config.json         for AutoModelForCausalLM.from_pretrained
                         tokenizer.json
                         cairn.json          the manifest: run, round, state digest, the record before it, accepted
                                             tokens; once it is final, the finalization of the record that names it
                                             (`final`, base64)
                         spec.signed         the run's spec, which names the owner's key
                         certificate.bin     the record that the finalization is for, with its votes
                         witnesses.json      of a run's last state, which no record names: heartbeats that name it

A folder gets its name when all of it is on disk, and loses it before its first file is deleted: nobody sees half of
one.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import json
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rfc8785

from coordinator import durable
from coordinator.checkpoints.retention import RetentionCandidate, RetentionPolicy, evictable, to_delete
from coordinator.errors import CoordinatorError
from coordinator.regular_file import read_regular
from protocol.checks import PARSE_ERRORS
from protocol.envelope import open_envelope
from protocol.errors import MalformedError, ProtocolError, os_reason
from protocol.ids import MAX_COUNT, MAX_ROUND, Digest, RunId
from protocol.spec import RunSpec
from protocol.strict_json import integer_field, read_json
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

MANIFEST, MODEL, CONFIG, TOKENIZER = "cairn.json", "model.safetensors", "config.json", "tokenizer.json"
SPEC, CERTIFICATE, WITNESSES = "spec.signed", "certificate.bin", "witnesses.json"
FILES = (MODEL, CONFIG, TOKENIZER, MANIFEST, SPEC, CERTIFICATE, WITNESSES)
"""The names of all files that an archived state may hold."""

MAX_MANIFEST = 64 * 1024
DRAFT = ".round-"
LEFT = ".left.json"
"""The states whose copies are to be deleted: a restart must not forget them."""

MAX_LEFT = 4096
"""States in LEFT, the newest ones: without an address for copies none is ever taken from it."""

DEFAULT = RetentionPolicy()


@dataclass(frozen=True, slots=True)
class ArchivedState:
    """One archived state: the state after `record`, with which `round` begins.

    `final` is the owner's finalization of the record that names it (an envelope); b"" while there is none.
    """

    folder: Path
    run: RunId
    round: int
    state: Digest
    record: Digest
    tokens: int
    final: bytes = b""

    @property
    def final_epoch(self) -> int:
        """The epoch of its finalization: that of the newest rollback then, 0 before the first. -1: it is not final."""
        try:
            return wire.Finalization.FromString(open_envelope(self.final, "finalization").payload).epoch
        except (ProtocolError, *PARSE_ERRORS):
            return -1

    @property
    def size(self) -> int:
        """Bytes of all files; 0 when they are deleted."""
        return sum(size for _, size in self.files())

    def files(self) -> list[tuple[str, int]]:
        """Return name and bytes of each file."""
        found = []
        for name in FILES:
            with contextlib.suppress(OSError):
                found.append((name, (self.folder / name).stat().st_size))
        return found


class Archive:
    """The archived states of one run, in `folder`. Thread-safe.

    `policy` decides which states stay, `losses` gives the validation losses by state for `policy.best`. `spec_envelope`
    is the signed spec, for strangers who verify a copy. `reserve` is the number of bytes of the disk to leave free.
    `on_left` is called, in any thread, with states that the chain has left, before they are deleted.
    """

    def __init__(
        self, folder: Path, spec: RunSpec, *, policy: RetentionPolicy = DEFAULT, spec_envelope: bytes = b"",
        reserve: int = 0, losses: Callable[[], Mapping[Digest, float]] = dict,
        on_left: Callable[[Sequence[Digest]], None] = lambda _: None,
    ):  # fmt: skip
        self.folder = folder
        c = spec.checkpoint
        self.policy = replace(policy, waiting=-(-c.final_depth // c.every) + 1)
        self._losses = losses
        self._on_left = on_left
        self._spec = spec
        self._run = spec.run_id
        self._spec_envelope = spec_envelope
        self._reserve = reserve
        self._writing = threading.RLock()
        """Held by changes of the folder: for minutes, on a slow disk. Never acquired on the event loop."""

        self._lock = threading.RLock()
        """Held for moments."""

        self._open: Counter[Path] = Counter()
        self._left = _read_left(folder / LEFT)
        self._read: dict[Path, tuple[tuple[int, int, int], ArchivedState | None]] = {}
        """The manifests as all were read last, each with a mark that changes with the file."""

    def add(
        self, checkpoint: Path, tokenizer: Path, *, round: int, state: Digest, record: Digest, tokens: int,
        certificate: bytes = b"", witnesses: Sequence[bytes] = (),
    ) -> ArchivedState:  # fmt: skip
        """Archive a checkpoint file of a store (linked if possible, else copied). Idempotent.

        `certificate` and `witnesses` are given for a run's last state: the certificate of `record`, and the signed
        heartbeats of its contributors that name the state. Raises CoordinatorError.
        """
        with self._writing:
            target = self.folder / f"round-{round:06d}"
            if (existing := read_manifest(target)) is not None and (existing.state, existing.record) == (state, record):
                return existing
            draft = self.folder / f"{DRAFT}{round:06d}"
            try:
                self._sweep()
                draft.mkdir(parents=True)
                self._link_or_copy(checkpoint, draft / MODEL)
                _copy(tokenizer, draft / TOKENIZER)
                durable.write(draft / CONFIG, config_json(self._spec.model.config))
                if self._spec_envelope:
                    durable.write(draft / SPEC, self._spec_envelope)
                if certificate:
                    durable.write(draft / CERTIFICATE, certificate)
                    durable.write(draft / WITNESSES, _json([base64.b64encode(w).decode() for w in witnesses]))
                names = {"run": str(self._run), "name": self._spec.name, "state": str(state), "record": str(record)}
                durable.write(draft / MANIFEST, _json(names | {"round": round, "tokens": tokens}))
                durable.sync(draft)
                if existing is not None:
                    self._mark_left([existing])
                if target.exists():
                    self._remove(target, even_if_open=True)
                os.rename(draft, target)
                durable.sync(self.folder)
            except OSError as e:
                shutil.rmtree(draft, ignore_errors=True)
                remedy = (
                    "free some disk space" if e.errno in (errno.ENOSPC, errno.EDQUOT) else "make the folder writable"
                )
                why = os_reason(e)
                raise CoordinatorError(f"cannot archive round {round} in {target}: {why}; {remedy}") from None
            self.prune()
            return ArchivedState(target, self._run, round, state, record, tokens)

    def mark_final(self, archived: ArchivedState, final: bytes, certificate: bytes) -> ArchivedState:
        """Add the finalization of a state, and the certificate that it is for; on disk when this returns.

        Raises CoordinatorError.
        """
        with self._writing:
            try:
                manifest = json.loads((archived.folder / MANIFEST).read_bytes())
                durable.replace(archived.folder / CERTIFICATE, certificate)
                manifest["final"] = base64.b64encode(final).decode()
                durable.replace(archived.folder / MANIFEST, _json(manifest))
            except (OSError, ValueError) as e:
                why = ((isinstance(e, OSError) and e.strerror) or str(e)).lower()
                raise CoordinatorError(
                    f"the signature under round {archived.round} cannot be written to {archived.folder}: {why}; free "
                    "some disk space, or make the folder writable"
                ) from None
            return replace(archived, final=final)

    def all(self) -> list[ArchivedState]:
        """Return the archived states, oldest first."""
        before, read = self._read, {}
        for folder in self.folder.glob("round-*"):
            with contextlib.suppress(OSError):
                s = (folder / MANIFEST).stat()
                mark, known = (s.st_ino, s.st_mtime_ns, s.st_size), before.get(folder)
                read[folder] = known if known is not None and known[0] == mark else (mark, read_manifest(folder))
        self._read = read
        found = [a for _, a in read.values() if a is not None and a.run == self._run]
        return sorted(found, key=lambda a: a.round)

    def holds(self, archived: ArchivedState) -> bool:
        """Return whether this state of this record is archived."""
        there = read_manifest(archived.folder)
        return there is not None and (there.state, there.record) == (archived.state, archived.record)

    @contextlib.contextmanager
    def reading(self, archived: ArchivedState) -> Iterator[ArchivedState]:
        """Keep this state from being deleted until the context ends. Raises CoordinatorError if it is deleted."""
        with self._lock:
            if not (archived.folder / MANIFEST).is_file():
                raise CoordinatorError(
                    f"the state of round {archived.round} is not archived any more: take a newer one"
                )
            self._open[archived.folder] += 1
        try:
            yield archived
        finally:
            with self._lock:
                self._open[archived.folder] -= 1

    def drop(self, archived: Iterable[ArchivedState]) -> None:
        """Delete states that the chain has left, unless another one has taken the place since."""
        with self._writing:
            gone = [a for a in archived if self.holds(a)]
            self._mark_left(gone)
            for a in gone:
                self._remove(a.folder, even_if_open=True)

    def _mark_left(self, archived: Sequence[ArchivedState]) -> None:
        if archived:
            states = [a.state for a in archived]
            self._keep_left([*self._left, *(s for s in states if s not in self._left)])
            self._on_left(states)

    def left(self) -> set[Digest]:
        """Return the states that the chain has left, and whose copies are not known to be deleted."""
        with self._lock:
            return set(self._left)

    def forget_left(self, states: Iterable[Digest]) -> None:
        """Drop states from `left`: their copies are deleted."""
        with self._writing:
            gone = set(states)
            self._keep_left([s for s in self._left if s not in gone])

    def _keep_left(self, states: list[Digest]) -> None:
        states = states[-MAX_LEFT:]
        if states == self._left:
            return
        with self._lock:
            self._left = states
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            durable.replace(self.folder / LEFT, _json(list(map(str, states))))
        except OSError as e:  # it must not keep a rollback from being followed
            why = os_reason(e)
            log.warning("%s cannot be written: %s; copies of these states may stay", self.folder / LEFT, why)

    def prune(self) -> None:
        """Delete the states that the policy does not keep."""
        with self._writing:
            for kept in to_delete(self._kept(), self.policy):
                self._remove(kept.key.folder)

    def free_space(self, size: int) -> None:
        """Make room for `size` bytes more, by deleting states that are kept only for being new.

        Raises CoordinatorError if that would not be enough; then none is deleted.
        """
        with self._writing:
            self.folder.mkdir(parents=True, exist_ok=True)
            going = evictable(self._kept(), self.policy)
            while (free := shutil.disk_usage(self.folder).free) < size + self._reserve:
                if free + sum(s.size for s in going) < size + self._reserve:
                    raise CoordinatorError(
                        f"the disk of {self.folder} is full: {free / 1e9:.2f} GB are free, the next checkpoint takes "
                        f"{size / 1e9:.2f} GB, and {self._reserve / 1e9:.2f} GB stay free: free some disk space, or "
                        "keep fewer checkpoints ([archive] in coordinator.toml)"
                    )
                a = going.pop(0).key
                log.warning("the disk is full: the archived state of round %d is deleted to make room", a.round)
                self._remove(a.folder)

    def _kept(self) -> list[RetentionCandidate[ArchivedState]]:
        losses = self._losses()
        return [
            RetentionCandidate(a, a.round, a.size, bool(a.final), losses.get(a.state), self._open[a.folder] > 0)
            for a in self.all()
        ]

    def _remove(self, folder: Path, *, even_if_open: bool = False) -> None:
        """Delete a folder, its name first.

        A process that is killed meanwhile leaves a draft, which the next one deletes.
        """
        going = folder.with_name(f"{DRAFT}{folder.name.removeprefix('round-')}.gone")
        with contextlib.suppress(OSError):
            shutil.rmtree(going, ignore_errors=True)
            with self._lock:
                if self._open[folder] and not even_if_open:
                    return
                os.rename(folder, going)
            shutil.rmtree(going, ignore_errors=True)

    def _sweep(self) -> None:
        for left in self.folder.glob(f"{DRAFT}*"):  # left by a process that was killed: only one archives at a time
            shutil.rmtree(left)

    def _link_or_copy(self, source: Path, target: Path) -> None:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
        self.free_space(source.stat().st_size)
        _copy(source, target)


def read_manifest(folder: Path) -> ArchivedState | None:
    """Return what the manifest of an archived folder says; None if it is no such folder."""
    try:
        return parse_manifest(folder, read_regular(folder / MANIFEST, MAX_MANIFEST))
    except OSError:
        return None


def parse_manifest(folder: Path, data: bytes) -> ArchivedState | None:
    """Return what a cairn.json says; None if it is none."""
    try:
        manifest = read_json(data, MANIFEST, MAX_MANIFEST)
        run, state, record = (
            RunId.parse(manifest["run"]),
            Digest.parse(manifest["state"]),
            Digest.parse(manifest["record"]),
        )
        round_, tokens = integer_field(manifest, "round", MAX_ROUND), integer_field(manifest, "tokens", MAX_COUNT)
        final = base64.b64decode(manifest.get("final", ""), validate=True)
        return ArchivedState(folder, run, round_, state, record, tokens, final)
    except (ValueError, KeyError, TypeError, AttributeError, MalformedError, binascii.Error):
        return None


def config_json(config: Mapping[str, Any]) -> bytes:
    """Return the one form in which a model's config is archived, whatever the types of equal numbers in it."""
    return _json(json.loads(rfc8785.dumps(dict(config))))


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _read_left(path: Path) -> list[Digest]:
    """Return the states in a file of `LEFT`, oldest first; none if there is no such file, or it is damaged."""
    try:
        return [Digest.parse(text) for text in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, MalformedError) as e:
        log.warning("%s cannot be read (%s): copies of states that a rollback has left may stay", path, e)
        return []


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    durable.sync(target)
