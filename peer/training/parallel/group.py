"""Communication between the ranks of a peer: process groups, errors that all ranks agree on, and bytes for rank 0.

Only tensors travel; nothing is pickled. An error's text travels as bytes of one size.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from peer.errors import SavedStateError, TrainingError
from peer.training.parallel.parallel_dims import ParallelDims
from protocol.errors import CairnError, CodecError, MalformedError

SECONDS = 120.0
"""Deadline of a collective: a rank that does not take part for this time hangs, and ends with the others."""

MEETING_SECONDS = 240.0
"""Deadline for all ranks to meet: each has imported torch by then, from a disk that is cold or on cores that are busy.

START_SECONDS of peer/node/trainer_supervisor.py has room for it after rank 0's own imports, so that the error says what
was waited for.
"""

IDLE = timedelta(days=365)
"""The deadline for rank 0's next command: while there is nothing to train on, there is none."""

ERROR_BYTES = 1024
ERRORS: tuple[type[Exception], ...] = (CodecError, MalformedError, SavedStateError, TrainingError, OSError)


class SoleRank:
    """The one process of a peer that has no others: what it does, all ranks have done."""

    rank = 0
    world = 1

    def together(self) -> AbstractContextManager[None]:
        """Run a block in which each rank works by itself; raise on all ranks what fails on one."""
        return nullcontext()

    def gather(self, mine: bytes | bytearray, sizes: Sequence[int]) -> list[bytes] | None:
        """Return each rank's bytes, on rank 0. All ranks know the `sizes`."""
        return [bytes(mine)]


