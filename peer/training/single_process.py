"""The training of a peer with one process: model, inner optimizer, outer state, and the files of both."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from peer.channel import Memory
from peer.durable import write_durably
from peer.errors import TrainingError
from peer.training.device import device_name
from peer.training.frozen_base import check_base, read_base
from peer.training.inner_optimizer import InnerOptimizer
from peer.training.layers import USUAL, LayerOptions, Report
from peer.training.memory import memory_of
from peer.training.offload import Offload, home_of
from peer.training.outer_state import OuterState
from peer.training.saved_state import SavedState
from peer.training.state_writer import StateWriter
from protocol.adapter import build_run_model
from protocol.codec import make_codec
from protocol.ids import Digest
from protocol.model import parameters_of
from protocol.spec import RunSpec
from protocol.state import checkpoint_chunks, state_digest, state_layout, tensors_in

CLOSE_SECONDS = 5.0
"""Maximum time that a process which ends because of an error waits for its disk."""


class SingleProcessBackend(StateWriter):
    """One process that holds everything.

    `inner` makes optimizer steps on the model's parameters. `outer` turns their progress into updates, and accepted
    updates into the next base. The thread that trains calls the methods. The request handler calls `outer` and
    `store_state` only.
    """

    is_distributed = False
    """True for several ranks, which do one thing at a time."""

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        yield_hook: Callable[[], None],
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
        background_hook: Callable[[], None] = lambda: None,
        *,
        base: Path | None = None,
        exact: bool = False,
        eight_bit: bool = False,
        offload: Offload | None = None,
    ):
        """Build the model. `yield_hook`, `layers`, `report`: as in `InnerOptimizer`.

        `background_hook`: called often by the thread that writes a state. `base`: the file of the frozen base, which is
        zeros without one. `exact`: the model also runs in fp32. `eight_bit`: as in `InnerOptimizer`. `offload`: of what
        is used once a round; None: memory comes before the device. Raises CairnError, and OSError for the base.
        """
        self.device = device
        model = build_run_model(spec.model, device=device, exact=exact)
        if base is not None and spec.model.adapter is not None:
            check_base(spec.model.adapter, base)
            read_base(model, spec.model.adapter, base)
        self.inner = InnerOptimizer(
            spec.inner, model, device, yield_hook, layers, report,
            conversations=spec.data.conversations, eight_bit=eight_bit,
        )  # fmt: skip
        codec = make_codec(spec.codec, spec.model.layout)
        self._state_layout = state_layout(spec.model.layout, spec.outer)
        offload = offload or Offload(device, home_of(device.type, spec) == "memory")
        self.outer = OuterState(
            parameters_of(model), codec, spec.codec.beta, spec.outer, offload, replayable=spec.audit.replayable
        )
        super().__init__(spec.model.layout, self.inner, self.outer, background_hook)

    @property
    def device_name(self) -> str:
        """The devices in words, for people."""
        return device_name(self.device)

    @property
    def devices(self) -> list[str]:
        """The name of each device that shares the work."""
        return [device_name(self.device)]

    def memory(self) -> Memory | None:
        """Return the memory in use on the device; of several ranks, on the one that uses most. None if not known."""
        return memory_of(self.device)

    def load_state(self, checkpoint: Path) -> None:
        """Read the base from a checkpoint whose digest was checked; `outer.rebase` is then due.

        Raises MalformedError or OSError. The old base is released first: there may be no memory for both.
        """
        self.outer.drop_base()
        with open(checkpoint, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            # One by one: the machine may not have the memory for all of them.
            with closing(tensors_in(self._state_layout, data)) as state:
                self.outer.base = {name: self.outer.offload.place(tensor) for name, tensor in state}

    def store_state(self, threads: int, checkpoint: Path | None) -> Digest:
        """Return the base's digest, computed by `threads` CPU threads. Write its checkpoint where a path is given.

        Raises TrainingError without a base, and OSError.
        """
        base = self.outer.base
        if base is None:
            raise TrainingError("no state is held")
        digest = state_digest(self._state_layout, base, threads)
        if checkpoint is not None:
            write_durably(checkpoint, checkpoint_chunks(self._state_layout, base))
        return digest

    def resume(self, saved: SavedState, *, everything: bool) -> None:
        """Restore the optimizers' moments; `everything`: feedback and progress, too, before the first `rebase`.

        In a replayable run: the parameters, on the base that was loaded.
        """
        self.inner.set_moments(saved.optimizer_steps, saved.moments)
        if everything and self.outer.replayable:
            self.outer.resume_position(saved.position)
        elif everything:
            self.outer.resume(saved.feedback, saved.progress)

    def begin_again(self, blob: bytes | None) -> None:
        """Continue, without moments, from the base less our update's values, or from the base itself.

        In a replayable run, between two steps. Raises CodecError.
        """
        self.outer.begin_again(blob)
        self.inner.reset_moments()

    def close(self, *, in_order: bool = False) -> None:
        """End the writing of a state, and all other ranks. `in_order`: nothing has failed, so there is time."""
        self.cancel_write(None if in_order else CLOSE_SECONDS)
