"""One member of one run, from its start to its end. `builder.build_node` puts its parts together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from peer.node.blob_retention import BlobRetention
from peer.node.coordinator_discovery import ask_members, pass_on
from peer.node.device_work import DeviceWork
from peer.node.driver import RoundDriver
from peer.node.end_of_run import EndOfRun
from peer.node.enrollment import Enrollment
from peer.node.events import NodeEvents, RunOver
from peer.node.last_member import serve_coordinator
from peer.node.network import Network
from peer.node.request_server import RequestServer
from peer.node.snapshot import Snapshot
from peer.node.status_reporter import StatusReporter
from peer.node.tasks import Tasks, cancel_and_wait
from peer.store import Store
from protocol.chain import Chain
from protocol.ids import Digest
from protocol.messages import Certificate
from protocol.rounds import events
from protocol.rounds.consensus import MAX_LEAVE_SECONDS
from protocol.rounds.machine import RoundMachine

log = logging.getLogger(__name__)

HARD_STOP_SECONDS = MAX_LEAVE_SECONDS + 4.0
"""Seconds after `leave` when the node ends even if its machine has not said goodbye, which is late by then."""


@dataclass(eq=False)
class Node:
    """One member of one run, or an observer of it. `run` returns when the run is over, or after `leave`."""

    membership: Enrollment
    network: Network
    retention: BlobRetention
    work: DeviceWork
    driver: RoundDriver
    requests: RequestServer
    reporter: StatusReporter
    end_of_run: EndOfRun
    bus: NodeEvents
    tasks: Tasks
    must_restart: bool = field(default=False, init=False)
    """True when the node must be built and run again: a rollback goes further back than its memory, or a run that was
    over here goes on."""

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
        m, tasks, network, work = self.membership, self.tasks, self.network, self.work
        await network.start(self.requests.handlers())
        tasks.spawn(self.reporter.keep_writing(), "status file")
        tasks.spawn(network.keep_running(), "swarm")
        tasks.spawn(network.discover(), "discovery")
        tasks.spawn(pass_on(network, m.locator), "coordinator address")
        if not work.is_observing:
            tasks.spawn(m.keep_valid(self.ask_for_coordinator), "admission")
            introduction = tasks.spawn(self._introduce(), "introduction")
            await work.begin(network)  # for hours, if the run has much data
            await cancel_and_wait([introduction])
        if work.trainer is not None and m.client is not None:
            tasks.spawn(self.end_of_run.run(self.ask_for_coordinator, self._leave_because), "end of the run")
        finished = await self.driver.start(alone=not m.addresses)
        if finished is None:
            self._started.set()
            work.follow_rest()
            finished = await self.driver.run()
        self.must_restart = finished.again
        if not self._leaving:
            log.warning("%s", finished.reason)
        self._finish(finished.reason)

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
            await self.work.stop()
            if self.work.trainer is not None and self._leaving and self.chain.head != self.chain.root:
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
        return self.machine.chain

    async def older_certificates_after(self, record: Digest, limit: int) -> Sequence[Certificate] | None:
        """Return what follows a record that the tree has dropped at its root (see `ChainStore.certificates_after`)."""
        return await self.requests.certificates.certificates_after(record, limit)

    @property
    def store(self) -> Store:
        return self.membership.store

    def snapshot(self) -> Snapshot:
        return self.reporter.snapshot()
