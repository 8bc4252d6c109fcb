"""The processes that train: one process, or rank 0 of several. Both kinds have the same methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # torch.distributed's parts are imported where several ranks are asked for
    from peer.training.outer_state import OuterState
    from peer.training.parallel.distributed_backend import DistributedBackend, DistributedOuter
    from peer.training.single_process import SingleProcessBackend

TrainingBackend: TypeAlias = "SingleProcessBackend | DistributedBackend"
OuterSide: TypeAlias = "OuterState | DistributedOuter"
