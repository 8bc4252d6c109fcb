"""What each rank does at rank 0's order: its part of the model, of the step, and of the state between peers.

The orders are few and fixed: a number, and bytes whose form the order defines. Rank 0 does what it orders, too.
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

from peer.training.inner import Step
from peer.training.layers import USUAL, LayerOptions, Report
from peer.training.parallel.group import Group
from peer.training.parallel.inner import RankInner
from peer.training.parallel.keeping import Keeping
from peer.training.parallel.model import build_rank_model, make_mesh
from peer.training.parallel.outer import Share
from protocol.codec import make_codec
from protocol.ids import Digest, PeerKey
from protocol.outer import Contribution
from protocol.spec import RunSpec


class Order(IntEnum):
    """What all ranks do next. In brackets: the payload."""

    STOP = 0
    BEGIN = 1
    """A step [batch and tokens of a window, int64; then the tokens, int32]."""
    PIECE = 2
    """[which, int64]"""
    END = 3
    TAKE = 4
    DROP = 5
    RATE = 6
    """[the learning rate's factor, fp64]"""
    ANNOUNCE = 7
    ADVANCE = 8
    """[for each update: author, windows as int64, blob]"""
    LOAD = 9
    """[a checkpoint's path]"""
    REBASE = 10
    RESTORE = 11
    """[as `part_of_update_to`]"""
    WITHDRAW = 12
    """[decay since, fp64; as `part_of_update_to`]"""
    STORE = 13
    """[where to write the checkpoint; nothing: only digest it]"""
    SAVE = 14
    """[where]: at once, all wait for the disk"""
    RESUME = 15
    """[JSON: path, steps, all]"""
    KEEP = 16
    """Copy what is to be saved."""
    WRITE = 17
    """[where]: what was kept, beside the orders that follow"""
    WRITTEN = 18
    """Wait until all have written it."""
    GIVE_UP = 19
    """What was kept, or is being written."""
    ADVANCE_REDUCED = 20
    """[JSON: the reduced parts' paths]"""


STEPPING = frozenset({Order.PIECE, Order.END})
"""Orders whose memory grows with the windows in a pass."""

OUT_OF_MEMORY = 3
"""Exit code of a rank that had none left for one of those."""

Result = int | Step | bytes | Digest | None


class Hands:
    """One rank. `do` is called with the same orders, in the same order, on all."""

    def __init__(
        self,
        spec: RunSpec,
        group: Group,
        device: torch.device,
        piece: int | None = None,
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
        beside: Callable[[], None] = lambda: None,
    ):
        """`piece`: windows in a pass, at most. `beside` is called often by what is done beside the orders."""
        self.group = group
        degrees = group.degrees
        self.built = build_rank_model(spec.model.config, degrees, make_mesh(degrees, device), device)
        self.codec = make_codec(spec.codec, spec.model.layout)
        self.inner = RankInner(spec.inner, self.built, piece, layers, report)
        depth = int(spec.model.config.get("num_hidden_layers") or 1)
        self.share = Share(self.built, group, self.codec, spec.codec.beta, spec.outer, depth)
        self.keeping = Keeping(spec, self.built, self.inner, self.share, group, beside)
        self._step: Step | None = None

    def do(self, order: Order, payload: bytes = b"") -> Result:  # noqa: C901 (a flat dispatch)
        """Collective. Raises what `Group.together` does, on all ranks; what else it raises ends this rank."""
        match order:
            case Order.BEGIN:
                return self.inner.begin(windows_from(payload))
            case Order.PIECE:
                return self.inner.piece(struct.unpack("<q", payload)[0])
            case Order.END:
                self._step = self.inner.end()
                return self._step
            case Order.TAKE:
                if self._step is not None:
                    self.inner.take(self._step)
            case Order.DROP:
                self.inner.drop()
            case Order.RATE:
                self.inner.set_rate(struct.unpack("<d", payload)[0])
            case Order.ANNOUNCE:
                return self.share.announce()
            case Order.ADVANCE:
                self.share.advance(contributions_from(payload, self.codec.size))
            case Order.ADVANCE_REDUCED:
                self.share.advance_reduced([Path(p) for p in json.loads(payload)])
            case Order.LOAD:
                self.share.load(Path(payload.decode()))
            case Order.REBASE:
                self.share.rebase()
            case Order.RESTORE:
                self.share.restore(*part_of_update_from(payload))
            case Order.WITHDRAW:
                blob, only = part_of_update_from(payload[8:])
                self.share.withdraw(blob, struct.unpack("<d", payload[:8])[0], only)
            case Order.STORE:
                return self.share.store(Path(payload.decode()) if payload else None)
            case Order.SAVE:
                return self.keeping.at_once(Path(payload.decode()))
            case Order.RESUME:
                self.keeping.resume(**json.loads(payload))
            case Order.KEEP:
                self.keeping.keep()
            case Order.WRITE:
                self.keeping.begin(Path(payload.decode()))
            case Order.WRITTEN:
                self.keeping.end()
            case Order.GIVE_UP:
                self.keeping.part.give_up()
            case Order.STOP:
                self.keeping.part.give_up()
                self.group.leave()
        return None


def windows_to(windows: Tensor) -> bytes:
    """Tokens [batch, window + 1] of any integer type as a payload."""
    return struct.pack("<qq", *windows.shape) + windows.cpu().to(torch.int32).numpy().tobytes()


def windows_from(payload: bytes) -> Tensor:
    """int32 [batch, window + 1]."""
    batch, width = struct.unpack("<qq", payload[:16])
    return torch.from_numpy(np.frombuffer(bytearray(payload[16:]), dtype="<i4").reshape(batch, width))


def contributions_to(contributions: Sequence[Contribution]) -> bytes:
    """Updates as a payload: they have one size, which the codec knows."""
    return b"".join(bytes(c.author) + struct.pack("<q", c.windows) + bytes(c.blob) for c in contributions)


def contributions_from(payload: bytes, size: int) -> list[Contribution]:
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


def part_of_update_to(blob: bytes, only: bytes | None) -> bytes:
    """An own update as a payload, and what of it is meant (see `OuterSide.restore`)."""
    return struct.pack("<q", -1 if only is None else len(only)) + (only or b"") + blob


def part_of_update_from(payload: bytes) -> tuple[bytes, bytes | None]:
    size = struct.unpack("<q", payload[:8])[0]
    return (payload[8:], None) if size < 0 else (payload[8 + size :], payload[8 : 8 + size])
