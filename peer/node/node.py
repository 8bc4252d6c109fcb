"""One member of one run, from its start to its end. `builder.build_node` puts its parts together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from peer.node.audit_jobs import AuditJobs
from peer.node.audit_runner import AuditRunner
from peer.node.blob_retention import BlobRetention
from peer.node.chain_store import ChainStore
from peer.node.coordinator_discovery import ask_members, pass_on
from peer.node.driver import RoundDriver
from peer.node.end_of_run import EndOfRun
from peer.node.enrollment import Enrollment
from peer.node.events import NodeEvents, RunOver
from peer.node.last_member import serve_coordinator
from peer.node.network import Network
from peer.node.request_server import RequestServer
from peer.node.rest import RestWish
from peer.node.snapshot import Snapshot
from peer.node.status_reporter import StatusReporter
from peer.node.tasks import Tasks, cancel_and_wait
from peer.node.trainer_client import TrainerClient
from peer.store import Store
from protocol.chain import Chain
from protocol.ids import Digest
from protocol.rounds import events
from protocol.rounds.consensus import MAX_LEAVE_SECONDS
from protocol.rounds.machine import RoundMachine

log = logging.getLogger(__name__)

HARD_STOP_SECONDS = MAX_LEAVE_SECONDS + 4.0
"""Seconds after `leave` when the node ends even if its machine has not said goodbye, which is late by then."""


@dataclass(eq=False)
class Node:
    """One member of one run. `run` returns when the run is over, or after `leave`.

    An observer has no trainer, nor has a peer that audits without training.
    """

    membership: Enrollment
    network: Network
    certificates: ChainStore
    retention: BlobRetention
    trainer: TrainerClient | None
    audit_jobs: AuditJobs
    auditor: AuditRunner | None
    driver: RoundDriver
    requests: RequestServer
    reporter: StatusReporter
    end_of_run: EndOfRun
    rest: RestWish
    bus: NodeEvents
    tasks: Tasks
    must_restart: bool = field(default=False, init=False)
    """True when the node must be built and run again: the run was rolled back further than its memory goes."""

    def __post_init__(self) -> None:
        self._finished = asyncio.Event()
        self._started = asyncio.Event()
        self._leaving = False

    # -- lifecycle ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start everything, drive the machine until it is finished, stop everything. Raises CairnError."""
        try:
            await self._run_until_finished(self._start_and_drive())
        finally:
            await self._stop()

    async def _run_until_finished(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this until the node ends. Raises its errors, and those of any task of the node."""
        task, finished = asyncio.ensure_future(work), asyncio.ensure_future(self._finished.wait())
        failure = self.tasks.failure
        try:
            await asyncio.wait([task, finished, failure], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait([task, finished])
        if failure.done():
            failure.result()
        if not task.cancelled():
            task.result()

    async def started(self, running: asyncio.Future[None]) -> None:
        """Wait until the node is in the swarm. `running` is the task of `run`; if it fails first, raise its error."""
        wait = asyncio.ensure_future(self._started.wait())
        try:
            await asyncio.wait([wait, running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            wait.cancel()
        if running.done():
            running.result()

    def leave(self) -> None:
        """Announce what is done and say goodbye: the user wants to stop. `run` returns within seconds."""
        if self._leaving:
            return
        self._leaving = True
        if not self._started.is_set():
            self._finish("left before it had entered the swarm")
            return
        self.driver.post(events.Leave())
        asyncio.get_running_loop().call_later(HARD_STOP_SECONDS, self._finish, "left")

    def _leave_because(self, reason: str) -> None:
        log.warning("%s", reason)
        self.bus.post(RunOver(reason))
        self.leave()

    def _finish(self, reason: str) -> None:
        self.bus.post(RunOver(reason))
        self._finished.set()

    async def _start_and_drive(self) -> None:
        m, tasks, network = self.membership, self.tasks, self.network
        await network.start(self.requests.handlers())
        tasks.spawn(self.reporter.keep_writing(), "status file")
        if self.trainer is not None or self.auditor is not None:
            introduction = tasks.spawn(self._introduce(), "introduction")
            if self.trainer is not None:
                await self.trainer.begin(network)
            else:
                await self.audit_jobs.begin(network)
            await cancel_and_wait([introduction])
            if self.auditor is not None:
                tasks.spawn(self.auditor.run(), "audits")
                if self.trainer is None:
                    tasks.spawn(self.auditor.follow(self.rest), "rest")
            tasks.spawn(m.keep_valid(self.ask_for_coordinator), "admission")
        if self.trainer is not None and m.client is not None:
            tasks.spawn(self.end_of_run.run(self.ask_for_coordinator, self._leave_because), "end of the run")
        tasks.spawn(network.discover(), "discovery")
        tasks.spawn(network.keep_running(), "swarm")
        tasks.spawn(pass_on(network, m.locator), "coordinator address")
        finished = await self.driver.start(alone=not m.addresses)
        if finished is None:
            self._started.set()
            if self.trainer is not None:
                tasks.spawn(self._follow_rest(self.trainer), "rest")
            finished = await self.driver.run()
        self.must_restart = finished.again
        if not self._leaving:
            log.warning("%s", finished.reason)
        self._finish(finished.reason)

    async def _follow_rest(self, trainer: TrainerClient) -> None:
        """Rest while there is a reason to, and train otherwise, until cancelled."""
        rests = False
        trainer.hold(bool(self.rest.reason))  # the reason may have come or gone since the trainer began
        while True:
            reason = self.rest.reason
            if reason and not rests:
                log.info("resting: %s", reason)
                trainer.hold(True)
                self.driver.post(events.Rest())
            elif not reason and rests:
                log.info("training again")
                trainer.hold(False)
                self.driver.post(events.Resume())
            rests = bool(reason)
            await self.rest.wait_for_news()

    async def _introduce(self) -> None:
        """Send heartbeats while the run's data come, so that members serve us as one of theirs. Until cancelled."""
        while True:
            await self.driver.introduce()
            await asyncio.sleep(self.membership.spec.round.heartbeat_seconds)

    async def _stop(self) -> None:
        """Stop all parts in order, whatever fails: the trainer saves, queued messages are sent, sockets are closed."""
        self.tasks.stop_reporting()
        async with AsyncExitStack() as last_first:
            last_first.callback(self.reporter.write)
            last_first.push_async_callback(self.network.stop)
            last_first.push_async_callback(self.tasks.cancel)
            if self.trainer is not None:
                saved = await self.trainer.stop()
                log.info("the trainer has saved its state" if saved else "the trainer left without saving")
                if self._leaving and self.chain.head != self.chain.root:
                    await serve_coordinator(self.network, self.chain.certificate(self.chain.head))

    # -- for the rest of the process -------------------------------------------------------------------------

    def post(self, event: events.Event) -> None:
        self.driver.post(event)

    async def ask_for_coordinator(self) -> None:
        """Ask members for a newer address of the coordinator; the membership's locator keeps it."""
        await ask_members(self.network, self.membership.locator, self.membership.spec.run_id)

    async def keep_checkpoint(self, state: Digest) -> None:
        """Keep a checkpoint that was fetched into the store, and prune the store. Raises StoreError.

        An observer has no trainer that would do so.
        """
        self.retention.protect_state(state)
        await self.retention.prune()

    @property
    def machine(self) -> RoundMachine:
        """The round machine: to be read only."""
        return self.driver.machine

    @property
    def chain(self) -> Chain:
        """The tree of records: to be read only."""
        return self.certificates.chain

    @property
    def store(self) -> Store:
        return self.membership.store

    def snapshot(self) -> Snapshot:
        return self.reporter.snapshot()
