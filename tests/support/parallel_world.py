"""Ranks for tests: processes on the CPU, joined by gloo over a file, that run one function of a test module.

Their parent is a process that has imported torch and the models once, and forks each: that takes four seconds of CPU
a rank otherwise. It has no threads, so what it forks is as good as new.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = ("peft", "transformers.models.llama.modeling_llama", "torch.distributed.tensor", "peer.training.trainer")


def run_ranks(world: int, function: str, folder: Path, seconds: float = 500.0) -> None:
    """Run `function` ("module:name", of (rank, world, folder)) on each rank; all must end well."""
    ask = {"world": world, "function": function, "folder": str(folder), "seconds": seconds}
    parent = _parent()
    try:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(json.dumps(ask | {"environment": dict(os.environ)}) + "\n")
        parent.stdin.flush()
        answer = parent.stdout.readline()
    except BaseException:
        _end(parent)
        raise
    wrong = json.loads(answer) if answer else 0
    if wrong is not None:
        raise AssertionError(f"rank {wrong}: {(folder / f'rank{wrong}.log').read_text()[-6000:]}")


def join(rank: int, world: int, file: Path) -> None:
    """Become a rank of a group that meets at this file, which nobody has used."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


# -- their parent ------------------------------------------------------------------------------------------------


@cache
def _parent() -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.support.parallel_world"]
    pipe = subprocess.PIPE
    made = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    )
    atexit.register(_end, made)
    return made


def _end(parent: subprocess.Popen[str]) -> None:
    """End a process group with all its ranks."""
    _parent.cache_clear()
    with suppress(ProcessLookupError):
        os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()


def _serve() -> None:
    """Answer each line, a call of `run_ranks`, with the rank that failed, or null."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    for module in IMPORTED:
        importlib.import_module(module)
    for line in sys.stdin:
        ask = json.loads(line)
        ranks = [_fork(rank, ask) for rank in range(ask["world"])]
        answers.write(json.dumps(_wrong(ranks, ask["seconds"])) + "\n")
        answers.flush()


def _wrong(ranks: list[int], seconds: float) -> int | None:
    """Return the first rank that did not end with code 0 within `seconds`, and end the others."""
    deadline, left = time.monotonic() + seconds, dict(enumerate(ranks))
    try:
        while left:
            for rank, pid in list(left.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del left[rank]
                    if status:
                        return rank
            if time.monotonic() > deadline:
                return min(left)
            time.sleep(0.02)
        return None
    finally:
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(rank: int, ask: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        folder = Path(ask["folder"])
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(ask["environment"] | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})
        faulthandler.dump_traceback_later(480)  # shows the place of a hang before the kill
        module, _, name = ask["function"].partition(":")
        getattr(importlib.import_module(module), name)(rank, ask["world"], folder)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not through torch's exit handlers: a group's last to leave may find the others gone


if __name__ == "__main__":
    _serve()
