"""The auditor's process: `python -m peer.auditor --parent PID`. For each job on stdin there is one answer on stdout."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING

from peer.auditor.job import AuditAnswer, Job, MeasuredScore, ScreenJob, answer_line, parse_job
from peer.channel.messages import MAX_LINE
from peer.errors import AuditError, UncheckableUpdate
from peer.parent_process import exit_with_parent
from protocol.errors import CairnError
from protocol.messages import Score
from protocol.plain_text import one_line
from protocol.quiet_imports import quiet_imports

if TYPE_CHECKING:
    import torch

CPU_NICENESS = 10
"""As the trainer's on the same cores: each has half. Audits are little work, but reports count for a while: with an
eighth or a quarter of the time, liars were convicted too late or never."""

FREE_SHARE = 0.1
"""Share of a GPU's memory that an audit leaves to the trainer, beside what is in use."""


def main() -> int:
    """Answer one job after the other until stdin ends. Return the exit code."""
    # Ctrl-C, a service's SIGTERM and a closed terminal are for the node: it kills this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m peer.auditor", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of the node")
    if not exit_with_parent(parser.parse_args().parent):
        return 1
    # When the machine's memory runs out, the kernel is to end this process, and neither the node nor the trainer.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # Libraries that print must not get between the node and the answers.
    out = os.dup(1)
    os.dup2(2, 1)
    with open(out, "wb", buffering=0) as file:
        while line := sys.stdin.buffer.readline(MAX_LINE + 1):
            file.write(answer_line(_answer(line)))
    return 0


def _answer(line: bytes) -> AuditAnswer:
    began = time.process_time()
    try:
        if len(line) > MAX_LINE:
            raise AuditError(f"a job of more than {MAX_LINE} bytes")
        job = parse_job(line)
        scores = tuple(MeasuredScore(s.name, s.value, s.threshold) for s in scores_of(job))
    except (CairnError, OSError, RuntimeError, MemoryError) as e:
        # RuntimeError: torch's, for a device that fails.
        said = one_line(str(e), 2000)
        seconds = time.process_time() - began
        return AuditAnswer((), said or type(e).__name__, seconds, isinstance(e, UncheckableUpdate))
    return AuditAnswer(scores, "", time.process_time() - began)


def scores_of(job: Job) -> tuple[Score, ...]:
    """Make the check. Raises CairnError, OSError, RuntimeError and MemoryError."""
    module = "peer.auditor.screen" if isinstance(job, ScreenJob) else "peer.auditor.audit"
    if module not in sys.modules:
        with quiet_imports():
            import_module(module)  # torch and transformers: seconds
    if isinstance(job, ScreenJob):
        from peer.auditor.screen import screen

        return screen(job, SystemRandom())  # not nicer: the next job may be for a GPU
    from peer.auditor.audit import audit
    from peer.training.device import choose_device

    gc.collect()  # the model of the job before refers to itself
    device = choose_device(job.device, job.threads)
    if device.type == "cpu":
        os.nice(max(0, CPU_NICENESS - os.nice(0)))  # each job comes here
    else:
        _leave_memory(device, job.gpu_memory)
    return audit(job, device)


def _leave_memory(device: torch.device, limit: int) -> None:
    """Bound this process's part of a GPU, on which the trainer may be. Raises AuditError when too little is free.

    `limit`: the most bytes that it may have in any case; 0: none.
    """
    import torch

    torch.cuda.empty_cache()  # of the job before
    free, whole = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(memory_share(free, whole, limit), device)


def memory_share(free: int, whole: int, limit: int = 0) -> float:
    """Return the share of a GPU that an audit may use, by its free bytes, all, and a limit (0: none).

    Raises AuditError for none.
    """
    if (share := free / whole - FREE_SHARE) <= 0:
        raise AuditError("the GPU's memory is needed for training: --audit-device cpu checks on the CPU")
    return min(share, limit / whole) if limit else share


if __name__ == "__main__":
    # Not sys.exit: threads may wait for a source of data for a while, and would hold the process.
    code = main()
    sys.stderr.flush()
    os._exit(code)
