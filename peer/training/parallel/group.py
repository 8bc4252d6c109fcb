"""How ranks speak: the groups that they form, what went wrong on any of them, and bytes for the first.

Only tensors travel; nothing is pickled. What people read (an error's text) travels as bytes of one size.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from peer.errors import SavedStateError, TrainingError
from peer.training.parallel.degrees import Degrees
from protocol.errors import CairnError, CodecError, MalformedError

SECONDS = 120.0
"""A rank that does not take part in what the others do for so long hangs, and ends with them."""

IDLE = timedelta(days=365)
"""The wait for rank 0's next order: while there is nothing to train on, there is none."""

ERROR_BYTES = 1024
KINDS: tuple[type[Exception], ...] = (CodecError, MalformedError, SavedStateError, TrainingError, OSError)


class Group:
    """All ranks of a peer, on one machine. Made by each of them at once."""

    def __init__(self, degrees: Degrees, rank: int, seconds: float = SECONDS):
        self.degrees = degrees
        self.rank = rank
        self.world = degrees.world
        at = degrees.coordinates(rank)
        self.stage = at["pp"]
        # "pp" is the outermost axis: a stage's ranks follow each other.
        each = self.world // degrees.pp
        self.ranks = [list(range(s * each, (s + 1) * each)) for s in range(degrees.pp)]
        groups: list[Any] = [dist.new_group(ranks) if degrees.pp > 1 else dist.group.WORLD for ranks in self.ranks]
        self.of_stage = groups[self.stage]
        self.agreed: Exception | None = None
        """What was raised on all ranks last: after it they go on together."""
        self.orders: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds) if rank == 0 else IDLE)

    @classmethod
    def join(cls, degrees: Degrees, rank: int, meet: Path, device: torch.device, seconds: float = SECONDS) -> Group:
        """Meet the other ranks at a file that nobody has used. Raises TrainingError when not all come.

        They hear each other on loopback: by default gloo takes the host's name's address, which may be the internet's.
        """
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{meet}",
                rank=rank,
                world_size=degrees.world,
                timeout=timedelta(seconds=seconds),
            )
            return cls(degrees, rank, seconds)
        except RuntimeError as e:
            raise TrainingError(
                f"the {degrees.world} ranks of --parallel {degrees} did not all meet within {seconds:.0f} s "
                f"({' '.join(str(e).split())[:200]}): look above for what one of them printed"
            ) from None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within it each rank works by itself, without the others; what fails on one is raised on all."""
        failed: Exception | None = None
        try:
            yield
        except (CairnError, OSError) as e:
            failed = e
        self._agree(failed)

    def _agree(self, failed: Exception | None) -> None:
        mine = bytearray(ERROR_BYTES)
        if failed is not None:
            kind = next((i for i, k in enumerate(KINDS) if isinstance(failed, k)), KINDS.index(TrainingError))
            text = str(failed).encode()[: ERROR_BYTES - 1]
            mine[: 1 + len(text)] = bytes([1 + kind]) + text
        every = torch.empty((self.world, ERROR_BYTES), dtype=torch.uint8)
        dist.all_gather(list(every.unbind()), torch.frombuffer(mine, dtype=torch.uint8))
        for row in every:
            if row[0]:
                text = bytes(row[1:].tolist()).rstrip(b"\0").decode(errors="replace")
                self.agreed = KINDS[int(row[0]) - 1](text)
                raise self.agreed

    def gather(self, mine: bytes | bytearray, sizes: Sequence[int]) -> list[bytes] | None:
        """Each rank's bytes, on rank 0; `sizes` are known to all."""
        buffer = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if mine:
            buffer[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        if self.rank != 0:
            dist.gather(buffer, None, dst=0)
            return None
        every = [torch.empty_like(buffer) for _ in sizes]
        dist.gather(buffer, every, dst=0)
        return [bytes(t[:n].numpy().data) for t, n in zip(every, sizes, strict=True)]

    # -- orders ------------------------------------------------------------------------------------------------

    def give(self, order: int, payload: bytes | bytearray) -> None:
        """Rank 0: tell the others what all do next."""
        dist.broadcast(torch.tensor([order, len(payload)], dtype=torch.int64), 0, group=self.orders)
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0, group=self.orders)

    def take(self) -> tuple[int, bytes]:
        """The others: what it is. Raises TrainingError when rank 0 is gone."""
        try:
            head = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(head, 0, group=self.orders)
            payload = torch.empty(int(head[1]), dtype=torch.uint8)
            if len(payload):
                dist.broadcast(payload, 0, group=self.orders)
        except RuntimeError as e:
            raise TrainingError(f"rank 0 is gone: {' '.join(str(e).split())[:200]}") from None
        return int(head[0]), bytes(payload.numpy().data)

    def share(self, tensor: Tensor, owner: int) -> None:
        """A contiguous tensor of one rank of this rank's stage, on all of them."""
        dist.broadcast(tensor, owner, group=self.of_stage)

    def leave(self) -> None:
        """When all leave in order."""
        dist.all_reduce(torch.zeros(1))  # nobody leaves while another still hears
        dist.destroy_process_group()
