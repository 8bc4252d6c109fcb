"""The auditor's process: `python -m peer.auditor --parent PID`. For each job on stdin there is one answer on stdout."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from peer.auditor.job import AuditAnswer, MeasuredScore, answer_line, parse_job
from peer.channel.messages import MAX_LINE
from peer.errors import AuditError
from peer.parent_process import exit_with_parent
from protocol.errors import CairnError

CPU_NICENESS = 19
"""An audit has the time that neither the node nor its trainer needs."""


def main() -> int:
    """Answer one job after the other until stdin ends. Return the exit code."""
    # Ctrl-C, a service's SIGTERM and a closed terminal are for the node: it kills this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m peer.auditor", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of the node")
    if not exit_with_parent(parser.parse_args().parent):
        return 1
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
        from peer.auditor.audit import audit  # torch and transformers: seconds
        from peer.training.device import choose_device

        device = choose_device(job.device, job.threads)
        if device.type == "cpu":
            os.nice(CPU_NICENESS)  # no more than that, however often
        scores = tuple(MeasuredScore(s.name, s.value, s.threshold) for s in audit(job, device))
    except (CairnError, OSError, RuntimeError, MemoryError) as e:
        # RuntimeError: torch's, for a device that fails.
        return AuditAnswer((), " ".join(str(e).split())[:2000] or type(e).__name__, time.process_time() - began)
    return AuditAnswer(scores, "", time.process_time() - began)


if __name__ == "__main__":
    # Not sys.exit: threads may wait for a source of data for a while, and would hold the process.
    code = main()
    sys.stderr.flush()
    os._exit(code)
