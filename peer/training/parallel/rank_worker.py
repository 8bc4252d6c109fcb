"""The work of each rank at rank 0's command: its shard of the model, of the step, and of the state between peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from peer.training.frozen_base import read_base
from peer.training.inner_optimizer import MOMENTS, StepResult
from peer.training.layers import USUAL, LayerOptions, Report
from peer.training.offload import Offload
from peer.training.parallel.group import RankGroup
from peer.training.parallel.model import build_rank_model, copy_shard, make_mesh
from peer.training.parallel.outer_state import ShardedOuterState
from peer.training.parallel.rank_optimizer import RankOptimizer
from peer.training.saved_state import FEEDBACK, POSITION, PROGRESS
from peer.training.state_writer import StateWriter
from protocol.codec import make_codec
from protocol.ids import PeerKey
from protocol.outer import Contribution
from protocol.spec import RunSpec


class Command(Enum):
    """The next thing that all ranks do: a method of `RankWorker`, with the same arguments on each."""

    STOP = "stop"
    BEGIN = "begin"
    PIECE = "inner.piece"
    END = "end"
    OPTIMIZER_STEP = "optimizer_step"
    DROP = "inner.drop"
    RATE = "inner.set_rate"
    ANNOUNCE = "outer.announce"
    ADVANCE = "advance"
    ADVANCE_REDUCED = "outer.advance_reduced"
    LOAD = "outer.load"
    REBASE = "outer.rebase"
    ADD_BACK = "outer.add_back"
    TAKE_BACK = "outer.take_back"
    SUBTRACT = "outer.subtract"
    STORE = "outer.store"
    RESUME = "resume"
    BEGIN_AGAIN = "begin_again"
    SAVE = "write_now"
    COPY = "copy_state"
    WRITE = "start_write"
    WRITTEN = "finish_write"
    CANCEL_WRITE = "cancel_write"


STEPPING = frozenset({Command.PIECE, Command.END})
"""Commands whose memory grows with the windows in a pass."""

OUT_OF_MEMORY = 3
"""Exit code of a rank that ran out of memory in one of those."""


class RankWorker(StateWriter):
    """One rank. All ranks call `do` with the same commands, in the same order."""

    def __init__(
        self,
        spec: RunSpec,
        group: RankGroup,
        offload: Offload,
        piece: int | None = None,
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
        background_hook: Callable[[], None] = lambda: None,
        *,
        base: Path | None = None,
    ):
        """Build this rank's shard on the device of `offload`. `piece`: maximum number of windows in a pass.

        `background_hook` is called often by the thread that writes a saved state. `base`: the file of the frozen base,
        which was checked. Raises CairnError, and OSError for the base.
        """
        self.group = group
        dims, device, adapter = group.dims, offload.device, spec.model.adapter
        self.built = build_rank_model(spec.model.config, dims, make_mesh(dims, device), device, adapter)
        if base is not None and adapter is not None:
            read_base(self.built.body, adapter, base, copy_shard)
            for name in self.built.parameters:  # trained: the state has them, and is counted from zeros
                self.built.local(name).zero_()
        codec = make_codec(spec.codec, spec.model.layout)
        self.inner = RankOptimizer(spec.inner, self.built, piece, layers, report, conversations=spec.data.conversations)
        depth = int(spec.model.config.get("num_hidden_layers") or 1)
        self.outer = ShardedOuterState(
            self.built, group, codec, spec.codec.beta, spec.outer, depth,
            offload, replayable=spec.audit.replayable,
        )  # fmt: skip
        super().__init__(spec.model.layout, self.inner, self.outer, background_hook)
        self._step: StepResult | None = None

    def do(self, command: Command, *arguments: object) -> Any:
        """Execute a command; collective. Raises what all ranks agree on; any other error ends this rank."""
        return attrgetter(command.value)(self)(*arguments)

    def begin(self, width: int, tokens: bytes) -> int:
        """Begin a step on windows of `width` tokens, int32. Return its number of pieces."""
        windows = np.frombuffer(bytearray(tokens), dtype="<i4").reshape(-1, width)
        return self.inner.begin(torch.from_numpy(windows))

    def end(self) -> StepResult:
        """Return the step's result."""
        self._step = self.inner.end()
        return self._step

    def optimizer_step(self) -> None:
        """Step the optimizer by the gradient of the step that ended."""
        if self._step is not None:
            self.inner.optimizer_step(self._step)

    def advance(self, contributions: Sequence[tuple[bytes, int, bytes]]) -> None:
        """Move the base by updates: author, windows and blob of each."""
        self.outer.advance([Contribution(PeerKey(bytes(author)), n, blob) for author, n, blob in contributions])

    def resume(self, path: Path, steps: int, everything: bool) -> None:
        """Restore a saved state whose digest was checked: as `SingleProcessBackend.resume` does."""
        with self.group.together():
            saved = load_file(path)  # mapped, not read: each rank reads what it needs
        groups: dict[str, dict[str, Tensor]] = {}
        for key, tensor in saved.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
        mine = {
            f"{moment}/{n}": self.built.shard_of(n, tensor)
            for moment in MOMENTS
            for n, tensor in groups.get(moment, {}).items()
            if n in self.built.parameters
        }
        self.inner.set_moments(steps, mine)
        if everything and self.outer.replayable:
            self.outer.resume_position(groups[POSITION])
        elif everything:
            self.outer.resume(groups[FEEDBACK], groups[PROGRESS])

    def begin_again(self, blob: bytes | None) -> None:
        """Continue without moments from the base less our update's values, or from the base itself."""
        self.outer.begin_again(blob)
        self.inner.reset_moments()

    def stop(self) -> None:
        """Leave the group."""
        self.cancel_write()
        self.group.leave()
