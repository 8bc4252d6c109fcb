"""Checkpoints on disk: `find_checkpoint` resolves a path to one, `verify_checkpoint` checks one for a stranger.

    ~/.cairn/coordinated/NAME        an owner's run: the newest state in its checkpoints/
    .../checkpoints/round-000030     one of these states
    ~/.cairn/runs/RUN                a volunteer's run: the newest checkpoint in its store/
    FILE                             a checkpoint; its run's spec lies above it, or is named

Nothing is locked and nothing is written, so a peer or coordinator may be running in the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from coordinator.authoring.resolve import BASE, BASE_FOLDER
from coordinator.checkpoints.archive import CONFIG, MANIFEST, MODEL, SPEC, TOKENIZER, ArchivedState, read_manifest
from coordinator.checkpoints.copies import file_names, file_reader
from coordinator.checkpoints.verification import VerificationError, VerifiedCheckpoint
from coordinator.checkpoints.verification import verify_checkpoint as verify
from coordinator.export import ExportError, checkpoint_digest, read_layout
from coordinator.model_card import Origin
from coordinator.regular_file import read_regular
from peer.node.chain_store import DIRECTIVE
from peer.node.snapshot import FILE as STATUS
from peer.node.snapshot import MAX_SNAPSHOT, parse_snapshot
from peer.store.blobs import blob_file
from protocol.directive_codec import MAX_DIRECTIVE_ENVELOPE
from protocol.envelope import open_envelope
from protocol.errors import CairnError, MalformedError, os_reason
from protocol.ids import Digest, PeerKey, RunId, sha256
from protocol.invite import Invite
from protocol.merkle import blob_digest
from protocol.message_codec import MessageDecoder
from protocol.messages import MAX_CERTIFICATE, Directive, Finalization, RoundRecord
from protocol.spec import KIND, MAX_SPEC, AdapterSpec, ChatSpec, ModelSpec, RunSpec, open_spec, parse_spec

SPECS = ("spec.json", "run/spec.signed", "spec.signed", "store/values/spec", "values/spec")
"""Paths of a run's spec, relative to a folder of the run."""

ARCHIVED = re.compile(r"round-\d+(-[0-9a-f]+)?", re.ASCII)
"""The name of an archived state's folder, or of its copy's."""

ABOVE = 8
"""Number of folders above a file that are searched for its run."""

MOST_RECORDS = 1000
"""Maximum records read back from the head; the signatures of each are checked."""

MAX_PATH = 4096

WANTED = (
    "name a run's folder (~/.cairn/coordinated/NAME or ~/.cairn/runs/RUN), an archived state in a coordinator's "
    "checkpoints/, or a checkpoint file"
)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint file with its model's config, its run's tokenizer.json and chat template, and its origin.

    Of a run that trains an adapter, `base` is the file of its base, if it is here. `base_folder` is the model's folder
    that the owner made it from, if it is known and still there, else "".
    """

    checkpoint: Path
    model: ModelSpec
    tokenizer: Path
    origin: Origin
    chat: ChatSpec | None = None
    base: Path | None = None
    base_folder: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """The model's config."""
        return self.model.config

    @property
    def adapter(self) -> AdapterSpec | None:
        """The adapter that the run trains."""
        return self.model.adapter

    def base_file(self) -> Path:
        """Return the file of the frozen base. Raises ExportError if it is not here."""
        if self.base is None:
            assert self.adapter is not None
            raise ExportError(
                f"{self.checkpoint}: an adapter, and its base model is not in the run's folder: put it beside the "
                f"checkpoint as {self.adapter.base.digest}.safetensors, or name the folder of a peer or the "
                "coordinator of the run"
            )
        return self.base


def find_checkpoint(
    path: Path, spec_file: Path | None = None, run: RunId | None = None, report: Callable[[str], None] = lambda _: None
) -> FoundCheckpoint:
    """Return the checkpoint at a path.

    `spec_file` is the run's spec if it is not beside the checkpoint. `run` is the required run. `report` is called with
    a line for each state that is passed over. Raises ExportError, and CairnError for a spec.
    """
    try:
        return _find_checkpoint(path, spec_file, run, report)
    except OSError as e:
        raise ExportError(f"{path}: cannot be read: {os_reason(e)}: {WANTED}") from None


