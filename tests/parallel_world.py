"""Ranks for tests: processes on the CPU, joined by gloo over a file, that run one function of a test module."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_ranks(world: int, function: str, folder: Path, seconds: float = 120.0) -> None:
    """Run `function` ("module:name", of (rank, world, folder)) on each rank; all must end well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ranks = []
    for rank in range(world):
        command = [sys.executable, "-m", "tests.parallel_world", str(rank), str(world), function, str(folder)]
        log = (folder / f"rank{rank}.log").open("wb")
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        log.close()
    deadline = time.monotonic() + seconds
    try:
        while (codes := [r.poll() for r in ranks]) != [0] * world:
            wrong = [r for r, code in enumerate(codes) if code] or ([0] if time.monotonic() > deadline else [])
            if wrong:
                raise AssertionError(f"rank {wrong[0]}: {(folder / f'rank{wrong[0]}.log').read_text()[-6000:]}")
            time.sleep(0.02)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def join(rank: int, world: int, file: Path) -> None:
    """Become a rank of a group that meets at this file, which nobody has used."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100)  # where it hangs, before it is killed
    import torch

    torch.set_num_threads(1)
    module, _, name = sys.argv[3].partition(":")
    getattr(importlib.import_module(module), name)(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not through torch's exit handlers: a group's last peer to leave may find the others gone
