"""The interfaces between a peer's training and the processes that do it: one process, or rank 0 of several.

`SingleProcessBackend` and `DistributedBackend` implement `TrainingBackend`, which has two sides. The inner side makes
optimizer steps on the model's parameters. The outer side turns their progress into updates, and accepted updates into
the next base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from peer.channel import Memory
from peer.training.inner_optimizer import StepResult
from peer.training.saved_state import SavedState
from protocol.ids import Digest
from protocol.outer import Contribution


class InnerSide(Protocol):
    """The optimizer's steps. Only the thread that trains calls it."""

    @property
    def learning_rate(self) -> float:
        """The present learning rate of the matrices and embeddings."""
        ...

    def set_rate(self, factor: float) -> None:
        """Set the learning rate from now on to `factor` times the spec's."""
        ...

    def forward_backward(self, windows: Tensor, go_on: Callable[[], bool] = ...) -> StepResult | None:
        """Compute the clipped gradient of a step on tokens [batch, window + 1] (integers).

        `go_on` is called between two pieces. When it returns False, the step is dropped and the result is None. The
        parameters may be moved meanwhile (a rebase): the gradient is then of both places. Raise TrainingError when
        memory does not suffice for a single window.
        """
        ...

    def optimizer_step(self, step: StepResult) -> None:
        """Step the optimizer by the gradient that `forward_backward` left, unless the step is not finite."""
        ...


class OuterSide(Protocol):
    """Base, anchor and error feedback (see `outer_state`)."""

    @property
    def holds_base(self) -> bool:
        """False before the first state, and after a failed `advance`."""
        ...

    def drop_base(self) -> None:
        """Release the base: another one is to be loaded."""
        ...

    def announce(self) -> bytes:
        """Return an update's blob of all progress that was not sent. Raise CodecError when it is not finite."""
        ...

    def advance(self, contributions: Sequence[Contribution]) -> None:
        """Move the base to the next state by a round's accepted updates; `rebase` is then due.

        Raise CodecError, after which there is no base; anchor and feedback are as before.
        """
        ...

    def advance_reduced(self, parts: Sequence[Path]) -> None:
        """Do the same by the files of a round's reduced shards, all and in order. Raise CodecError or OSError."""
        ...

    def rebase(self) -> None:
        """Move the progress since the anchor onto the base."""
        ...

    def add_back(self, blob: bytes, only: bytes | None = None) -> None:
        """Add an own update that was not accepted to the feedback. Raise CodecError.

        `only`: a packed `ResidualMask` of the values that the round which accepted the update did not transmit.
        """
        ...

    def subtract(self, blob: bytes, factor: float, only: bytes | None = None) -> None:
        """Take out of the feedback what `add_back` added, times `factor`, the decay since then. Raise CodecError."""
        ...


class TrainingBackend(Protocol):
    """The processes that train.

    The thread that trains calls it. The request handler calls `outer` and `store_state` only.
    """

    @property
    def is_distributed(self) -> bool:
        """True for several ranks, which do one thing at a time."""
        ...

    @property
    def inner(self) -> InnerSide: ...

    @property
    def outer(self) -> OuterSide: ...

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        ...

    @property
    def device_name(self) -> str:
        """The devices in words, for people."""
        ...

    @property
    def devices(self) -> list[str]:
        """The name of each device that shares the work."""
        ...

    def memory(self) -> Memory | None:
        """Return the memory in use on the device; of several ranks, on the one that uses most. None if not known."""
        ...

    def close(self, *, in_order: bool = False) -> None:
        """End the writing of a state, and all other ranks. `canonical_order`: nothing has failed, so there is time."""
        ...

    # -- states ------------------------------------------------------------------------------------------------

    def load_state(self, checkpoint: Path) -> None:
        """Read the base from a checkpoint whose digest was checked; `outer.rebase` is then due.

        Raise MalformedError or OSError. The old base is released first: there may be no memory for both.
        """
        ...

    def store_state(self, threads: int, checkpoint: Path | None) -> Digest:
        """Return the base's digest, computed by `threads` CPU threads. Write its checkpoint where a path is given.

        Raise TrainingError without a base, and OSError.
        """
        ...

    def set_moments(self, saved: SavedState) -> None:
        """Restore the optimizers' moments."""
        ...

    def resume(self, saved: SavedState) -> None:
        """Restore moments, error feedback and progress; before the first `rebase`."""
        ...

    # -- saving: copied to memory, and written in the background, or at once -----------------------------------

    @property
    def optimizer_steps(self) -> int:
        """Number of steps that the optimizer has made."""
        ...

    @property
    def save_size(self) -> int:
        """Bytes of the file that a save would write now."""
        ...

    @property
    def copy_size(self) -> int:
        """Bytes of memory that a copy for saving needs, beyond those that are reserved for it already."""
        ...

    def copy_state(self) -> None:
        """Copy feedback, progress and moments to memory."""
        ...

    def start_write(self, path: Path) -> None:
        """Write the copy into a file in the background."""
        ...

    @property
    def is_written(self) -> bool:
        """True when `finish_write` will not wait for the disk."""
        ...

    @property
    def written_share(self) -> float:
        """Share of the file that is written: 0 to 1."""
        ...

    def finish_write(self) -> None:
        """Wait until the copy is written: `digest` is then known. Raise OSError."""
        ...

    def digest(self) -> Digest:
        """Return the digest of the file that was written last. Any thread may call it."""
        ...

    def cancel_write(self) -> None:
        """Drop the copy, and end its writing."""
        ...

    def write_now(self, path: Path) -> Digest:
        """Write feedback, progress and moments into a file at once. Return its digest. Raise OSError."""
        ...
