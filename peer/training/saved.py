"""A trainer's own state on disk: what is learnt and not sent, the optimiser's moments, and the count of windows.

Two files in the trainer's folder. `trainer-N.safetensors` holds the tensors; `trainer.json` names it with its digest,
and is replaced, durably, only when the tensors are on disk: so there is always one whole state, the old or the new.
What is read back is checked (digest, run, peer, layout, shapes, finiteness); nothing is ever unpickled.

Beside them lie, on disk before its header can be signed, the update that is not decided yet (`update-DIGEST.blob`) and
what was known when it was made (`update.json`): a peer that signed two updates for one parent would be reported. The
update that a saved state has as announced stays as long as that state: should it be missed, what it carried is nowhere
else in it. `dropped-DIGEST.bits` say what of own updates was put back that were accepted in rounds that were reduced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from peer.channel.messages import DigestField, PeerKeyField
from peer.errors import SavedStateError
from peer.training.claims import Announced, Claims
from peer.training.durable import publish, write_durably
from peer.training.inner import MOMENTS
from protocol.ids import MAX_COUNT, Digest, PeerKey, RunId
from protocol.layout import Layout
from protocol.merkle import CHUNK, blob_digest, leaf_hash, tree_hash

SHEET = "trainer.json"
UPDATE_SHEET = "update.json"
MAX_SHEET = 1024 * 1024
FEEDBACK, PROGRESS = "feedback", "progress"

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _Update(_Strict):
    parent: DigestField
    blob: DigestField
    size: Count
    first: Count
    end: Count
    steps: Count
    loss: float


class _Restored(_Strict):
    blob: DigestField
    factor: Annotated[float, Field(ge=0, le=1)]
    only: DigestField | None = None


class _Known(_Strict):
    version: Literal[1] = 1
    run: DigestField
    peer: PeerKeyField
    layout: DigestField
    record: DigestField
    round: Count
    counter: Count
    claimed_from: Count
    steps: Count
    announced: _Update | None
    restored: list[_Restored]


class _Sheet(_Known):
    optimiser_steps: Count
    file: Annotated[str, Field(pattern=r"^trainer-\d+\.safetensors$")]
    digest: DigestField


@dataclass(frozen=True, slots=True)
class Back:
    """What the feedback holds of an own update.

    `factor`: what decay has left of it. `only`: which of its values, by the digest of a kept selection; None: all.
    """

    factor: float
    only: Digest | None = None


@dataclass(frozen=True)
class Known:
    """What was held and counted at a time. `restored`: of which own updates the feedback holds something."""

    record: Digest
    round: int
    claims: Claims
    restored: Mapping[Digest, Back]

    @property
    def announced_blob(self) -> Digest | None:
        return self.claims.announced and self.claims.announced.blob


@dataclass(frozen=True)
class Saved(Known):
    """All of a trainer's own state. No feedback and no progress: all that was learnt is in the announced update."""

    optimiser_steps: int
    feedback: Mapping[str, Tensor]
    progress: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    file: Path | None = None
    """Where the tensors were read from."""


S = TypeVar("S", bound=_Known)


