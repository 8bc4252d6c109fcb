"""Supervision of the trainer's process: it is started, restarted after a crash, and abandoned when it cannot work.

The loss of a process is reported once, by `on_lost`. A request to one process is never repeated to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import async_timeout

from peer import channel
from peer.errors import ChannelError, TrainerDied
from peer.node.trainer_files import SAVED_TENSORS

log = logging.getLogger(__name__)

START_SECONDS = 480.0
"""Seconds to import torch, meet the other ranks, build the model and move it to a GPU: a cold disk takes minutes."""

READ_RATE = 20e6
"""Bytes a second at which a slow disk gives what a process reads and hashes before it is ready."""

ANSWER_SECONDS, REPLAY_SECONDS = 900.0, 60.0
"""Seconds that a trainer has for a request, once it has answered those before; each round to replay adds the second."""

EXIT_SECONDS = 1.0
"""Seconds that `stop` waits for the exit of a process that was killed."""

RESTART_SECONDS = 0.5
"""Seconds before a restart, doubled for each death in a row."""

MAX_FAILURES = 5
"""Deaths in a row, with no work done in between, after which the user must act."""

MAX_SEARCH = 32
"""Deaths in a row in the search for a micro-batch that do not count as such: 2**15 windows are halved to one, twice."""


ANSWERS = (channel.Ready, channel.Applied, channel.UpdateMade, channel.NothingDone, channel.Failed)
"""A trainer answers in the order of the requests."""


@dataclass(eq=False)
class TrainerSupervisor:
    """The supervisor of one trainer process at a time.

    `on_message` receives all its messages; `on_lost(reason)` is called when it has died. `command` replaces the
    trainer's own command line. `gpu_memory` is asked at each start of a process (see `Start`). Once a process has been
    ready here (`was_ready`: one of an earlier supervisor), a start that fails is tried again: the machine is short of
    something for now.
    """

    start: channel.Start
    on_message: Callable[[channel.FromTrainer], None]
    on_lost: Callable[[str], None]
    command: Sequence[str] | None = None
    gpu_memory: Callable[[], int] = lambda: 0
    was_ready: bool = False

    def __post_init__(self) -> None:
        self._ready_link: asyncio.Future[channel.TrainerLink] = asyncio.get_running_loop().create_future()
        """Done when the present process is ready, failed when it is lost. The next process has a new future."""
        self._stopped: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._exited = asyncio.Event()
        """Set when the process has ended and was waited for."""
        self._owed: deque[tuple[str, float]] = deque()
        """The requests without an answer, oldest first, each with the seconds that it may take."""
        self._watchdog: asyncio.TimerHandle | None = None
        """Runs out when the oldest of them has taken its seconds."""
        self._cannot_start = False
        self.link: channel.TrainerLink | None = None
        self.ready: channel.Ready | None = None
        self.stopping = False
        self.restarts = 0

    async def run(self) -> None:
        """Keep a process alive until `stop`. Raises TrainerDied when that is impossible."""
        failures = searches = 0
        while not self.stopping:
            reason, worked, easier = await self._run_process()
            if self.stopping:
                return
            if self._cannot_start:
                raise TrainerDied(reason)
            if worked:
                failures = searches = 0
            if easier and searches < MAX_SEARCH:
                searches += 1
                count = f"step {searches} of the search for a micro-batch that fits"
            else:
                failures += 1
                count = f"failure {failures} of {MAX_FAILURES}"
            if failures >= MAX_FAILURES:
                raise TrainerDied(f"the trainer died {failures} times in a row, last: {reason}")
            log.error("%s; it is restarted from the store (%s)", reason, count)
            self.restarts += 1
            self._ready_link = asyncio.get_running_loop().create_future()
            self.on_lost(reason)
            await asyncio.sleep(min(30.0, RESTART_SECONDS * 2**failures))

    async def _run_process(self) -> tuple[str, bool, bool]:
        """Run one process from start to end. Return why it ended, whether it had worked, and if the next needs less.

        It worked when it trained or went from one state to the next. Loading a state does not count: a process that
        runs out of memory in its first step also gets this far every time.
        """
        worked, easier, applied = False, False, 0
        reason = ""
        log.info("starting the trainer: loading torch and the model")
        try:
            link = self.link = await channel.TrainerLink.start(threads=self.start.threads, command=self.command)
        except TrainerDied as e:
            if not self.was_ready:
                raise
            self._fail_pending(str(e))
            return str(e), False, False
        self._exited.clear()
        self._owed.clear()
        if self.stopping:
            link.kill()
        seconds = START_SECONDS + await asyncio.to_thread(_bytes_to_read, self.start) / READ_RATE
        self._expect_answer(f"was not ready within {seconds:.0f} s", seconds)
        try:
            await link.send(replace(self.start, gpu_memory=self.gpu_memory()))
            async for message in link:
                if isinstance(message, ANSWERS) and self._owed:
                    self._owed.popleft()
                    self._restart_watchdog()
                match message:
                    case channel.Ready() if not self._ready_link.done():
                        self.ready, self.was_ready = message, True
                        if message.on_gpu and self.start.device == "auto":
                            # A GPU that is lost later is an error: nobody wants the CPU to take over a GPU's work.
                            self.start = replace(self.start, device="cuda")
                        self._ready_link.set_result(link)
                    case channel.Applied():
                        applied += 1
                        worked = worked or applied > 1
                    case channel.Progress(tokens_per_second=rate) if rate > 0:
                        worked = True
                    case channel.Failed(what=what, fatal=True):
                        reason, easier = message.reason, what == "memory"
                        # The device, the data or the installed libraries are at fault: the next start would fail too.
                        self._cannot_start = what == "start" and not self.was_ready
                    case channel.Stopped() if not self._stopped.done():
                        self._stopped.set_result(message.saved)
                    case _:
                        pass
                self.on_message(message)
        except (ChannelError, TrainerDied) as e:
            reason = reason or str(e)
        finally:
            self._owed.clear()
            self._restart_watchdog()
            self._fail_pending(f"the trainer (process {link.pid}) is gone")
            if self.stopping and not self._stopped.done():
                self._stopped.set_result(False)
            end = await link.stop(10.0)
            self._exited.set()
        return reason or str(end), worked, easier

    async def send(self, message: channel.ToTrainer) -> None:
        """Send a message once the process is ready. Raises TrainerDied when it is lost first, as `on_lost` reports."""
        link = await asyncio.shield(self._ready_link)
        if isinstance(message, channel.Apply | channel.Load | channel.MakeUpdate | channel.WriteCheckpoint):
            replay = len(message.replay) if isinstance(message, channel.Load) else 1
            seconds = ANSWER_SECONDS + REPLAY_SECONDS * replay
            self._expect_answer(f"has not answered {type(message).__name__} for {seconds:.0f} s", seconds)
        await link.send(message)

    @property
    def is_ready(self) -> bool:
        """True while the present process is ready."""
        return self._ready_link.done() and self._ready_link.exception() is None

    async def stop(self, seconds: float) -> bool:
        """Have the process save and exit within these seconds, else kill it. Return whether it saved. Idempotent."""
        self.stopping = True
        link = self.link
        if link is not None and link.running:
            if self.is_ready:
                try:
                    async with async_timeout.timeout(seconds):
                        if not self._stopped.done():
                            await link.send(channel.Stop())
                            await asyncio.shield(self._stopped)
                        await self._exited.wait()
                except (asyncio.TimeoutError, TrainerDied) as e:
                    if not self._stopped.done():
                        log.warning("the trainer did not save in time: %s", str(e) or "no answer")
            link.kill()
        if link is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                async with async_timeout.timeout(EXIT_SECONDS):
                    await self._exited.wait()
        return self._stopped.done() and self._stopped.result()

    # -- a process that hangs --------------------------------------------------------------------------------

    def _expect_answer(self, otherwise: str, seconds: float) -> None:
        """Note a request, for whose answer the process has these seconds."""
        self._owed.append((otherwise, seconds))
        if len(self._owed) == 1:
            self._restart_watchdog()

    def _restart_watchdog(self) -> None:
        """Kill the process if the oldest request is not answered in its seconds from now on."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = None
        if self._owed and self.link is not None:
            otherwise, seconds = self._owed[0]
            self._watchdog = asyncio.get_running_loop().call_later(seconds, self.link.kill, f"it {otherwise}")

    def _fail_pending(self, reason: str) -> None:
        """Fail the requests that wait for this process, and those made before `on_lost` was called."""
        if self._ready_link.done():
            self._ready_link = asyncio.get_running_loop().create_future()
        self._ready_link.set_exception(TrainerDied(reason))
        self._ready_link.exception()  # marks it as retrieved: nobody may be waiting for it


def _bytes_to_read(start: channel.Start) -> int:
    """Return the bytes of the frozen base, and twice those of the saved state, which is hashed and then loaded.

    A file that is gone counts for nothing: the trainer says so.
    """
    total = 0
    for path, times in [(start.base, 1), *((path, 2) for path in start.state_folder.glob(SAVED_TENSORS))]:
        with contextlib.suppress(OSError):
            total += 0 if path is None else times * path.stat().st_size
    return total