class RankGroup(SoleRank):
    """All ranks of a peer, on one machine. All of them make it at once."""

    def __init__(self, dims: ParallelDims, rank: int, seconds: float = SECONDS):
        """Make the process groups; the default group exists already. Collective."""
        self.dims = dims
        self.rank = rank
        self.world = dims.world
        at = dims.coordinates(rank)
        self.stage = at["pp"]
        # "pp" is the outermost axis: a stage's ranks are consecutive.
        each = self.world // dims.pp
        self.ranks = [list(range(s * each, (s + 1) * each)) for s in range(dims.pp)]
        groups: list[Any] = [dist.new_group(ranks) if dims.pp > 1 else dist.group.WORLD for ranks in self.ranks]
        self.of_stage = groups[self.stage]
        self.agreed: Exception | None = None
        """The last error that was raised on all ranks: after it they continue together."""
        self.commands: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds) if rank == 0 else IDLE)

    @classmethod
    def join(
        cls, dims: ParallelDims, rank: int, meet: Path, device: torch.device, seconds: float = SECONDS,
        ended: Callable[[], str] = str,
    ) -> RankGroup:  # fmt: skip
        """Meet the other ranks at a file that nobody has used. Raises TrainingError when not all of them come.

        `ended` returns why waiting is pointless, or an empty text. Ranks listen on loopback. By default gloo would use
        the address of the host's name, which may be a public one.
        """
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            store, *_ = next(rendezvous(f"file://{meet}", rank, dims.world))
            _wait_for_all(store, dims.world, rank, ended)
            store.set_timeout(timedelta(seconds=seconds))
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=dims.world, timeout=timedelta(seconds=seconds)
            )
            return cls(dims, rank, seconds)
        except RuntimeError as e:
            raise TrainingError(
                f"the {dims.world} ranks of --parallel {dims} did not all meet, for which they have "
                f"{MEETING_SECONDS:.0f} s ({' '.join(str(e).split())[:200]}): look above for what one of them printed"
            ) from None

    @contextmanager
    def together(self) -> Iterator[None]:
        failed: Exception | None = None
        try:
            yield
        except (CairnError, OSError) as e:
            failed = e
        self._agree(failed)

    def _agree(self, failed: Exception | None) -> None:
        mine = bytearray(ERROR_BYTES)
        if failed is not None:
            kind = next((i for i, k in enumerate(ERRORS) if isinstance(failed, k)), ERRORS.index(TrainingError))
            text = str(failed).encode()[: ERROR_BYTES - 1]
            mine[: 1 + len(text)] = bytes([1 + kind]) + text
        every = torch.empty((self.world, ERROR_BYTES), dtype=torch.uint8)
        dist.all_gather(list(every.unbind()), torch.frombuffer(mine, dtype=torch.uint8))
        for row in every:
            if row[0]:
                text = bytes(row[1:].tolist()).rstrip(b"\0").decode(errors="replace")
                self.agreed = ERRORS[int(row[0]) - 1](text)
                raise self.agreed

    def gather(self, mine: bytes | bytearray, sizes: Sequence[int]) -> list[bytes] | None:
        buffer = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if mine:
            buffer[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        if self.rank != 0:
            dist.gather(buffer, None, dst=0)
            return None
        every = [torch.empty_like(buffer) for _ in sizes]
        dist.gather(buffer, every, dst=0)
        return [bytes(t[:n].numpy().data) for t, n in zip(every, sizes, strict=True)]

    # -- commands ----------------------------------------------------------------------------------------------

    def send_command(self, name: str, arguments: Sequence[object]) -> None:
        """Send the next command to the other ranks, with numbers, text, paths and bytes, also in lists. On rank 0."""
        raw: list[bytes] = []

        def outside(value: object) -> dict[str, object]:
            if isinstance(value, Path):
                return {"path": str(value)}
            if not isinstance(value, bytes | bytearray | memoryview):
                raise TypeError(f"a command has no {type(value).__name__}")
            raw.append(bytes(value))
            return {"bytes": len(value)}

        prefix = json.dumps([name, *arguments], default=outside).encode()
        sizes = torch.tensor([len(prefix), sum(map(len, raw))], dtype=torch.int64)
        dist.broadcast(sizes, 0, group=self.commands)
        payload = torch.frombuffer(bytearray().join([prefix, *raw]), dtype=torch.uint8)
        dist.broadcast(payload, 0, group=self.commands)

    def receive_command(self) -> tuple[str, list[Any]]:
        """Return the next command's name and arguments. On the other ranks. Raises TrainingError if rank 0 is gone."""
        try:
            sizes = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(sizes, 0, group=self.commands)
            payload = torch.empty(int(sizes.sum()), dtype=torch.uint8)
            dist.broadcast(payload, 0, group=self.commands)
        except RuntimeError as e:
            raise TrainingError(f"rank 0 is gone: {' '.join(str(e).split())[:200]}") from None
        data, at = payload.numpy().data, int(sizes[0])

        def inside(found: dict[str, Any]) -> Path | memoryview:
            nonlocal at
            if "path" in found:
                return Path(found["path"])
            at += found["bytes"]
            return data[at - found["bytes"] : at]

        name, *arguments = json.loads(bytes(data[: int(sizes[0])]), object_hook=inside)
        return name, arguments

    def share(self, tensor: Tensor, owner: int) -> None:
        """Copy a contiguous tensor of one rank of this rank's stage to all of them."""
        dist.broadcast(tensor, owner, group=self.of_stage)

    def leave(self) -> None:
        """End the group, when all ranks leave in order."""
        dist.all_reduce(torch.zeros(1))  # nobody leaves while another still communicates
        dist.destroy_process_group()


def _wait_for_all(store: Any, world: int, rank: int, ended: Callable[[], str]) -> None:
    """Wait until all ranks have written to the store.

    torch's own wait would take the deadline of a collective, which is too short for imports. Raises TrainingError when
    a rank has ended, and RuntimeError after MEETING_SECONDS.
    """
    store.set(f"rank {rank}", "here")
    deadline = time.monotonic() + MEETING_SECONDS
    while True:
        try:
            store.wait([f"rank {r}" for r in range(world)], timedelta(seconds=1))
            return
        except RuntimeError:
            if why := ended():
                raise TrainingError(why) from None
            if time.monotonic() > deadline:
                raise