class SavedFolder:
    """Where one trainer's state lies: of one run, peer and model."""

    def __init__(self, folder: Path, run: RunId, peer: PeerKey, layout: Layout):
        self.folder, self.run, self.peer, self.layout = folder, run, peer, layout
        self._needed: frozenset[Path] = frozenset()
        """The update and the selections that the state on disk refers to."""

    def write(self, state: Saved, by: Callable[[Path], Digest]) -> None:
        """Replace what is saved. Raises SavedStateError, and then the old state is still there.

        `by` writes the tensors (those in `state` are not looked at): a safetensors file, on disk, with the names that
        are used here. It returns the file's blob digest.
        """
        try:
            temporary = self.place()
            self.publish(state, temporary, by(temporary))
        except OSError as e:
            raise self.not_saved(e) from None

    def place(self) -> Path:
        """Where the next state's tensors are to be written, for `publish`. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.drop_rest()
        serials = [int(p.stem.split("-")[1]) for p in self._files()]
        return self.folder / f".trainer-{max(serials, default=0) + 1}.safetensors.part"

    def publish(self, state: Saved, temporary: Path, digest: Digest) -> None:
        """From now on this is what is saved: the tensors in a file from `place`, on disk, and all else in `state`.

        Raises OSError, and then the old state is still there.
        """
        path = temporary.with_name(temporary.name.removeprefix(".").removesuffix(".part"))
        publish(temporary, path)
        sheet = self._sheet(state, path.name, digest)
        write_durably(self.folder / SHEET, [sheet.model_dump_json(indent=1).encode()])
        self._needed = frozenset(self._files_of(state))
        self.drop_rest()

    def not_saved(self, why: OSError) -> SavedStateError:
        """What to say of it. What was begun is removed: the disk may be full."""
        self.drop_rest()
        return SavedStateError(
            f"the trainer's state was not saved in {self.folder} ({why}): free some space or mend its permissions; "
            "until then a restart loses what was not yet announced"
        )

    def read(self) -> Saved | None:
        """What is saved; None when nothing is. Raises SavedStateError when it cannot be used."""
        sheet = self._read(SHEET, _Sheet)
        saved = sheet and self._state(sheet, self._tensors(sheet))
        self._needed = frozenset(self._files_of(saved)) if saved else frozenset()
        update = self._read(UPDATE_SHEET, _Known)
        if update is None or update.announced is None:
            return saved
        if saved and saved.claims.announced == _announced(update.announced):
            return saved
        # The update was made after the state was saved: what that holds was in the update already.
        steps, moments, file = (saved.optimiser_steps, saved.moments, saved.file) if saved else (0, {}, None)
        return Saved(
            **vars(_known(update)), optimiser_steps=steps, feedback={}, progress={}, moments=moments, file=file
        )

    def _read(self, name: str, kind: type[S]) -> S | None:
        """One of the sheets; None when it is not there. Raises SavedStateError."""
        path = self.folder / name
        try:
            if path.stat().st_size > MAX_SHEET:
                raise SavedStateError(f"{path} is too large to be a trainer's state")
            sheet = kind.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as e:
            raise SavedStateError(f"{path} does not parse ({e.errors()[0]['msg']})") from None
        except OSError as e:
            raise SavedStateError(f"{path} cannot be read: {e.strerror}") from None
        if (sheet.run, sheet.peer, sheet.layout) != (self.run, self.peer, self.layout.digest):
            raise SavedStateError(f"the trainer's state in {self.folder} is of another run, peer or model")
        return sheet

    def set_aside(self) -> None:
        """Move a state that cannot be used out of the way (one such is kept, for a look at it)."""
        for earlier in self.folder.glob("unusable-*"):
            earlier.unlink()
        for path in (self.folder / SHEET, self.folder / UPDATE_SHEET, *self._files()):
            if path.exists():
                path.replace(path.with_name(f"unusable-{path.name}"))

    def keep_update(self, blob: bytes, known: Known) -> Path:
        """Keep the own update that `known` has as announced, until it is decided. Raises OSError."""
        if known.claims.announced is None:
            raise ValueError("no update is announced")
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.update_file(known.claims.announced.blob)
        write_durably(path, [blob])
        write_durably(self.folder / UPDATE_SHEET, [_Known(**self._fields(known)).model_dump_json(indent=1).encode()])
        return path

    def update_file(self, name: Digest) -> Path:
        return self.folder / f"update-{name}.blob"

    def keep_selection(self, packed: bytes) -> Digest:
        """Keep what says which values of an own update were put back. Its digest. Raises OSError.

        Whoever reads it checks it: it is not worth waiting for the disk.
        """
        name = blob_digest(packed)
        path = self._selection_file(name)
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.part")
            temporary.write_bytes(packed)
            temporary.replace(path)
        return name

    def selection(self, name: Digest) -> bytes:
        """One that was kept. Raises OSError, and SavedStateError for a damaged one."""
        packed = self._selection_file(name).read_bytes()
        if blob_digest(packed) != name:
            raise SavedStateError(f"{self._selection_file(name)} is damaged")
        return packed

    def _selection_file(self, name: Digest) -> Path:
        return self.folder / f"dropped-{name}.bits"

    def _files_of(self, known: Known) -> Iterator[Path]:
        """The update and the selections that it refers to."""
        if (blob := known.announced_blob) is not None:
            yield self.update_file(blob)
        yield from (self._selection_file(b.only) for b in known.restored.values() if b.only is not None)

    def tidy(self, undecided: Digest | None, back: Mapping[Digest, Back], unsaved: Iterable[Known] = ()) -> None:
        """Forget updates that are decided, selections of what is not in the feedback, unfinished files. Raises OSError.

        `back`: what is in the feedback now. `unsaved`: states that are about to be saved.
        """
        if undecided is None:
            (self.folder / UPDATE_SHEET).unlink(missing_ok=True)
        keep = {path for known in unsaved for path in self._files_of(known)} | self._needed
        keep |= {self._selection_file(b.only) for b in back.values() if b.only is not None}
        if undecided is not None:
            keep.add(self.update_file(undecided))
        for pattern in ("update-*", ".update*.part", "dropped-*", ".dropped-*.part"):
            for path in self.folder.glob(pattern):
                if path not in keep:
                    path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [p for p in self.folder.glob("trainer-*.safetensors") if p.stem.split("-")[1].isdigit()]

    def drop_rest(self) -> None:
        """Remove tensors that are not those of the saved state, of this process or one that was killed.

        Also whole ones: on a full disk they would take the room of the next. The folder is one trainer's own.
        """
        try:
            sheet = self._read(SHEET, _Sheet)
            whole = [path for path in self._files() if sheet is None or path.name != sheet.file]
        except SavedStateError:
            whole = []  # which ones are needed cannot be told
        for path in (*self.folder.glob(".trainer*.part"), *whole):
            with contextlib.suppress(OSError):
                path.unlink()

    def _sheet(self, state: Saved, file: str, digest: Digest) -> _Sheet:
        return _Sheet(**self._fields(state), optimiser_steps=state.optimiser_steps, file=file, digest=digest)

    def _fields(self, known: Known) -> dict[str, Any]:
        claims, a = known.claims, known.claims.announced
        return {
            "run": self.run,
            "peer": self.peer,
            "layout": self.layout.digest,
            "record": known.record,
            "round": known.round,
            "counter": claims.counter,
            "claimed_from": claims.claimed_from,
            "steps": claims.steps,
            "announced": a and _Update(**asdict(a)),
            "restored": [_Restored(blob=b, factor=f.factor, only=f.only) for b, f in known.restored.items()],
        }

    def _tensors(self, sheet: _Sheet) -> dict[str, Tensor]:
        path = self.folder / sheet.file
        try:
            if _file_digest(path) != sheet.digest:
                raise SavedStateError(f"{path} is damaged: its bytes are not those that were saved")
            return load_file(path)
        except (OSError, SafetensorError) as e:
            raise SavedStateError(f"{path} cannot be read: {e}") from None

    def _state(self, sheet: _Sheet, tensors: dict[str, Tensor]) -> Saved:
        shapes = {t.name: t.shape for t in self.layout.tensors}
        groups: dict[str, dict[str, Tensor]] = {g: {} for g in (FEEDBACK, PROGRESS, *MOMENTS)}
        for key, tensor in tensors.items():
            group, _, name = key.partition("/")
            fits = group in groups and shapes.get(name) == tuple(tensor.shape) and tensor.dtype == torch.float32
            if not fits or not bool(tensor.isfinite().all()):
                raise SavedStateError(
                    f"{self.folder / sheet.file} holds {key[:80]}, which does not fit or is not finite"
                )
            groups[group][name] = tensor
        if any(groups[g].keys() != shapes.keys() for g in (FEEDBACK, PROGRESS)):
            raise SavedStateError(f"{self.folder / sheet.file} does not hold the whole model")
        return Saved(
            **vars(_known(sheet)),
            optimiser_steps=sheet.optimiser_steps,
            feedback=groups[FEEDBACK],
            progress=groups[PROGRESS],
            moments={f"{m}/{n}": t for m in MOMENTS for n, t in groups[m].items()},
            file=self.folder / sheet.file,
        )


def _announced(u: _Update | None) -> Announced | None:
    return u and Announced(u.parent, u.blob, u.size, u.first, u.end, u.steps, u.loss)


def _known(sheet: _Known) -> Known:
    claims = Claims(sheet.counter, sheet.claimed_from, sheet.steps, _announced(sheet.announced))
    return Known(sheet.record, sheet.round, claims, {r.blob: Back(r.factor, r.only) for r in sheet.restored})


def _file_digest(path: Path) -> Digest:
    """The blob digest of a file's bytes, read piece by piece."""
    with open(path, "rb") as file:
        return tree_hash([leaf_hash(piece) for piece in iter(lambda: file.read(CHUNK), b"")])
