"""Runs work in a separate process: at low priority, killed first when memory is short, ended when it takes too long.

Stores that do not answer, models that grow and drivers that crash do so there. The job is JSON on stdin; results are
lines of JSON on stdout, each as soon as it is known, so that work done in time counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import async_timeout

from coordinator.errors import CoordinatorError
from protocol.errors import CairnError
from protocol.plain_text import one_line
from protocol.python_command import python_command

Row = dict[str, Any]
MAX_LINE = 1024 * 1024
MAX_MESSAGE = 2000
"""Maximum number of characters of the process's last output that are reported."""

_PR_SET_PDEATHSIG = 1


class JobError(CoordinatorError):
    """A job that did not finish; the message says why."""


async def run_job(
    module: str, job: Row, on_row: Callable[[Row], None], *, deadline: float, silence: float | None = None
) -> None:
    """Run a module with this job; `on_row` is called with each row. A cancellation kills the process.

    `deadline` is seconds for all of it, `silence` seconds without a row. Raises JobError.
    """
    process = await asyncio.create_subprocess_exec(
        *python_command(module, str(os.getpid())), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, start_new_session=True, limit=MAX_LINE,
    )  # fmt: skip
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None
    output = asyncio.create_task(_last_output(stderr))
    try:
        async with async_timeout.timeout(deadline):
            with contextlib.suppress(OSError):  # the process ended at once: its exit code says why
                stdin.write(json.dumps(job).encode())
                await stdin.drain()
                stdin.close()
            while line := await _next_line(stdout, silence):
                row = json.loads(line)
                if "failed" in row:
                    raise JobError(row["failed"][:MAX_MESSAGE])
                on_row(row)
            if code := await process.wait():
                raise JobError(_why(code, await output))
    except asyncio.TimeoutError:
        raise JobError(f"it took longer than {deadline:.0f} s and was ended") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output.cancel()
        await asyncio.gather(output, process.wait(), return_exceptions=True)


async def _next_line(stdout: asyncio.StreamReader, silence: float | None) -> bytes:
    try:
        async with async_timeout.timeout(silence):
            return await stdout.readline()
    except asyncio.TimeoutError:
        raise JobError(f"nothing came of it for {silence:.0f} s, and it was ended") from None
    except ValueError:
        raise JobError("it said more in a line than is taken") from None


async def _last_output(stderr: asyncio.StreamReader) -> str:
    kept = b""
    while data := await stderr.read(4096):
        kept = (kept + data)[-MAX_MESSAGE:]
    return one_line(kept.decode(errors="replace"))


def _why(code: int, output: str) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed: most likely memory ran out"
    return f"its process ended with code {code}: {output[-500:] or 'it said nothing'}"


def serve_job(work: Callable[[Row, Callable[[Row], None]], None]) -> None:
    """Run `work(job, say)` as the main function of a job's module, and report a failure in one line."""
    _lower_priority()
    # Output that libraries print is no result: it is sent to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(row: Row) -> None:
        answers.write(json.dumps(row, allow_nan=False) + "\n")
        answers.flush()

    try:
        work(json.loads(sys.stdin.buffer.read()), say)
    except CairnError as e:
        say({"failed": str(e)})
    except MemoryError:
        say({"failed": "memory did not suffice"})


def _lower_priority() -> None:
    """Lower this process's priority, and end it with its parent, whose id is its argument."""
    with contextlib.suppress(OSError):
        os.nice(19)
    # Linux may share the cores by sessions first (sched(7), autogroup), and a job has a session of its own.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write("19")
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if sys.argv[1:] and os.getppid() != int(sys.argv[1]):
            sys.exit(1)  # the parent died before this process was to be notified


def bound_memory(size: int) -> None:
    """Limit this process's own memory to `size` bytes (mapped files do not count)."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (size, resource.getrlimit(resource.RLIMIT_DATA)[1]))
