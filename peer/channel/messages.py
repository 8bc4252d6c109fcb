"""The messages between node and trainer, each encoded as one line of text.

A line is the message's name, a space, its fields as JSON, and a newline. Parsing is strict (pydantic). Unknown
messages, unknown, missing or mistyped fields, and numbers that are not finite are errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from peer.errors import ChannelError
from protocol.errors import MalformedError
from protocol.ids import MAX_COUNT, Digest, PeerKey

SAVE_SECONDS = 4.0
"""Time that a trainer has to answer `Stop` before it is killed."""

MAX_LINE = 64 * 1024 * 1024
"""Maximum bytes of a line: a `Load` that replays 1,000 rounds of 256 updates with paths of 200 bytes."""

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
MomentForm = Literal["fp32", "8bit"]


class _Message:
    """Base class of the messages, which are frozen dataclasses: pydantic checks them as strictly as it can."""

    __pydantic_config__ = _STRICT


# -- fields ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpdateFile(_Message):
    """One accepted update: its author, the number of windows it covers, the file of its blob (checked by the node)."""

    author: PeerKeyField
    windows: Count
    blob: Path


@dataclass(frozen=True, slots=True)
class RoundUpdates(_Message):
    """The updates that one record accepts. `round` is the record's own number; `record` its digest.

    Of a round that was reduced, `parts` are the files of the reduced shards, all and in order (checked by the node).
    `updates` then has only this peer's own update, if it is among the accepted.
    """

    round: Count
    record: DigestField
    updates: Annotated[tuple[UpdateFile, ...], FailFast()]
    parts: Annotated[tuple[Path, ...], FailFast()] = ()


@dataclass(frozen=True, slots=True)
class TimeShares(_Message):
    """The last minute of the thread that trains, as shares that add up to 1 (see `peer.training.time_breakdown`)."""

    training: Share
    data: Share
    compressing: Share
    applying: Share
    saving: Share
    waiting: Share


@dataclass(frozen=True, slots=True)
class Memory(_Message):
    """Bytes of a device's memory: those in use, and all."""

    used: Count
    whole: Count


# -- node to trainer -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start(_Message):
    """The first message. Answered by Ready or Failed("start").

    `spec_path`: a file with the spec's canonical bytes. `identity_key`: this peer's public key, which determines its
    data and its own updates. `state_folder`: the trainer's own, for its saved state. `shards`: training shards by
    digest (hex), each a local file, or "" if it is to be read from the spec's addresses. `parallel`: the layout over
    several devices, "auto" or as `ParallelDims.parse` reads it. `recompute`: activations are computed again in the
    backward pass; "auto": when they do not fit into memory. `compile`: the layers are compiled; "auto": on a GPU.
    `overlap`: training continues while an update is undecided. `private_data`: the spec's addresses may lead to this
    disk, to private networks and, with this user's accounts, into a cloud. `gpu_memory`: the most bytes that tensors
    may take on each GPU; 0: all. `base`: the file of the frozen base model, in a run that trains an adapter.
    `moments`: the form in which the trainer holds the optimizers' moments. `disk`: the most bytes that files in
    `state_folder` may take for the state between rounds.
    """

    spec_path: Path
    identity_key: PeerKeyField
    state_folder: Path
    device: str = "auto"
    threads: Annotated[int, Field(ge=1, le=4096)] = 1
    shards: Annotated[dict[str, str], Field(max_length=65_536)] = Field(default_factory=dict)  # type: ignore[assignment]
    parallel: Annotated[str, Field(max_length=200)] = "auto"
    recompute: Choice = "auto"
    compile: Choice = "auto"
    overlap: bool = True
    private_data: bool = False
    gpu_memory: Count = 0
    base: Path | None = None
    moments: MomentForm = "fp32"
    disk: Count = 0


