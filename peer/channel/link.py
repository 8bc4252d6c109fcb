"""The node's end of the channel, which starts the trainer's process and waits for its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import async_timeout

from peer.channel.messages import MAX_LINE, FromTrainer, ToTrainer, from_line, to_line
from peer.errors import ChannelError, TrainerDied
from protocol.errors import os_reason
from protocol.plain_text import one_line
from protocol.python_command import python_command

log = logging.getLogger(__name__)

KILLED_SECONDS = 30.0
"""Seconds in which a killed process ends, unless the kernel waits for a device."""

SEND_SECONDS = 30.0
"""Maximum time to send a message.

A trainer at a long request may read nothing, and the socket's buffer takes what comes. If that stays full, the trainer
is killed.
"""

_STDERR_LINES = 40
_STDERR_LINE = 500


@dataclass(frozen=True, slots=True)
class TrainerExit:
    """The end of a trainer: its return code (negative: the signal) and the last lines that it printed.

    `killed`: why this process killed it; empty if it did not.
    """

    code: int
    last_lines: tuple[str, ...]
    killed: str

    def __str__(self) -> str:
        how = f"with code {self.code}"
        if self.code < 0:
            with contextlib.suppress(ValueError):
                how = f"by {signal.Signals(-self.code).name}"
        cause = ""
        if self.code == -signal.SIGKILL:
            cause = f" ({self.killed or 'out of memory is the usual cause: see the system log'})"
        tail = "; its last words: " + " | ".join(self.last_lines[-5:]) if self.last_lines else ""
        return f"the trainer ended {how}{cause}{tail}"


def trainer_environment(threads: int) -> dict[str, str]:
    """Return the environment of a process that runs the model on this number of CPU threads."""
    return dict(os.environ) | {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _not_started(program: str, e: OSError) -> TrainerDied:
    why = os_reason(e)
    return TrainerDied(
        f"cannot start the trainer: {why}; check {program}, memory, and the limits on processes and files"
    )


class TrainerLink:
    """One trainer process. Use: `start`, `send`, `async for message in link`, then `stop`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ):
        self._process = process
        self._reader = reader
        self._writer = writer
        self._lines: deque[str] = deque(maxlen=_STDERR_LINES)
        self._sending = asyncio.Lock()
        self._killed = ""
        self._drain = asyncio.create_task(self._drain_output())

    @classmethod
    async def start(
        cls,
        *,
        threads: int = 1,
        command: Sequence[str] | None = None,
    ) -> TrainerLink:
        """Start a trainer's process, which then waits for `Start`. It ends with this process, however this one ends.

        `command` replaces that of `peer.training` (for tests).
        Raises TrainerDied when the process cannot be started.
        """
        argv = [*(command or python_command("peer.training")), "--parent", str(os.getpid())]
        try:
            ours, theirs = socket.socketpair()
        except OSError as e:
            raise _not_started(argv[0], e) from None
        argv += ["--fd", str(theirs.fileno())]
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    env=trainer_environment(threads),
                    # A Ctrl-C in the terminal is for the node, which then asks the trainer to stop.
                    start_new_session=True,
                )
        except OSError as e:
            ours.close()
            raise _not_started(argv[0], e) from None
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def send(self, message: ToTrainer) -> None:
        """Send a message. Raises TrainerDied when the trainer is gone, or (it is killed) takes none in SEND_SECONDS."""
        line = to_line(message)
        try:
            # At once, so that the sending of a message is cancelled before this call or not at all.
            self._writer.write(line)
            async with self._sending, async_timeout.timeout(SEND_SECONDS):
                await self._writer.drain()
        except asyncio.TimeoutError:
            self.kill(f"it has taken no message for {SEND_SECONDS:.0f} s")
            raise TrainerDied(f"the trainer (process {self.pid}) was killed: {self._killed}") from None
        except (ConnectionError, RuntimeError) as e:
            raise TrainerDied(f"the trainer (process {self.pid}) is gone: {e}") from None

    async def __aiter__(self) -> AsyncIterator[FromTrainer]:
        """Yield messages until the trainer exits, which closes the channel (see `wait`). Raises ChannelError."""
        while True:
            try:
                line = await self._reader.readline()
            except ConnectionError:
                return
            except ValueError:
                raise ChannelError(f"the trainer sent a line of more than {MAX_LINE} bytes") from None
            if not line.endswith(b"\n"):
                return
            message = from_line(line[:-1])
            if not isinstance(message, FromTrainer):
                raise ChannelError(f"the trainer sent a {type(message).__name__} message, which is for trainers")
            yield message

    async def wait(self) -> TrainerExit:
        """Wait for the process's end and return it. Use a deadline, or call `stop`, which has one."""
        code = await self._process.wait()
        # A process that inherited the pipe may hold it open: the last output is read by then, or lost.
        with contextlib.suppress(asyncio.TimeoutError):
            async with async_timeout.timeout(1.0):
                await asyncio.shield(self._drain)
        return TrainerExit(code, tuple(self._lines), self._killed)

    async def stop(self, seconds: float = 5.0) -> TrainerExit:
        """Close the channel, wait at most `seconds` for the process's end, then kill it. Idempotent.

        It saves nothing: send `Stop` and await `Stopped` first. Raises TrainerDied when it cannot be killed.
        """
        self._writer.close()
        try:
            async with async_timeout.timeout(seconds):
                await self._process.wait()
        except asyncio.TimeoutError:
            log.warning("the trainer (process %d) did not exit in %.0f s: killed", self.pid, seconds)
            self.kill(f"it did not exit in {seconds:.0f} s")
        try:
            async with async_timeout.timeout(KILLED_SECONDS):
                gone = await self.wait()
        except asyncio.TimeoutError:
            raise TrainerDied(
                f"the trainer (process {self.pid}) cannot be ended: its GPU or its disk hangs; restart this machine"
            ) from None
        self._drain.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await asyncio.gather(self._drain, self._writer.wait_closed())
        return gone

    def kill(self, why: str = "") -> None:
        """Send SIGKILL to the process and its ranks. `why`: for the user, if the kill is not expected."""
        self._killed = self._killed or why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # it leads a session of its own

    async def _drain_output(self) -> None:
        """Keep the last lines that the trainer printed, and log each: a full pipe would block it."""
        stream = self._process.stdout
        if stream is None:
            return
        remaining = b""
        while data := await stream.read(1 << 14):
            *lines, remaining = (remaining + data).split(b"\n")
            remaining = remaining[-_STDERR_LINE:]
            for line in lines:
                self._keep(line)
        if remaining:
            self._keep(remaining)

    def _keep(self, line: bytes) -> None:
        text = one_line(line[:_STDERR_LINE].decode(errors="replace"))  # it may quote a stranger's config
        if text:
            self._lines.append(text)
            log.info("%s", text)