def _find_checkpoint(
    path: Path, spec_file: Path | None, run: RunId | None, report: Callable[[str], None]
) -> FoundCheckpoint:
    if not path.exists():
        raise ExportError(f"{path}: no such file or folder: {WANTED}")
    path = path.resolve()
    given = None
    if spec_file is not None:
        spec = read_spec(spec_file)
        given = _Run(spec_file.resolve().parent, spec)
    beside = read_manifest(path.parent) if path.name == MODEL else None
    archived = [beside] if beside is not None else _archived(path)
    holds = (path / "store" / "blobs").is_dir()
    if archived and holds and not (path / SPECS[1]).is_file():
        found = _newest_of_volunteer(path, archived, given, report)
    elif archived:
        found = _of_archived(max(archived, key=lambda a: a.round), given)
    elif path.is_file():
        found = _of_file(path, given or _run_above(path))
    elif holds:
        found = _newest_held(_Run(path, given.spec) if given else _run_above(path / "store"), path)
    elif (path / MANIFEST).is_file():
        raise ExportError(f"{path / MANIFEST}: cannot be read: {WANTED}")
    elif (path / CONFIG).is_file():
        raise ExportError(
            f"{path}: a model that Hugging Face's libraries load already, no checkpoint of a run: {WANTED}"
        )
    else:
        raise ExportError(f"{path}: not a checkpoint: {WANTED}")
    wrong = next((r for r in (run, given.spec.run_id if given else None) if r not in (None, found.origin.run)), None)
    if wrong is not None:
        raise ExportError(
            f"{path}: of run {found.origin.name!r} ({found.origin.run.short}), not of run {wrong.short}: name that "
            "run's folder, or leave --invite and --spec away"
        )
    return found


def verify_checkpoint(place: str, trusted: str, report: Callable[[str], None] = lambda _: None) -> VerifiedCheckpoint:
    """Check that a folder or fsspec address holds a state that the run's owner finalized.

    `trusted` is an invite, or the owner's key in hex. Raises CairnError, which names the failed check.
    """
    run, owner = None, None
    try:
        if trusted.startswith("cairn1:"):
            run = Invite.parse(trusted).run
        else:
            owner = PeerKey.parse(trusted.lower())
    except MalformedError as e:
        raise VerificationError(f"{e}: give the run's invite, or its owner's key (64 hexadecimal digits)") from None
    try:
        return verify(file_reader(place), run=run, owner=owner, names=file_names(place), report=report)
    except VerificationError as e:
        raise VerificationError(f"{place}: {e}") from None


def read_spec(path: Path) -> RunSpec:
    """Return the spec in a file: canonical JSON, or signed. Raises ExportError."""
    try:
        data = read_regular(path, MAX_SPEC + 1024)
        if data.startswith(b"{"):
            return parse_spec(data)
        return open_spec(data, RunId(blob_digest(open_envelope(data, KIND, limit=MAX_SPEC + 1024).payload)))
    except OSError as e:
        raise ExportError(f"{path}: cannot be read: {os_reason(e)}: name a run's spec.json or spec.signed") from None
    except CairnError as e:
        why = " ".join(str(e).split())[:200]
        raise ExportError(f"{path}: not a run's spec: {why}: name its spec.json or spec.signed") from None


def _archived(folder: Path) -> list[ArchivedState]:
    """Return the archived state in a folder, or those of a run's folder."""
    for place in ([folder], folder.glob("checkpoints/round-*"), folder.glob("round-*")):
        named = (p for p in place if p == folder or ARCHIVED.fullmatch(p.name))
        found = [a for p in named if (a := read_manifest(p)) is not None]
        if found:
            return found
    return []


