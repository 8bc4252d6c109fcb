"""The messages between node and trainer, and the one line that each becomes.

A line is the message's name, a space, its fields as JSON, a newline. Parsing is strict (pydantic): unknown messages,
unknown, missing or mistyped fields, and numbers that are not finite are errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from peer.errors import ChannelError
from protocol.errors import MalformedError
from protocol.ids import MAX_COUNT, Digest, PeerKey

SAVE_SECONDS = 4.0
"""What a trainer has to answer `Stop` before it is killed."""

MAX_LINE = 64 * 1024 * 1024
"""Bytes of the longest line: a `Load` that replays 1,000 rounds of 256 updates with paths of 200 bytes."""

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _digest(value: object) -> Digest:
    return value if isinstance(value, Digest) else Digest.parse(_text(value))


def _peer_key(value: object) -> PeerKey:
    return value if isinstance(value, PeerKey) else PeerKey.parse(_text(value))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("want text")
    return value


def _hex(value: bytes) -> str:
    return value.hex()


DigestField = Annotated[Digest, PlainValidator(_digest), PlainSerializer(_hex, return_type=str)]
PeerKeyField = Annotated[PeerKey, PlainValidator(_peer_key), PlainSerializer(_hex, return_type=str)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Field(max_length=64 * 1024)]
Share = Annotated[float, Field(ge=0, le=1)]
Choice = Literal["auto", "on", "off"]


class _Message:
    """What makes a frozen dataclass a message: pydantic checks it as strictly as it can."""

    __pydantic_config__ = _STRICT


# -- parts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpdateFile(_Message):
    """One accepted update: its author, the windows it covers, the file of its blob (which the node has checked)."""

    author: PeerKeyField
    windows: Count
    blob: Path


@dataclass(frozen=True, slots=True)
class RoundUpdates(_Message):
    """What one record accepts. `round` is the record's own number; `record` its digest.

    Of a round that was reduced: `parts` are the files of the reduced parts, all and in order (which the node has
    checked), and `updates` has this peer's own update alone, when it is among the accepted.
    """

    round: Count
    record: DigestField
    updates: tuple[UpdateFile, ...]
    parts: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class TimeShares(_Message):
    """Where the last minute of the thread that trains went: shares that add up to 1 (see `peer.training.spent`)."""

    training: Share
    data: Share
    compressing: Share
    applying: Share
    saving: Share
    waiting: Share


@dataclass(frozen=True, slots=True)
class Memory(_Message):
    """Bytes of a device's memory: those that are used, and all."""

    used: Count
    whole: Count


# -- node to trainer -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start(_Message):
    """The first message. Answered by Ready or Failed("start").

    `spec_path`: a file with the spec's canonical bytes. `store`: the folder of the peer's blobs. `identity_key`: this
    peer's public key (data assignment, and which updates are its own). `state_folder`: the trainer's own, for its
    saved state. `shards`: training shards by digest (hex), each a local file, or "" when it is to be read from the
    spec's addresses. `parallel`: how the work lies over many devices, "auto" or as `Degrees.parse` reads it.
    `recompute`: activations are computed again in the backward pass; "auto": when they do not fit into memory.
    `compile`: the layers are compiled; "auto": on a GPU. `overlap`: training goes on while an update is undecided.
    """

    spec_path: Path
    store: Path
    identity_key: PeerKeyField
    state_folder: Path
    device: str = "auto"
    threads: Annotated[int, Field(ge=1, le=4096)] = 1
    shards: Annotated[dict[str, str], Field(max_length=65_536)] = Field(default_factory=dict)  # type: ignore[assignment]
    parallel: Annotated[str, Field(max_length=200)] = "auto"
    recompute: Choice = "auto"
    compile: Choice = "auto"
    overlap: bool = True


@dataclass(frozen=True, slots=True)
class Load(_Message):
    """Leave what is held, take the state in `checkpoint` and apply `replay` in order (a machine's Resync).

    `record`: the record that the checkpoint is the state after (the genesis digest for state[0]); `round`: the number
    of the round that starts from it; `base_state`: its state digest, which the file must have. `restore`: blobs of own
    updates that no longer count: they go back into the error feedback. `next_window`, `accepted_windows`: after the
    replay, the end of the own windows that the chain has accepted, and the windows it has accepted of all.
    `write_checkpoint`: where to write the state that results. `withdraw`: blobs of own updates that were put back once,
    and that the checkpoint holds after all. `reduced`: of the records that the checkpoint is after, in order, those
    that reduced and accepted an own update of `withdraw`, and the last that accepted one, if it reduced: what was
    dropped of these goes back into the error feedback, when it has not yet. Answered by Applied or Failed("load").
    """

    checkpoint: Path
    base_state: DigestField
    record: DigestField
    round: Count
    replay: tuple[RoundUpdates, ...]
    restore: tuple[Path, ...]
    next_window: Count
    accepted_windows: Count
    write_checkpoint: Path | None = None
    withdraw: tuple[Path, ...] = ()
    reduced: tuple[RoundUpdates, ...] = ()


@dataclass(frozen=True, slots=True)
class MakeUpdate(_Message):
    """Compress what was learnt into `out`; a step under way is left to the next. Answered by UpdateMade, NothingDone or
    Failed."""

    round: Count
    parent: DigestField
    out: Path


