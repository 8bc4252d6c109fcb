"""The auditor's process: `python -m peer.auditor --parent PID`, one job on stdin, one answer on stdout."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from peer.auditor.job import AuditAnswer, AuditJob, MeasuredScore, answer_line, parse_job
from peer.channel.messages import MAX_LINE
from peer.errors import AuditError
from peer.parent_process import exit_with_parent
from protocol.errors import CairnError

CPU_NICENESS = 19
"""An audit has the time that neither the node nor its trainer needs."""


def main() -> int:
    """Read a job and write its answer. Return the exit code: 0 when there are scores, else 1."""
    # Ctrl-C, a service's SIGTERM and a closed terminal are for the node: it kills this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m peer.auditor", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of the node")
    if not exit_with_parent(parser.parse_args().parent):
        return 1
    # Libraries that print must not get between the node and the answer.
    out = os.dup(1)
    os.dup2(2, 1)
    answer = _answer()
    with open(out, "wb") as file:
        file.write(answer_line(answer))
    return 0 if answer.scores else 1


def _answer() -> AuditAnswer:
    try:
        job = _job()
        from peer.auditor.audit import audit  # torch and transformers: seconds
        from peer.training.device import choose_device

        device = choose_device(job.device, job.threads)
        if device.type == "cpu":
            os.nice(CPU_NICENESS)
        scores = tuple(MeasuredScore(s.name, s.value, s.threshold) for s in audit(job, device))
    except (CairnError, OSError, RuntimeError, MemoryError) as e:
        # RuntimeError: torch's, for a device that fails.
        return AuditAnswer((), " ".join(str(e).split())[:2000] or type(e).__name__, time.process_time())
    return AuditAnswer(scores, "", time.process_time())


def _job() -> AuditJob:
    """Return the job on stdin, which ends after it. Raise AuditError."""
    line = sys.stdin.buffer.read(MAX_LINE + 1)
    if len(line) > MAX_LINE:
        raise AuditError(f"a job of more than {MAX_LINE} bytes")
    return parse_job(line)


if __name__ == "__main__":
    # Not sys.exit: threads may wait for a source of data for a while, and would hold the process.
    code = main()
    sys.stderr.flush()
    os._exit(code)