def _newest_of_volunteer(
    folder: Path, copies: list[ArchivedState], given: _Run | None, report: Callable[[str], None]
) -> FoundCheckpoint:
    """Return the newest checkpoint of a volunteer that has copies of last states. Raises ExportError.

    The owner may have continued the run since, by a rollback from before a copy: so the epoch counts before the round.
    """
    run = _Run(folder, given.spec if given else read_spec(copies[0].folder / SPEC))
    ages = {c: (run.epoch(c.final, Finalization), c.round) for c in copies}
    newest = max(copies, key=ages.__getitem__)
    epoch, of_store = ages[newest][0], run.store_epoch()
    for copy, (of_copy, _) in ages.items():
        if of_copy < max(epoch, of_store):
            report(f"{copy.folder} is passed over: the owner has rolled the run back since. Name it to take it anyway")
    if epoch < of_store:
        return _newest_held(run, folder)
    found = _of_archived(newest, run)
    if epoch == of_store:
        with contextlib.suppress(ExportError):
            found = max(found, _newest_held(run, folder), key=lambda f: f.origin.round or 0)
    return found


def _of_archived(archived: ArchivedState, given: _Run | None) -> FoundCheckpoint:
    folder = archived.folder
    for file in (MODEL, TOKENIZER, CONFIG):
        if not (folder / file).is_file():
            raise ExportError(f"{folder / file}: is missing: take another archived state, or a whole copy of this one")
    # The owner's folder has the chain too, a copy elsewhere only the spec.
    owner = folder.parent.parent
    run = given or (_Run(owner, read_spec(owner / SPECS[1])) if (owner / SPECS[1]).is_file() else None)
    if run is None or run.spec.run_id != archived.run:
        run = _Run(folder, read_spec(folder / SPEC))
    before = run.record(archived.round - 1, archived.record)
    origin = run.origin(archived.state, archived.round, archived.tokens, before)
    return run.found(folder / MODEL, origin)


def _run_above(path: Path) -> _Run:
    for folder in list(path.parents)[:ABOVE]:
        for name in SPECS:
            if (folder / name).is_file():
                return _Run(folder, read_spec(folder / name))
    raise ExportError(
        f"{path}: no run's spec lies above it: name the spec.json of the volunteer's folder, or the owner's "
        "run/spec.signed, with --spec"
    )


def _newest_held(run: _Run, folder: Path) -> FoundCheckpoint:
    """Return the newest checkpoint in a node's store. Raises ExportError."""
    for origin in run.origins():
        if origin.state is not None and (file := run.blob(origin.state)) is not None:
            return run.found(file, origin)
    every = run.spec.checkpoint.every
    raise ExportError(f"{folder}: holds no checkpoint yet: one is kept every {every} rounds: try again after the next")


def _of_file(path: Path, run: _Run) -> FoundCheckpoint:
    """Return a checkpoint file of a run, with its round if the run's chain on disk names it. Raises ExportError."""
    read_layout(path)  # before the file is hashed, since it may be no checkpoint
    try:
        state = Digest.parse(path.name)
    except MalformedError:
        state = checkpoint_digest(path)
    unknown = Origin(run.spec.name, run.spec.run_id, state)
    origin = next((o for o in run.origins() if o.state == state), unknown)
    return run.found(path, origin)


