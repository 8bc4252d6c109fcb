"""The node's side of an auditor's process: started for one job, killed at a deadline, always waited for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence

import async_timeout

from peer.auditor.job import MAX_ANSWER, AuditAnswer, AuditJob, job_line, parse_answer
from peer.channel.link import trainer_environment
from peer.errors import AuditError

MAX_WORDS = 16 * 1024
"""Bytes of the process's last words that are kept."""


async def run_audit(job: AuditJob, seconds: float, command: Sequence[str] = ()) -> AuditAnswer:
    """Return the answer of a process to a job. `command` replaces `python -m peer.auditor` (for tests).

    Raise AuditError when there is no answer within `seconds`. The process is over when this returns or is cancelled.
    """
    line = job_line(job)
    argv = [*(command or (sys.executable, "-m", "peer.auditor")), "--parent", str(os.getpid())]
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=trainer_environment(job.threads),
            limit=MAX_ANSWER,
            start_new_session=True,  # a Ctrl-C in the terminal is for the node
        )
    except OSError as e:
        raise AuditError(f"cannot start an auditor: {e}; check {argv[0]} and the limits on processes") from None
    try:
        async with async_timeout.timeout(seconds):
            answer, words, _ = await asyncio.gather(_read(process.stdout), _tail(process.stderr), _ask(process, line))
            code = await process.wait()
    except asyncio.TimeoutError:
        raise AuditError(f"no answer within {seconds:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if not answer:
        said = words.decode(errors="replace").strip().splitlines()[-3:]
        raise AuditError(f"the auditor ended with code {code} and no answer: {' | '.join(said)[:500] or 'no words'}")
    return parse_answer(answer)


async def _ask(process: asyncio.subprocess.Process, line: bytes) -> None:
    stdin = process.stdin
    if stdin is None:
        return
    with contextlib.suppress(ConnectionError):  # it has ended: its answer, or its last words, say why
        stdin.write(line)
        await stdin.drain()
    stdin.close()


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """Return all that a stream has. Raise AuditError beyond MAX_ANSWER."""
    data = b""
    while stream is not None and (piece := await stream.read(1 << 16)):
        data += piece
        if len(data) > MAX_ANSWER:
            raise AuditError(f"an answer of more than {MAX_ANSWER} bytes")
    return data


async def _tail(stream: asyncio.StreamReader | None) -> bytes:
    data = b""
    while stream is not None and (piece := await stream.read(1 << 14)):
        data = (data + piece)[-MAX_WORDS:]
    return data
