"""The training of a peer with one process: its model, inner loop, outer side, and what of them is written to files.

With many ranks `peer.training.parallel.crew.Crew` stands in its place.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from peer.errors import TrainingError
from peer.training.device import device_name
from peer.training.durable import write_durably
from peer.training.inner import Inner
from peer.training.layers import USUAL, LayerOptions, Report
from peer.training.outer import OuterSide
from peer.training.saved import Saved
from protocol.codec import make_codec
from protocol.ids import Digest
from protocol.layout import Layout
from protocol.model import build_model, parameters_of
from protocol.spec import RunSpec
from protocol.state import checkpoint_chunks, state_digest, state_layout, tensors_from_checkpoint


class Alone:
    """One process that holds everything."""

    many = False

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        aside: Callable[[], None],
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
    ):
        self.device = device
        model = build_model(spec.model.config, device=device)
        self.inner = Inner(spec.inner, model, device, aside, layers, report)
        codec = make_codec(spec.codec, spec.model.layout)
        self.outer = OuterSide(parameters_of(model), codec, spec.codec.beta, spec.outer)
        self._layout: Layout = state_layout(spec.model.layout, spec.outer)

    @property
    def device_name(self) -> str:
        """For people."""
        return device_name(self.device)

    def open(self, checkpoint: Path) -> None:
        """Take the state in a checkpoint whose digest was checked; `outer.rebase` is then due.

        Raises MalformedError, OSError. Lets go of the old state first: there may be no memory for both.
        """
        self.outer.base = None
        with open(checkpoint, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            state = tensors_from_checkpoint(self._layout, data)
        self.outer.base = {name: tensor.to(self.device) for name, tensor in state.items()}

    def store(self, threads: int, checkpoint: Path | None) -> Digest:
        """The state's digest; its checkpoint is written where asked. Raises OSError."""
        base = self.outer.base
        if base is None:
            raise TrainingError("no state is held")
        digest = state_digest(self._layout, base, threads)
        if checkpoint is not None:
            write_durably(checkpoint, checkpoint_chunks(self._layout, base))
        return digest

    def set_moments(self, saved: Saved) -> None:
        self.inner.set_moments(saved.optimiser_steps, saved.moments)

    def resume(self, saved: Saved) -> None:
        """Moments, feedback and progress as they were saved."""
        self.set_moments(saved)
        self.outer.resume(saved.feedback, saved.progress)

    def kept(self) -> tuple[int, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """(optimiser steps, feedback, progress, moments), for a `Saved`. No copies but of the progress."""
        steps, moments = self.inner.moments()
        return steps, self.outer.feedback, self.outer.progress(), moments

    def close(self, *, in_order: bool = False) -> None:
        """Nothing is to be ended."""
