"""Keeps the trainer's process alive: starts it, restarts it after a crash, gives up with a reason when hopeless."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from peer.channel import Applied, Failed, FromTrainer, Ready, Start, Stop, Stopped, ToTrainer, TrainerLink
from peer.errors import ChannelError, TrainerDied

log = logging.getLogger("peer.trainer")

START_SECONDS = 300.0
"""Importing torch, building the model, moving it to a GPU: a cold disk can take minutes."""

MAX_FAILURES = 5
"""Deaths in a row without a state applied in between: then it is not bad luck, and the user must act."""


class Trainer:
    """One trainer at a time. `on_message` gets all it says; `on_lost(reason)` is called when it has died."""

    def __init__(
        self,
        start: Start,
        *,
        on_message: Callable[[FromTrainer], None],
        on_lost: Callable[[str], None],
    ):
        self._start = start
        self._on_message = on_message
        self._on_lost = on_lost
        self._ready = asyncio.Event()
        self._saved: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self.link: TrainerLink | None = None
        self.ready: Ready | None = None
        self.restarts = 0

    async def run(self) -> None:
        """Until `stop`. Raises TrainerDied when the trainer cannot be kept alive."""
        failures = 0
        while not self._stopping:
            reason, applied = await self._life()
            if self._stopping:
                return
            failures = 1 if applied else failures + 1
            if failures >= MAX_FAILURES:
                raise TrainerDied(f"the trainer died {failures} times in a row, last: {reason}")
            log.error("%s; it is restarted from the store (attempt %d of %d)", reason, failures, MAX_FAILURES)
            self.restarts += 1
            self._on_lost(reason)
            await asyncio.sleep(min(30.0, 0.5 * 2**failures))

    async def _life(self) -> tuple[str, bool]:
        """One process from start to end: why it ended, and whether it had applied anything."""
        applied = False
        said = ""
        link = self.link = await TrainerLink.start(threads=self._start.threads)
        try:
            await link.send(self._start)
            async for message in link:
                match message:
                    case Ready():
                        self.ready = message
                        self._ready.set()
                    case Applied():
                        applied = True
                    case Failed(fatal=True):
                        said = message.reason
                    case Stopped() if not self._saved.done():
                        self._saved.set_result(message.saved)
                    case _:
                        pass
                self._on_message(message)
        except (ChannelError, TrainerDied) as e:
            said = said or str(e)
        finally:
            self._ready.clear()
            end = await link.stop(10.0)
        return said or str(end), applied

    async def send(self, message: ToTrainer) -> None:
        """Give it a message once it is ready. Raises TrainerDied when it is not within START_SECONDS, or is gone."""
        try:
            await asyncio.wait_for(self._ready.wait(), START_SECONDS)
        except asyncio.TimeoutError:
            raise TrainerDied(f"the trainer was not ready within {START_SECONDS:.0f} s") from None
        if self.link is None:
            raise TrainerDied("there is no trainer")
        await self.link.send(message)

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def stop(self, seconds: float) -> bool:
        """Let it save and leave within this time, else kill it. True when all that was learnt is on disk."""
        self._stopping = True
        if self._saved.done():
            return self._saved.result()
        saved = False
        link = self.link
        if link is not None and link.running:
            if self._ready.is_set():
                try:
                    await asyncio.wait_for(link.send(Stop()), seconds)
                    saved = await asyncio.wait_for(asyncio.shield(self._saved), seconds)
                except (asyncio.TimeoutError, TrainerDied) as e:
                    log.warning("the trainer did not save in time: %s", e or "no answer")
            if not saved:
                link.kill()
        return saved