@dataclass(frozen=True, slots=True)
class Apply(_Message):
    """Apply the one record after the state that is held. Answered by Applied or Failed("apply").

    `missed`: blobs of own updates that this decided round leaves out. `mine_accepted`: an own update is among the
    accepted. `next_window`, `accepted_windows`, `write_checkpoint`: as in Load, after this record.
    """

    update: RoundUpdates
    missed: tuple[Path, ...]
    mine_accepted: bool
    next_window: Count
    accepted_windows: Count
    write_checkpoint: Path | None = None


@dataclass(frozen=True, slots=True)
class Orders(_Message):
    """What the run's owner has changed: train nothing while `rests`; the most windows that an update may claim; the
    swarm's tokens of a round. Holds until the next one; not answered."""

    rests: bool
    max_update_windows: Count
    target_tokens: Count


@dataclass(frozen=True, slots=True)
class Save(_Message):
    """Write the trainer's own state now. Answered by Saved or Failed("save")."""


@dataclass(frozen=True, slots=True)
class Stop(_Message):
    """Save, answer Stopped, exit."""


# -- trainer to node -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready(_Message):
    """The model is built. `device` is worded for people; `update_size` is the size of every update's blob."""

    device: Text
    parameters: Count
    threads: Count
    update_size: Count


@dataclass(frozen=True, slots=True)
class Progress(_Message):
    """How training goes. `windows`: done, and covered by no update yet. `loss`: of late steps, 0 before the first.

    `waiting`: the trainer trained as much as one update may claim (or has no data), and waits. `mfu`: model FLOPs as a
    share of what the device can do at most, None when that is not known. `memory`: of many ranks, what the one that
    uses most uses. `trained`: windows that this process made steps on, each time that it did; `next_window`: the one to
    train next, as they are counted for ever.
    """

    windows: Count
    loss: float
    tokens_per_second: float
    inner_steps: Count
    learning_rate: float
    waiting: bool
    mfu: Share | None = None
    memory: Memory | None = None
    spent: TimeShares | None = None
    trained: Count = 0
    next_window: Count = 0


@dataclass(frozen=True, slots=True)
class UpdateMade(_Message):
    """The update after `parent`, written to `blob_path`, with what its header says of it."""

    parent: DigestField
    blob_path: Path
    size: Count
    digest: DigestField
    first_window: Count
    end_window: Count
    inner_steps: Count
    loss: float


@dataclass(frozen=True, slots=True)
class NothingDone(_Message):
    """No window was trained that the chain has not accepted: there is nothing to announce."""

    parent: DigestField


@dataclass(frozen=True, slots=True)
class Applied(_Message):
    """The state after `record` is held; `state_digest` names it. `checkpoint_path`: where it was written, if asked."""

    record: DigestField
    state_digest: DigestField
    seconds: float
    checkpoint_path: Path | None


@dataclass(frozen=True, slots=True)
class Saved(_Message):
    """The trainer's own state is on disk."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stopped(_Message):
    """The last message before the trainer exits. `saved`: nothing that was learnt is lost."""

    saved: bool


@dataclass(frozen=True, slots=True)
class Note(_Message):
    """Something that a person should hear; training goes on."""

    level: Literal["info", "warning", "error"]
    kind: Text
    text: Text


@dataclass(frozen=True, slots=True)
class Failed(_Message):
    """What was asked for (start, load, update, apply, save) or training itself (train) failed, and what to do.

    `fatal`: the trainer exits after this. After a failed load or apply that is not fatal it needs a Load.
    """

    what: Literal["start", "load", "update", "apply", "save", "train", "channel"]
    reason: Text
    fatal: bool


ToTrainer = Start | Load | MakeUpdate | Apply | Orders | Save | Stop
FromTrainer = Ready | Progress | UpdateMade | NothingDone | Applied | Saved | Stopped | Note | Failed

_KINDS = (Start, Load, MakeUpdate, Apply, Orders, Save, Stop) + (
    Ready, Progress, UpdateMade, NothingDone, Applied, Saved, Stopped, Note, Failed,
)  # fmt: skip
_ADAPTERS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in _KINDS}


def to_line(message: ToTrainer | FromTrainer) -> bytes:
    """The message as one line. Raises ChannelError when it is longer than MAX_LINE."""
    name = type(message).__name__
    try:
        fields = _ADAPTERS[name].dump_json(message)
    except PydanticSerializationError as e:
        raise ChannelError(f"a {name} message that cannot be written as JSON: {e}") from None
    line = b"%s %s\n" % (name.encode(), fields)
    if len(line) > MAX_LINE:
        raise ChannelError(f"a {name} message of {len(line)} bytes: at most {MAX_LINE} fit the channel")
    return line


def from_line(line: bytes) -> ToTrainer | FromTrainer:
    """The message in a line. Raises ChannelError, with the fields that are wrong."""
    name, _, fields = line.partition(b" ")
    adapter = _ADAPTERS.get(name.decode("ascii", "replace"))
    if adapter is None:
        raise ChannelError(f"not a message of the trainer's channel: {line[:60]!r}")
    try:
        return adapter.validate_json(fields)
    except (ValidationError, MalformedError) as e:
        problems = (
            "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in e.errors()[:5])
            if isinstance(e, ValidationError)
            else str(e)
        )
        raise ChannelError(f"a {name.decode()} message that does not parse: {problems}") from None
