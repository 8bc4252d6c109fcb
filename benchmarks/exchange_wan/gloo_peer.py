"""One peer of the `gloo` row: `torch.distributed.all_reduce` of all values in one tensor.

python -m benchmarks.exchange_wan.gloo_peer JOB.json NUMBER
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.exchange_wan.job import Diary, Job
from benchmarks.exchange_wan.setting import Setting
from benchmarks.exchange_wan.values import fill, shares

PORT = 7430
DEVICE = "wan0"
"""The name of a host's line in the test-bed."""


def main() -> int:
    job, number = Job.read(Path(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    diary, n = Diary(job, number), len(job.ips)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    dist.init_process_group(
        "gloo", init_method=f"tcp://{job.ips[0]}:{PORT}", rank=number, world_size=n, timeout=timedelta(seconds=240)
    )
    values = torch.empty(Setting(job.parameters, n).layout.numel)
    round_number = 0
    while True:
        fill(values, number, round_number)
        diary.ready(round_number)
        if not diary.wait(round_number):
            return 0
        diary.say("announced", round_number)
        try:
            dist.all_reduce(values)
        except RuntimeError as e:
            # Without the others there is no group any more: only a restart of all makes another.
            at = time.monotonic()
            values.div_(n)
            found = shares(values, n, round_number)
            diary.say("failed", round_number, ended=at, reason=str(e)[:200], shares=found)
            return 0
        values.div_(n)
        diary.say("done", round_number, shares=None, taking_part=n)
        diary.say("values", round_number, shares=shares(values, n, round_number))
        round_number += 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
