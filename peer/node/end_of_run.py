"""The end of a run at one peer: whether the coordinator has its last state, and whether this peer can still reach it.

A peer that holds the last state stays until the coordinator has it, as far as the machine lets it. A peer without the
state leaves when nobody gives it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from peer.coordinator_client import RunInfo
from peer.node.enrollment import COORDINATOR_ABSENT, Enrollment
from protocol.errors import CairnError
from protocol.ids import Digest
from protocol.rounds.departure import MAX_STAY_SECONDS
from protocol.rounds.machine import RoundMachine
from protocol.rounds.summary import Summary
from protocol.spec import is_total_reached

log = logging.getLogger(__name__)

POLL_SECONDS = 3.0
"""Seconds between two requests to the coordinator while its answer matters, on average."""

LATE_SECONDS = 10.0
"""Seconds without the last state after which the log says so."""

SAFE = (
    f"at most {MAX_STAY_SECONDS / 60:.0f} min. Ctrl-C is safe: what this peer has stays on its disk, and the same "
    "command goes on"
)


@dataclass(eq=False)
class EndOfRun:
    """One peer's view of its run's end, apart from its machine's. `run` asks the coordinator when that matters."""

    membership: Enrollment
    machine: RoundMachine
    info: RunInfo | None = field(default=None, init=False)
    """The coordinator's answer that the run is over and that it has the last state; None before it."""

    _is_completed: bool = field(default=False, init=False)
    _late_since: float | None = field(default=None, init=False)
    _said: set[str] = field(default_factory=set, init=False)

    def complete(self) -> None:
        """Note that the run is over for this peer, which stays for those who need the last state."""
        self._is_completed = self.membership.client is not None

    @property
    def is_awaited(self) -> bool:
        """True when this peer may have the last state of a run that is over, and the coordinator may not have it."""
        return self._is_completed and self.info is None and self._is_over

    @property
    def _is_over(self) -> bool:
        """Return whether the run is over, by the chain, and has a record: the genesis is an asset."""
        chain, spec = self.machine.chain, self.membership.spec
        directive = chain.newest_directive
        ended = directive is not None and directive.body.run_status == "ended"
        finished = is_total_reached(spec.total_tokens, chain.weight(chain.head) * spec.data.window_tokens)
        return chain.head != chain.genesis and (ended or finished)

    async def run(self, ask_members: Callable[[], Awaitable[None]], leave: Callable[[str], None]) -> None:
        """Ask the coordinator at the end of the run, until cancelled.

        `ask_members` looks for the coordinator's newer address. `leave` is called with the reason when the last state
        cannot be reached.
        """
        while True:
            await asyncio.sleep(POLL_SECONDS * random.uniform(0.75, 1.25))
            view = self._view()
            if self._is_late(view):
                if (why := await self._reason_to_leave(view, ask_members)) is not None:
                    leave(why)
                    return
                continue
            self._late_since = None
            if self.is_awaited:
                await self._hand_over(view, ask_members)

    def _view(self) -> Summary:
        return self.machine.summary(time.monotonic())

    # -- a peer that holds the last state --------------------------------------------------------------------

    async def _hand_over(self, view: Summary, ask_members: Callable[[], Awaitable[None]]) -> None:
        info, problem = await self._ask(ask_members)
        if info is not None and self._is_archived(info, view.head):
            self.info = info
            log.info("the coordinator has the last state")
            return
        what = "the coordinator does not answer" if problem else "the coordinator does not have the last state yet"
        self._say(f"{what}: staying until it has the last state", "absent" if problem else "fetching")

    def _is_archived(self, info: RunInfo, record: Digest) -> bool:
        """Return whether the run is over and the coordinator has the state after `record`, or is on another branch."""
        last, chain = info.last, self.machine.chain
        if not info.over or last is None or last.state is None:
            return False
        return last.record == record or last.record not in chain or not chain.is_ancestor(last.record, record)

    # -- a peer without it -----------------------------------------------------------------------------------

    def _is_late(self, view: Summary) -> bool:
        """Return whether the run is over, and this peer does not hold the last state."""
        return self._is_over and (view.state is None or view.head != view.chain_head)

    async def _reason_to_leave(self, view: Summary, ask_members: Callable[[], Awaitable[None]]) -> str | None:
        """Return why waiting for the last state is in vain; None while somebody may still bring it."""
        now = time.monotonic()
        self._late_since = now if self._late_since is None else self._late_since
        if now - self._late_since > MAX_STAY_SECONDS:
            return "the run is over, and nobody gave this peer the last state"
        if any(m.heartbeat.head == view.chain_head and m.heartbeat.state is not None for m in view.members):
            return None  # it gives us what leads there
        info, _ = await self._ask(ask_members)
        if info is not None and self._is_archived(info, view.chain_head):
            self.info = info
            return f"the run is {info.over}"
        if now - self._late_since > LATE_SECONDS:
            self._say("the run is over, and nobody here has its last state: waiting for a member who has it", "late")
        return None

    # -- the coordinator -------------------------------------------------------------------------------------

    async def _ask(self, ask_members: Callable[[], Awaitable[None]]) -> tuple[RunInfo | None, str]:
        """Return the coordinator's answer, or None and why there is none."""
        client = self.membership.client
        if client is None:
            return None, "this peer has none"
        try:
            return await client.get_run_again(), ""
        except COORDINATOR_ABSENT as e:
            with contextlib.suppress(CairnError):
                await ask_members()
            return None, str(e)
        except CairnError as e:
            return None, str(e)

    def _say(self, text: str, topic: str) -> None:
        """Log a sentence once for each topic, with how long it may take."""
        if topic not in self._said:
            self._said.add(topic)
            log.warning("%s, %s", text, SAFE)