@dataclass(frozen=True, slots=True)
class Load(_Message):
    """Replace the held state by the one in `checkpoint`, and apply `replay` in order.

    `record`: the record whose state the checkpoint is (the genesis digest for state[0]); `round`: the number of the
    round that starts from it; `base_state`: its state digest, which is checked. `restore`: blobs of own updates that no
    longer count, which are added to the error feedback. `next_window`, `accepted_windows`: after the replay, the end of
    the own windows that the chain has accepted, and the number of windows that it has accepted of all peers.
    `write_checkpoint`: the path for the resulting state. `withdraw`: blobs of own updates that were added to the
    feedback once, and that the checkpoint holds after all.

    `reduced`: reduced records up to the checkpoint, in order. They are those that accepted our updates of `withdraw`,
    and the last record that accepted one of our updates. Their untransmitted values are added to the error feedback,
    unless they are in it already. Answered by Applied or Failed("load").
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
    """Compress all progress that was not sent yet into the file `out`.

    A step that is under way is left to the next update. Answered by UpdateMade, NothingDone or Failed("update").
    """

    round: Count
    parent: DigestField
    out: Path


@dataclass(frozen=True, slots=True)
class Apply(_Message):
    """Apply the one record after the held state. Answered by Applied or Failed("apply").

    `missed`: blobs of own updates that this decided round leaves out. `next_window`, `accepted_windows`,
    `write_checkpoint`: as in Load, after this record.
    """

    update: RoundUpdates
    missed: tuple[Path, ...]
    next_window: Count
    accepted_windows: Count
    write_checkpoint: Path | None = None


@dataclass(frozen=True, slots=True)
class WriteCheckpoint(_Message):
    """Write the checkpoint of the held state to `out`. Answered by Applied or Failed("write")."""

    out: Path


@dataclass(frozen=True, slots=True)
class Orders(_Message):
    """The trainer's orders, by the owner's directives and the user's wish, until the next message. Not answered.

    `is_idle`: train nothing. `max_update_windows`: maximum number of windows that an update may claim. `target_tokens`:
    the swarm's tokens of a round.
    """

    is_idle: bool
    max_update_windows: Count
    target_tokens: Count


@dataclass(frozen=True, slots=True)
class Stop(_Message):
    """Save, answer Stopped, exit."""


# -- trainer to node -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready(_Message):
    """The model is built. `device`: a text for people; `update_size`: bytes of every update's blob.

    `disk`: bytes of its files for the state between rounds, which have no names. `on_gpu`: it trains on CUDA devices.
    """

    device: Text
    parameters: Count
    update_size: Count
    disk: Count = 0
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Progress(_Message):
    """The progress of training. `windows`: trained, and covered by no update yet.

    `loss`: of recent steps, 0 before the first. `waiting`: the trainer has trained as much as one update may claim (or
    has no data), and waits. `mfu`: model FLOPs as a share of the device's peak, None when that is unknown. `memory`: of
    the rank that uses most. `trained`: windows of all steps of this process, counted at each step. `next_window`: the
    number of the window to train next, in a count that never restarts. `data_bytes`: training data that this process
    got from addresses.
    """

    windows: Count
    loss: float
    tokens_per_second: float
    waiting: bool
    mfu: Share | None = None
    memory: Memory | None = None
    spent: TimeShares | None = None
    trained: Count = 0
    next_window: Count = 0
    data_bytes: Count = 0


@dataclass(frozen=True, slots=True)
class UpdateMade(_Message):
    """The update after `parent` is written to `blob_path`; the other fields are those of its header."""

    parent: DigestField
    blob_path: Path
    size: Count
    digest: DigestField
    first_window: Count
    rebase_window: Count
    end_window: Count
    inner_steps: Count
    loss: float


@dataclass(frozen=True, slots=True)
class NothingDone(_Message):
    """The chain has accepted all windows that were trained: there is nothing to announce."""

    parent: DigestField


@dataclass(frozen=True, slots=True)
class Applied(_Message):
    """The state after `record` is held, with this digest.

    `checkpoint_path`: its file, if one was requested and could be written.
    """

    record: DigestField
    state_digest: DigestField
    checkpoint_path: Path | None


@dataclass(frozen=True, slots=True)
class Stopped(_Message):
    """The last message before the trainer exits. `saved`: nothing that was learnt is lost."""

    saved: bool


@dataclass(frozen=True, slots=True)
class Note(_Message):
    """A notice for people; training continues."""

    level: Literal["info", "warning", "error"]
    kind: Text
    text: Text


@dataclass(frozen=True, slots=True)
class DataUnavailable(_Message):
    """No source gives the right bytes of a data shard. The trainer tries again from time to time: see its notes."""

    shard: DigestField


@dataclass(frozen=True, slots=True)
class Failed(_Message):
    """A request (start, load, update, apply, write), training (train, memory) or the channel failed: why, what to do.

    `fatal`: the trainer exits after this. After a failed load or apply that is not fatal it needs a Load. "memory": the
    next process tries a micro-batch that needs less.
    """

    what: Literal["start", "load", "update", "apply", "write", "train", "memory", "channel"]
    reason: Text
    fatal: bool


ToTrainer = Start | Load | MakeUpdate | Apply | WriteCheckpoint | Orders | Stop
FromTrainer = Ready | Progress | UpdateMade | NothingDone | Applied | Stopped | Note | DataUnavailable | Failed

_KINDS = (Start, Load, MakeUpdate, Apply, WriteCheckpoint, Orders, Stop) + (
    Ready, Progress, UpdateMade, NothingDone, Applied, Stopped, Note, DataUnavailable, Failed,
)  # fmt: skip
_ADAPTERS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in _KINDS}


def to_line(message: ToTrainer | FromTrainer) -> bytes:
    """Return a message as one line. Raises ChannelError when it is longer than MAX_LINE."""
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
    """Return the message in a line. Raises ChannelError, which names the wrong fields."""
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
