"""The node's side of an auditor's process: started for a job, kept while others wait, killed at a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

from peer.auditor.job import MAX_ANSWER, AuditAnswer, Job, job_line, parse_answer
from peer.channel.link import trainer_environment
from peer.errors import AuditError, AuditTimeout
from protocol.python_command import python_command

MAX_WORDS = 16 * 1024
"""Bytes of the process's last words that are kept."""


class AuditProcess:
    """One auditor's process at a time, for one job at a time. A process that fails is not used again."""

    def __init__(self, command: Sequence[str] = ()):
        """`command` replaces that of `peer.auditor` (for tests)."""
        self._command = command or python_command("peer.auditor")
        self._process: asyncio.subprocess.Process | None = None
        self._words: asyncio.Task[bytes] | None = None
        self._exchanging: asyncio.Task[bytes] | None = None
        """The start of the process and the wait for its answer: `close` ends them, whatever they are at."""

    async def answer(self, job: Job, seconds: float) -> AuditAnswer:
        """Return the process's answer to a job. It is started if need be.

        Raises AuditTimeout when there is none within `seconds`, AuditError when the process fails or `close` comes
        first. The process is over when this raises or is cancelled, and after an answer without scores.
        """
        keep = False
        exchanging = self._exchanging = asyncio.create_task(self._exchange(job.threads, job_line(job)))
        try:
            await asyncio.wait([exchanging], timeout=seconds)
            if not exchanging.done():
                raise AuditTimeout(f"no answer within {seconds:.0f} s")
            if exchanging.cancelled():
                raise AuditError("the check was ended before its answer")
            answer = parse_answer(exchanging.result())
            keep = not answer.reason
            return answer
        finally:
            if not keep:
                await self.close()

    async def _exchange(self, threads: int, line: bytes) -> bytes:
        """Return the answer to a line. Raises AuditError if the process cannot be started, or ends without one."""
        process = self._process = self._process or await self._start(threads)
        _, data = await asyncio.gather(_send(process.stdin, line), _receive(process.stdout))
        if not data:
            raise AuditError(await self._last_words(process))
        return data

    async def close(self) -> None:
        """Kill the process with all that it has started, and wait for its end. Idempotent."""
        exchanging, self._exchanging = self._exchanging, None
        if exchanging is not None:
            exchanging.cancel()  # a process that is starting is killed by asyncio
            await asyncio.wait([exchanging])
            if not exchanging.cancelled():
                exchanging.exception()  # `answer` has raised it, or nobody waits for it any more
        process, words = self._process, self._words
        self._process = self._words = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
            # asyncio sees the end of a process when its pipes have ended, and stops reading one that is full.
            await asyncio.gather(process.wait(), _tail(process.stdout))
        if words is not None:
            words.cancel()

    async def _start(self, threads: int) -> asyncio.subprocess.Process:
        argv = [*self._command, "--parent", str(os.getpid())]
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=trainer_environment(threads),
                limit=MAX_ANSWER,
                start_new_session=True,  # a Ctrl-C in the terminal is for the node
            )
        except OSError as e:
            raise AuditError(f"cannot start an auditor: {e}; check {argv[0]} and the limits on processes") from None
        self._words = asyncio.create_task(_tail(process.stderr))
        return process

    async def _last_words(self, process: asyncio.subprocess.Process) -> str:
        code = await process.wait()
        said = (await self._words).decode(errors="replace").strip().splitlines()[-3:] if self._words else []
        return f"the auditor ended with code {code} and no answer: {' | '.join(said)[:500] or 'no words'}"


async def _send(stream: asyncio.StreamWriter | None, line: bytes) -> None:
    if stream is not None:
        with contextlib.suppress(ConnectionError):  # it has ended: its last words say why
            stream.write(line)
            await stream.drain()


async def _receive(stream: asyncio.StreamReader | None) -> bytes:
    """Return the next line, or what came before the stream's end. Raises AuditError beyond MAX_ANSWER."""
    try:
        return b"" if stream is None else await stream.readline()
    except ValueError:
        raise AuditError(f"an answer of more than {MAX_ANSWER} bytes") from None


async def _tail(stream: asyncio.StreamReader | None) -> bytes:
    data = b""
    while stream is not None and (piece := await stream.read(1 << 14)):
        data = (data + piece)[-MAX_WORDS:]
    return data
