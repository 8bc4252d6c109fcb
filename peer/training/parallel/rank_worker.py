"""The work of each rank at rank 0's command: its shard of the model, of the step, and of the state between peers.

The commands are few and fixed: a number, and bytes whose form the command defines. Rank 0 executes its commands, too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peer.training.inner_optimizer import StepResult
from peer.training.layers import USUAL, LayerOptions, Report
from peer.training.parallel.group import RankGroup
from peer.training.parallel.model import build_rank_model, make_mesh
from peer.training.parallel.outer_state import ShardedOuterState
from peer.training.parallel.rank_checkpoint import RankCheckpoint
from peer.training.parallel.rank_optimizer import RankOptimizer
from protocol.codec import make_codec
from protocol.ids import Digest, PeerKey
from protocol.outer import Contribution
from protocol.spec import RunSpec


class Command(IntEnum):
    """The next thing that all ranks do. In brackets: the payload."""

    STOP = 0
    BEGIN = 1
    """A step [batch and tokens of a window, int64; then the tokens, int32]."""
    PIECE = 2
    """Forward and backward of one piece [its number, int64]."""
    END = 3
    OPTIMIZER_STEP = 4
    DROP = 5
    RATE = 6
    """[the learning rate's factor, fp64]."""
    ANNOUNCE = 7
    ADVANCE = 8
    """[for each update: author, windows as int64, blob]."""
    LOAD = 9
    """[a checkpoint's path]."""
    REBASE = 10
    ADD_BACK = 11
    """[as of `encode_masked_update`]."""
    SUBTRACT = 12
    """[decay since it was added, fp64; as of `encode_masked_update`]."""
    STORE = 13
    """[the checkpoint's path; empty: compute the digest only]."""
    SAVE = 14
    """[path]: write the saved state at once; all wait for the disk."""
    RESUME = 15
    """[JSON: path, steps, everything]."""
    COPY = 16
    """Copy the tensors that are to be saved."""
    WRITE = 17
    """[path]: write the copy, beside the commands that follow."""
    WRITTEN = 18
    """Wait until all have written it."""
    CANCEL_WRITE = 19
    ADVANCE_REDUCED = 20
    """[JSON: the paths of the reduced shards]."""


STEPPING = frozenset({Command.PIECE, Command.END})
"""Commands whose memory grows with the windows in a pass."""

OUT_OF_MEMORY = 3
"""Exit code of a rank that ran out of memory in one of those."""

CommandResult = int | StepResult | bytes | Digest | None


class RankWorker:
    """One rank. All ranks call `do` with the same commands, in the same order."""

    def __init__(
        self,
        spec: RunSpec,
        group: RankGroup,
        device: torch.device,
        piece: int | None = None,
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
        background_hook: Callable[[], None] = lambda: None,
    ):
        """Build this rank's shard. `piece`: maximum number of windows in a pass.

        `background_hook` is called often by the thread that writes a saved state.
        """
        self.group = group
        dims = group.dims
        self.built = build_rank_model(spec.model.config, dims, make_mesh(dims, device), device)
        self.codec = make_codec(spec.codec, spec.model.layout)
        self.inner = RankOptimizer(spec.inner, self.built, piece, layers, report)
        depth = int(spec.model.config.get("num_hidden_layers") or 1)
        self.outer = ShardedOuterState(self.built, group, self.codec, spec.codec.beta, spec.outer, depth)
        self.checkpoint = RankCheckpoint(spec, self.built, self.inner, self.outer, group, background_hook)
        self._step: StepResult | None = None

    def do(self, command: Command, payload: bytes = b"") -> CommandResult:  # noqa: C901 (a flat dispatch)
        """Execute a command; collective. Raise what all ranks agree on; any other error ends this rank."""
        match command:
            case Command.BEGIN:
                return self.inner.begin(decode_windows(payload))
            case Command.PIECE:
                return self.inner.piece(struct.unpack("<q", payload)[0])
            case Command.END:
                self._step = self.inner.end()
                return self._step
            case Command.OPTIMIZER_STEP:
                if self._step is not None:
                    self.inner.optimizer_step(self._step)
            case Command.DROP:
                self.inner.drop()
            case Command.RATE:
                self.inner.set_rate(struct.unpack("<d", payload)[0])
            case Command.ANNOUNCE:
                return self.outer.announce()
            case Command.ADVANCE:
                self.outer.advance(decode_contributions(payload, self.codec.size))
            case Command.ADVANCE_REDUCED:
                self.outer.advance_reduced([Path(p) for p in json.loads(payload)])
            case Command.LOAD:
                self.outer.load(Path(payload.decode()))
            case Command.REBASE:
                self.outer.rebase()
            case Command.ADD_BACK:
                self.outer.add_back(*decode_masked_update(payload))
            case Command.SUBTRACT:
                blob, only = decode_masked_update(payload[8:])
                self.outer.subtract(blob, struct.unpack("<d", payload[:8])[0], only)
            case Command.STORE:
                return self.outer.store(Path(payload.decode()) if payload else None)
            case Command.SAVE:
                return self.checkpoint.write_now(Path(payload.decode()))
            case Command.RESUME:
                self.checkpoint.resume(**json.loads(payload))
            case Command.COPY:
                self.checkpoint.copy()
            case Command.WRITE:
                self.checkpoint.start_write(Path(payload.decode()))
            case Command.WRITTEN:
                self.checkpoint.finish_write()
            case Command.CANCEL_WRITE:
                self.checkpoint.writer.cancel()
            case Command.STOP:
                self.checkpoint.writer.cancel()
                self.group.leave()
        return None


def encode_windows(windows: Tensor) -> bytes:
    """Return tokens [batch, window + 1] of any integer type as a payload."""
    return struct.pack("<qq", *windows.shape) + windows.cpu().to(torch.int32).numpy().tobytes()


def decode_windows(payload: bytes) -> Tensor:
    """Return the tokens as int32 [batch, window + 1]."""
    batch, width = struct.unpack("<qq", payload[:16])
    return torch.from_numpy(np.frombuffer(bytearray(payload[16:]), dtype="<i4").reshape(batch, width))


def encode_contributions(contributions: Sequence[Contribution]) -> bytes:
    """Return updates as a payload: all have one size, which the codec knows."""
    return b"".join(bytes(c.author) + struct.pack("<q", c.windows) + bytes(c.blob) for c in contributions)


def decode_contributions(payload: bytes, size: int) -> list[Contribution]:
    """Return the updates, with blobs of `size` bytes."""
    view = memoryview(payload)
    each = 32 + 8 + size
    return [
        Contribution(
            PeerKey(bytes(view[at : at + 32])),
            struct.unpack("<q", view[at + 32 : at + 40])[0],
            view[at + 40 : at + each],
        )
        for at in range(0, len(payload), each)
    ]


def encode_masked_update(blob: bytes, only: bytes | None) -> bytes:
    """Return an own update and the mask of its values that are meant (see `OuterSide.add_back`) as a payload."""
    return struct.pack("<q", -1 if only is None else len(only)) + (only or b"") + blob


def decode_masked_update(payload: bytes) -> tuple[bytes, bytes | None]:
    """Return (blob, mask)."""
    size = struct.unpack("<q", payload[:8])[0]
    return (payload[8:], None) if size < 0 else (payload[8 + size :], payload[8 : 8 + size])
