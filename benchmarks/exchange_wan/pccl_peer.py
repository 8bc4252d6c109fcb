"""One peer of the `pccl` rows: PCCL (Prime Intellect) averages all values, in fp32 or quantised to 8 bits.

    python -m benchmarks.exchange_wan.pccl_peer JOB.json NUMBER

Needs PCCL's Python bindings (`import pccl`): `pip install pypccl` with Python 3.12, or `python/framework` of its
sources, with the `libpccl.so` that its `cmake` builds beside `_loader.py`. Peer 0 also runs the master, on its own
host. All values are one operation. PCCL's pool of connections allows several at a time; in trials that are not recorded
4, 16 and 32 were slower, with 4 peers on two cores.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.exchange_wan.job import Diary, Job
from benchmarks.exchange_wan.setting import Setting
from benchmarks.exchange_wan.values import fill, shares

PORT = 7450
MEETING_SECONDS = 120.0


def main() -> int:
    import pccl  # type: ignore[import-not-found]

    job, number = Job.read(Path(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    diary, n = Diary(job, number), len(job.ips)
    master = pccl.MasterNode(f"0.0.0.0:{PORT}") if number == 0 else None
    if master is not None:
        master.run()
    communicator = pccl.Communicator(f"{job.ips[0]}:{PORT}")
    communicator.connect(n_attempts=60)
    _meet(pccl, communicator, n)
    values = torch.empty(Setting(job.parameters, n).layout.numel)
    found = torch.empty_like(values)
    operation = _operation(pccl, values, found, quantised=job.options["quantised"])
    round_number = 0
    while True:
        fill(values, number, round_number)
        diary.ready(round_number)
        if not diary.wait(round_number):
            return 0
        diary.say("announced", round_number)
        try:
            info = communicator.all_reduce_multiple_with_retry([operation])
        except pccl.PCCLError as e:
            at = time.monotonic()
            held = shares(found, n, round_number)
            diary.say("failed", round_number, ended=at, reason=str(e)[:200], shares=held)
            return 0
        diary.say("done", round_number, shares=None, taking_part=info.local_world_size)
        diary.say("values", round_number, shares=shares(found, n, round_number))
        round_number += 1


def _meet(pccl: Any, communicator: Any, n: int) -> None:
    """Wait until all peers are in. Raises TimeoutError."""
    end = time.monotonic() + MEETING_SECONDS
    while communicator.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < n:
        if time.monotonic() > end:
            raise TimeoutError(f"not all of the {n} peers came within {MEETING_SECONDS:.0f} s")
        if communicator.are_peers_pending():
            # Fails where a peer came or left meanwhile; the next attempt sees that.
            with suppress(pccl.PCCLError):
                communicator.update_topology()
        time.sleep(0.1)


def _operation(pccl: Any, values: torch.Tensor, found: torch.Tensor, *, quantised: bool) -> Any:
    how = pccl.QuantizationOptions(
        pccl.DataType.UINT8 if quantised else pccl.DataType.FLOAT,
        pccl.QuantizationAlgorithm.MIN_MAX if quantised else pccl.QuantizationAlgorithm.NONE,
    )
    operand = pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT)
    mean = pccl.ReduceDescriptor(values.numel(), pccl.ReduceOp.AVG, 0, operand, how)
    return pccl.ReduceOpDescriptor.from_torch(values, found, mean)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
