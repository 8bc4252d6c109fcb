"""The work of a node's devices: training, and checks of others' updates. It rests when the devices' user wants them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from peer.node.audit_jobs import AuditJobs
from peer.node.audit_runner import AuditRunner
from peer.node.events import Post
from peer.node.network import Network
from peer.node.rest import RestWish
from peer.node.tasks import Tasks
from peer.node.trainer_client import TrainerClient
from protocol.rounds import events

log = logging.getLogger(__name__)


@dataclass(eq=False)
class DeviceWork:
    """Trains, makes checks, or both, while `rest` has no reason. `begin` it in the swarm, and `stop` it at the end.

    An observer has neither `trainer` nor `auditor`: its `jobs` are for checks that its user asks for. `post` receives
    events for the machine, which decides when a trainer's rest begins and ends (`release`, `acquire`).
    """

    trainer: TrainerClient | None
    auditor: AuditRunner | None
    jobs: AuditJobs
    rest: RestWish
    tasks: Tasks
    post: Post

    @property
    def is_observing(self) -> bool:
        """True for an observer's node: it neither trains nor makes checks of its own accord."""
        return self.trainer is None and self.auditor is None

    async def begin(self, network: Network) -> None:
        """Fetch what the work needs, and start it. Raises CairnError, and TimeoutError."""
        if self.trainer is not None:
            await self.trainer.begin(network)
        else:
            await self.jobs.begin(network)
        if self.auditor is not None:
            self.tasks.spawn(self.auditor.run(), "audits")
            if self.trainer is None:
                self.tasks.spawn(self.auditor.follow(self.rest), "rest")

    def follow_rest(self) -> None:
        """Tell the machine, which has just started, of each rest of the trainer. Without one, checks rest alone."""
        if self.trainer is not None:
            self.tasks.spawn(self._follow_rest(self.trainer), "rest")

    async def _follow_rest(self, trainer: TrainerClient) -> None:
        """Rest while there is a reason to, and train otherwise, until cancelled."""
        rests = False
        trainer.hold(bool(self.rest.reason))  # the reason may have come or gone since the trainer began
        while True:
            reason = self.rest.reason
            if reason and not rests:
                log.info("resting: %s", reason)
                trainer.hold(True)
                self.post(events.Rest())
            elif not reason and rests:
                log.info("training again")
                trainer.hold(False)
                self.post(events.Resume())
            rests = bool(reason)
            await self.rest.wait_for_news()

    def release(self) -> None:
        """Free the devices: the trainer saves and ends, and no check begins, until `acquire`."""
        assert self.trainer is not None
        self.trainer.release(*([] if self.auditor is None else [self.auditor.release()]))

    def acquire(self) -> None:
        """Work again after `release`."""
        assert self.trainer is not None
        if self.auditor is not None:
            self.auditor.resume()
        self.trainer.acquire()

    async def stop(self) -> None:
        """Have the trainer, if there is one, save and exit. The node's `tasks` end the checks."""
        if self.trainer is not None:
            saved = await self.trainer.stop()
            log.info("the trainer has saved its state" if saved else "the trainer left without saving")