@dataclass(frozen=True)
class _Run:
    """A run's spec, and the node's store beside it in `folder`."""

    folder: Path
    spec: RunSpec

    @property
    def store(self) -> Path:
        return self.folder if (self.folder / "blobs").is_dir() else self.folder / "store"

    @property
    def chat(self) -> ChatSpec | None:
        marked = self.spec.data.conversations
        return None if marked is None else marked.chat

    @cached_property
    def _decoder(self) -> MessageDecoder:
        return MessageDecoder(self.spec.run_id, self.spec.owner_key)

    def blob(self, digest: Digest) -> Path | None:
        path = blob_file(self.store, digest)
        return path if path.is_file() else None

    def found(self, checkpoint: Path, origin: Origin) -> FoundCheckpoint:
        """Return what belongs to a checkpoint of the run. Raises ExportError."""
        base, folder = self._base(checkpoint), self._base_folder()
        return FoundCheckpoint(checkpoint, self.spec.model, self.tokenizer(checkpoint), origin, self.chat, base, folder)

    def _base(self, checkpoint: Path) -> Path | None:
        if (adapter := self.spec.model.adapter) is None:
            return None
        places = [*(folder / BASE for folder in self._of_owner()), checkpoint.parent]
        files = [self.blob(adapter.base.name), *(p / f"{adapter.base.digest}.safetensors" for p in places)]
        return next((f for f in files if f is not None and f.is_file()), None)

    def _of_owner(self) -> list[Path]:
        """Return where the owner's working folder of the run may be."""
        return [self.folder / "run", self.folder]

    def _base_folder(self) -> str:
        """Return the folder from which the owner made the base; "" if it is not known here, or gone."""
        for workdir in self._of_owner():
            with contextlib.suppress(OSError):
                folder = os.fsdecode(read_regular(workdir / BASE_FOLDER, MAX_PATH))
                return folder if Path(folder).is_dir() else ""
        return ""

    def tokenizer(self, checkpoint: Path) -> Path:
        """Return the run's tokenizer.json, from the store, beside the spec or the checkpoint. Raises ExportError."""
        wanted = self.spec.tokenizer
        held = self.blob(wanted.name)
        places = [self.folder, self.folder / "data", self.folder / "run" / "data", checkpoint.parent]
        for path in [*([held] if held else []), *(p / TOKENIZER for p in places)]:
            with contextlib.suppress(OSError):
                if blob_digest(read_regular(path, wanted.size)) == wanted.name:
                    return path
        raise ExportError(
            f"{checkpoint}: the run's tokenizer ({wanted.name.short}) is not there: put its tokenizer.json beside the "
            "checkpoint"
        )

    def record(self, round_: int, digest: Digest) -> RoundRecord | None:
        """Return a record of the chain on disk; None if it is missing or damaged."""
        try:
            data = read_regular(self.store / "chain" / f"{round_:013d}-{digest.hex()}", 32 + MAX_CERTIFICATE)
            if sha256(data[32:]) != data[:32]:
                return None
            return self._decoder.decode_certificate(data[32:]).record.body
        except (OSError, CairnError):
            return None

    def epoch(self, message: bytes, kind: type[Finalization | Directive]) -> int:
        """Return the epoch of a message of the owner; 0 if it is missing or damaged."""
        with contextlib.suppress(CairnError):
            return self._decoder.decode(message, kind).body.epoch
        return 0

    def store_epoch(self) -> int:
        """Return the number of rollbacks that the store knows of."""
        with contextlib.suppress(OSError):
            return self.epoch(read_regular(self.store / "values" / DIRECTIVE, MAX_DIRECTIVE_ENVELOPE), Directive)
        return 0

    def origins(self) -> Iterator[Origin]:
        """Yield the states that status file, chain and spec name, newest first."""
        status, head = None, None
        with contextlib.suppress(OSError):
            status = parse_snapshot(read_regular(self.store.parent / STATUS, MAX_SNAPSHOT))
        if status is not None:
            with contextlib.suppress(MalformedError):
                head = Digest.parse(status.head)
        if status is not None and head is not None:
            # Nothing else on disk names a finished run's last state.
            with contextlib.suppress(MalformedError):
                state, last = Digest.parse(status.state), self.record(status.state_round - 1, head)
                yield self.origin(state, status.state_round, status.accepted_tokens, last)
        names = sorted((p.name for p in (self.store / "chain").glob("*-*")), reverse=True)
        record, tokens = None, None
        if status is not None and head is not None and (record := self.record(status.round - 1, head)) is not None:
            tokens = status.accepted_tokens
        elif names and (newest := re.fullmatch(r"(\d{13})-([0-9a-f]{64})", names[0])):
            record = self.record(int(newest[1]), Digest.parse(newest[2]))
        for _ in range(MOST_RECORDS):
            if record is None:
                break
            if tokens is not None:
                tokens -= record.progress * self.spec.data.window_tokens
            before = self.record(record.round - 1, record.parent)
            yield self.origin(record.base_state, record.round, tokens, before)
            record = before
        yield self.origin(self.spec.genesis.name, 0, 0, None)

    def origin(self, state: Digest, round_: int, tokens: int | None, before: RoundRecord | None) -> Origin:
        """Return the origin of a state after the record `before`, with the median loss in it, weighted by windows."""
        loss = None
        if before is not None and before.windows:
            loss = before.loss
        return Origin(self.spec.name, self.spec.run_id, state, round_, tokens, loss)
