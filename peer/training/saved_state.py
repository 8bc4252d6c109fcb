"""A trainer's own state on disk: error feedback, progress, the optimizers' moments, and the count of windows.

Two files in the trainer's folder. `trainer-N.safetensors` holds the tensors. `trainer.json` is the manifest: it names
that file with its digest, and is replaced, durably, only when the tensors are on the disk. So there is always one whole
state, the old or the new. Everything is checked when it is read (digest, run, peer, layout, shapes, finiteness), and
nothing is ever unpickled.

The undecided update (`update-DIGEST.blob`) and the manifest of its making (`update.json`) are on the disk before its
header can be signed. A peer that signed two updates for one parent would be reported. The update that a saved state has
as announced stays as long as that state: if it is missed, nothing else holds its progress. When it is decided, both
stay until a state is saved that knows of it: an older one would have its work sent twice. In a replayable run
`update.json` always stays.
`dropped-DIGEST.bits` are the masks of own updates' values that reduced rounds did not transmit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeVar

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from peer.channel.messages import Count, DigestField, PeerKeyField, Share
from peer.durable import publish, write_durably
from peer.errors import SavedStateError
from peer.training.inner_optimizer import MOMENTS
from peer.training.windows import STRICT, WindowAccounting
from protocol.errors import MalformedError, os_reason
from protocol.ids import Digest, PeerKey, RunId
from protocol.layout import Layout
from protocol.merkle import CHUNK, blob_digest, leaf_hash, tree_hash

STATE_MANIFEST = "trainer.json"
UPDATE_MANIFEST = "update.json"
MEMORY_RAN_OUT = "memory-ran-out"
FEEDBACK, PROGRESS, POSITION = "feedback", "progress", "position"
"""Groups of tensors. A replayable run saves its parameters themselves (POSITION): a restart must give the same bits."""


@dataclass(frozen=True, slots=True)
class FeedbackEntry:
    """The part of our update that the error feedback contains.

    `factor`: the decay since it was added. `only`: the digest of a kept mask of its values; None for all of them.
    """

    factor: Share
    only: DigestField | None = None
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class TrainerManifest:
    """The record held at one time, the count of windows, and the updates in the error feedback (`restored`).

    `state`: in a replayable run, the digest of the state that this peer had computed then. `last_update`: the last
    update made until then, decided or not.
    """

    record: DigestField
    round: Count
    windows: WindowAccounting
    restored: Mapping[DigestField, FeedbackEntry]
    state: DigestField | None = field(default=None, kw_only=True)
    last_update: DigestField | None = field(default=None, kw_only=True)
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class SavedState(TrainerManifest):
    """All of a trainer's own state; tensors by parameter name, moments by MOMENT/parameter, all fp32.

    Empty feedback and progress say that the announced update carries all progress. In a replayable run there are none
    of them, but `position`: the parameters.
    """

    optimizer_steps: int
    feedback: Mapping[str, Tensor]
    progress: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    file: Path | None = None
    """The file that the tensors were read from."""
    position: Mapping[str, Tensor] = field(default_factory=dict)


class _UpdateManifest(BaseModel):
    model_config = STRICT
    run: DigestField
    peer: PeerKeyField
    layout: DigestField
    held: TrainerManifest


class _StateManifest(_UpdateManifest):
    optimizer_steps: Count
    file: Annotated[str, Field(pattern=r"^trainer-\d+\.safetensors$")]
    digest: DigestField


M = TypeVar("M", bound=_UpdateManifest)


class SavedFolder:
    """The folder of one trainer's state: of one run, peer and model. Any thread may use it, one at a time per file."""

    def __init__(
        self, folder: Path, run: RunId, peer: PeerKey, layout: Layout, *,
        replayable: bool = False, device: str = "", gpu_memory: int = 0,
    ):  # fmt: skip
        """`device`, and `gpu_memory`, the most bytes of it (0: all), are those of which `memory_ran_out` speaks."""
        self.folder, self.run, self.peer, self.layout, self.replayable = folder, run, peer, layout, replayable
        self._needed: frozenset[Path] = frozenset()
        """The update and the masks that the state on disk refers to."""
        self._memory = {"device": device, "gpu_memory": gpu_memory}
        self._known: Digest | None = None
        """The last update that the state on disk knows of."""
        self._kept: Digest | None = None
        """The update of `update.json`."""

    @property
    def memory_ran_out(self) -> bool:
        """True once this device's memory ran out for a round beside a step, in this process or an earlier one."""
        try:
            return json.loads((self.folder / MEMORY_RAN_OUT).read_bytes()) == self._memory
        except (OSError, ValueError):
            return False

    def note_memory_ran_out(self) -> None:
        """Note that memory has run out, for the next process. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_durably(self.folder / MEMORY_RAN_OUT, [json.dumps(self._memory).encode()])

    def next_file(self) -> Path:
        """Return the path for the next state's tensors, which `publish` expects. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.remove_unused()
        serials = [int(p.stem.split("-")[1]) for p in self._files()]
        return self.folder / f".trainer-{max(serials, default=0) + 1}.safetensors.part"

    def publish(self, state: SavedState, temporary: Path, digest: Digest) -> None:
        """Make this the saved state: the tensors in a file from `next_file`, on the disk, and all else in `state`.

        Raises OSError, after which the old state is still there.
        """
        path = temporary.with_name(temporary.name.removeprefix(".").removesuffix(".part"))
        publish(temporary, path)
        manifest = _StateManifest(
            run=self.run, peer=self.peer, layout=self.layout.digest, held=state,
            optimizer_steps=state.optimizer_steps, file=path.name, digest=digest,
        )  # fmt: skip
        write_durably(self.folder / STATE_MANIFEST, [manifest.model_dump_json(indent=1).encode()])
        self._needed, self._known = frozenset(self._files_of(state)), state.last_update
        self.remove_unused()

    def not_saved(self, why: OSError) -> SavedStateError:
        """Return the error to raise. Remove what was begun, since the disk may be full."""
        self.remove_unused()
        return SavedStateError(
            f"the trainer's state was not saved in {self.folder} ({why}): free some space or fix its permissions; "
            "until then a restart loses what was not yet announced"
        )

    def read(self) -> SavedState | None:
        """Return the saved state, or None when there is none. Raises SavedStateError when it cannot be used."""
        manifest = self._read(STATE_MANIFEST, _StateManifest)
        saved = manifest and self._state(manifest, self._tensors(manifest))
        self._needed = frozenset(self._files_of(saved)) if saved else frozenset()
        self._known = saved and saved.last_update
        update = self._read(UPDATE_MANIFEST, _UpdateManifest)
        mine = update and update.held.windows.announced
        self._kept = mine and mine.blob
        if update is None or (saved and (saved.windows.announced == mine or self._known == self._kept)):
            return saved
        if self.replayable and saved and mine and saved.windows.claimed_from >= mine.end:
            return saved  # saved after the update was decided
        # The update was made after the state was saved, so it carries that state's feedback and progress.
        empty = SavedState(**vars(update.held), optimizer_steps=0, feedback={}, progress={}, moments={})
        if saved is None:
            return empty
        return replace(empty, optimizer_steps=saved.optimizer_steps, moments=saved.moments, file=saved.file)

    def _read(self, name: str, kind: type[M]) -> M | None:
        """Return a manifest, or None when it is not there. Raises SavedStateError."""
        path = self.folder / name
        try:
            manifest = kind.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as e:
            raise SavedStateError(f"{path} does not parse ({e.errors()[0]['msg']})") from None
        except MalformedError as e:
            raise SavedStateError(f"{path} does not parse ({e})") from None
        except OSError as e:
            raise SavedStateError(f"{path} cannot be read: {os_reason(e)}") from None
        if (manifest.run, manifest.peer, manifest.layout) != (self.run, self.peer, self.layout.digest):
            raise SavedStateError(f"the trainer's state in {self.folder} is of another run, peer or model")
        return manifest

    def quarantine(self) -> None:
        """Rename a state that cannot be used; the last one is kept for inspection. A sound `update.json` stays."""
        unusable = [self.folder / STATE_MANIFEST, *self._files()]
        try:
            self._read(UPDATE_MANIFEST, _UpdateManifest)
        except SavedStateError:
            unusable.append(self.folder / UPDATE_MANIFEST)
        for earlier in self.folder.glob("unusable-*"):
            earlier.unlink()
        for path in unusable:
            if path.exists():
                path.replace(path.with_name(f"unusable-{path.name}"))

    # -- the undecided update, and the masks ---------------------------------------------------------------------

    def keep_update(self, name: Digest, blob: bytes, manifest: TrainerManifest) -> Path:
        """Keep the own update that `manifest` has as announced until it is decided. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.update_file(name)
        write_durably(path, [blob])
        kept = _UpdateManifest(run=self.run, peer=self.peer, layout=self.layout.digest, held=manifest)
        write_durably(self.folder / UPDATE_MANIFEST, [kept.model_dump_json(indent=1).encode()])
        self._kept = name
        return path

    def discard_update(self, name: Digest) -> None:
        """Remove an update that `keep_update` kept, or began to keep, and that is not announced after all.

        A manifest of an earlier update stays, in a replayable run any: it says what is decided, or where windows end.
        """
        manifest = (self.folder / UPDATE_MANIFEST,) if self._kept == name and not self.replayable else ()
        for path in (*manifest, self.update_file(name)):
            with contextlib.suppress(OSError):
                path.unlink()

    def update_file(self, name: Digest) -> Path:
        """Return the path of our update's blob."""
        return self.folder / f"update-{name}.blob"

    def keep_mask(self, packed: bytes) -> Digest:
        """Keep the mask of our update's values that were added to the feedback. Return its digest. Raises OSError.

        It is not flushed to the disk, since its digest is checked when it is read.
        """
        name = blob_digest(packed)
        path = self._mask_file(name)
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.part")
            temporary.write_bytes(packed)
            temporary.replace(path)
        return name

    def mask(self, name: Digest) -> bytes:
        """Return a kept mask. Raises OSError, and SavedStateError for a damaged one."""
        packed = self._mask_file(name).read_bytes()
        if blob_digest(packed) != name:
            raise SavedStateError(f"{self._mask_file(name)} is damaged")
        return packed

    def _mask_file(self, name: Digest) -> Path:
        return self.folder / f"dropped-{name}.bits"

    def _files_of(self, manifest: TrainerManifest) -> Iterator[Path]:
        """Yield the update and the masks that a manifest refers to."""
        if manifest.windows.announced is not None:
            yield self.update_file(manifest.windows.announced.blob)
        yield from (self._mask_file(e.only) for e in manifest.restored.values() if e.only is not None)

    def tidy(
        self,
        undecided: Digest | None,
        entries: Mapping[Digest, FeedbackEntry],
        unsaved: Iterable[TrainerManifest] = (),
    ) -> None:
        """Remove decided updates that the saved state knows of, unused masks and unfinished files. Raises OSError.

        `entries`: the feedback's present content. `unsaved`: states that are about to be saved.
        """
        keep = {path for manifest in unsaved for path in self._files_of(manifest)} | self._needed
        if self._kept is not None and self._kept != self._known:
            keep.add(self.update_file(self._kept))
        elif undecided is None and not self.replayable:
            (self.folder / UPDATE_MANIFEST).unlink(missing_ok=True)
        keep |= {self._mask_file(e.only) for e in entries.values() if e.only is not None}
        if undecided is not None:
            keep.add(self.update_file(undecided))
        for pattern in ("update-*", ".update*.part", "dropped-*", ".dropped-*.part"):
            for path in self.folder.glob(pattern):
                if path not in keep:
                    path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [p for p in self.folder.glob("trainer-*.safetensors") if p.stem.split("-")[1].isdigit()]

    def remove_unused(self) -> None:
        """Remove tensors that are not those of the saved state, of this process or of one that was killed.

        Whole files too: on a full disk they would occupy the space of the next state. The folder is one trainer's own.
        """
        try:
            manifest = self._read(STATE_MANIFEST, _StateManifest)
            whole = [path for path in self._files() if manifest is None or path.name != manifest.file]
        except SavedStateError:
            whole = []  # nothing says which ones are needed
        for path in (*self.folder.glob(".trainer*.part"), *whole):
            with contextlib.suppress(OSError):
                path.unlink()

    def _tensors(self, manifest: _StateManifest) -> dict[str, Tensor]:
        path = self.folder / manifest.file
        try:
            if file_digest(path) != manifest.digest:
                raise SavedStateError(f"{path} is damaged: its bytes are not those that were saved")
            return load_file(path)
        except (OSError, SafetensorError) as e:
            raise SavedStateError(f"{path} cannot be read: {e}") from None

    def _state(self, manifest: _StateManifest, tensors: dict[str, Tensor]) -> SavedState:
        shapes = {t.name: t.shape for t in self.layout.tensors}
        groups: dict[str, dict[str, Tensor]] = {g: {} for g in (FEEDBACK, PROGRESS, POSITION, *MOMENTS)}
        for key, tensor in tensors.items():
            group, _, name = key.partition("/")
            fits = group in groups and shapes.get(name) == tuple(tensor.shape) and tensor.dtype == torch.float32
            if not fits or not bool(tensor.isfinite().all()):
                raise SavedStateError(
                    f"{self.folder / manifest.file} holds {key[:80]}, which does not fit or is not finite"
                )
            groups[group][name] = tensor
        wanted = (POSITION,) if groups[POSITION] else (FEEDBACK, PROGRESS)
        if any(groups[g].keys() != shapes.keys() for g in wanted):
            raise SavedStateError(f"{self.folder / manifest.file} does not hold the whole model")
        return SavedState(
            **vars(manifest.held),
            optimizer_steps=manifest.optimizer_steps,
            feedback=groups[FEEDBACK],
            progress=groups[PROGRESS],
            moments={f"{m}/{n}": t for m in MOMENTS for n, t in groups[m].items()},
            file=self.folder / manifest.file,
            position=groups[POSITION],
        )


def file_digest(path: Path) -> Digest:
    """Return the blob digest of a file's bytes, read in chunks."""
    with open(path, "rb") as file:
        return tree_hash([leaf_hash(piece) for piece in iter(lambda: file.read(CHUNK), b"")])
