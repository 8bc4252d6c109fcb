"""Reports of a node about itself: to its machine for heartbeats, to the terminal, and as `status.json`."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict

from peer.node.directive_handler import DirectiveHandler
from peer.node.events import NodeEvents, RunOver
from peer.node.membership import Membership
from peer.node.network import Network
from peer.node.options import NodeOptions
from peer.node.round_timings import RoundTimings
from peer.node.snapshot import Snapshot, write_snapshot
from peer.node.tasks import repeat
from peer.node.trainer_client import TrainerClient
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import LocalStatus

log = logging.getLogger("peer.node")

SNAPSHOT_SECONDS = 1.0


def local_status(membership: Membership, network: Network, trainer: TrainerClient | None) -> LocalStatus:
    """Return the part of our heartbeats that the machine does not know. An observer has no trainer."""
    return LocalStatus(
        sequence=int(time.time() * 1000),
        bytes_up=network.bytes_up,
        bytes_down=network.bytes_down,
        addresses=tuple(network.addresses),
        admission=b"" if trainer is None else membership.admission,
        device="" if trainer is None else trainer.device,
        unreachable=network.unreachable(),
    )


class StatusReporter:
    """The one place where a `Snapshot` is made; every other view of a peer is derived from it or from heartbeats."""

    def __init__(
        self,
        membership: Membership,
        options: NodeOptions,
        network: Network,
        machine: RoundMachine,
        directives: DirectiveHandler,
        timings: RoundTimings,
        trainer: TrainerClient | None,
        observers: NodeEvents,
    ):
        self._membership = membership
        self._folder = options.folder
        self._network = network
        self._machine = machine
        self._directives = directives
        self._timings = timings
        self._trainer = trainer
        self._finish_reason = ""
        observers.subscribe(RunOver, self._note_end)
        self._write_failed = False
        self._latest = self.snapshot()

    @property
    def latest(self) -> Snapshot:
        """A snapshot of at most SNAPSHOT_SECONDS ago, for other threads: they must not access the node itself."""
        return self._latest

    def _note_end(self, event: RunOver) -> None:
        self._finish_reason = self._finish_reason or event.reason

    def snapshot(self) -> Snapshot:
        """Return the present state of the node."""
        view = self._machine.summary(time.monotonic())
        spec, t, network = self._membership.spec, self._trainer, self._network
        window = spec.data.window
        same = [m.heartbeat.windows for m in view.members if m.heartbeat.head == view.head]
        return Snapshot(
            run=spec.name,
            name=self._membership.name,
            peer=str(self._membership.identity.key),
            phase=view.phase,
            round=view.round,
            head=str(view.head),
            state=str(view.state or ""),
            state_round=view.round,
            accepted_tokens=view.weight * window,
            total_tokens=spec.total_tokens,
            round_tokens=(sum(same) + (t.progress.windows if t is not None else 0)) * window,
            target_tokens=self._directives.target_tokens,
            loss=t.progress.loss if t is not None else 0.0,
            tokens_per_second=t.progress.tokens_per_second if t is not None else 0.0,
            members=len(view.members),
            bytes_up=network.bytes_up,
            bytes_down=network.bytes_down,
            device=t.device if t is not None else "",
            own_updates=t.made if t is not None else 0,
            missed_updates=t.missed if t is not None else 0,
            exchange_seconds=asdict(self._timings.times),
            exchange_rounds=[asdict(r) for r in self._timings.rounds],
            trainer_restarts=t.restarts if t is not None else 0,
            finished=self._finish_reason,
            mfu=t.progress.mfu if t is not None else None,
            memory_used=t.progress.memory.used if t is not None and t.progress.memory else 0,
            memory_whole=t.progress.memory.whole if t is not None and t.progress.memory else 0,
            time_shares=asdict(t.progress.spent) if t is not None and t.progress.spent else {},
            trained_windows=t.trained if t is not None else 0,
            open_windows=t.progress.windows if t is not None else 0,
            next_window=t.progress.next_window if t is not None else 0,
            orders=self._directives.description,
        )

    async def keep_writing(self) -> None:
        """Write the status file every SNAPSHOT_SECONDS, until cancelled."""

        async def write() -> float:
            self.write()
            return SNAPSHOT_SECONDS

        await repeat(write)

    def write(self) -> None:
        """Write the status file. A failure is logged once."""
        self._latest = self.snapshot()
        try:
            write_snapshot(self._folder, self._latest)
            self._write_failed = False
        except OSError as e:
            if not self._write_failed:
                log.warning("status.json is not written: %s", (e.strerror or str(e)).lower())
            self._write_failed = True
