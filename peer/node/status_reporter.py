"""Reports of a node about itself: to its machine for heartbeats, to the terminal, and as `status.json`."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from peer.node.device_work import DeviceWork
from peer.node.directive_handler import DirectiveHandler
from peer.node.end_of_run import EndOfRun
from peer.node.enrollment import Enrollment
from peer.node.events import NodeEvents, RunOver
from peer.node.network import Network
from peer.node.rate_meter import RateMeter
from peer.node.round_timings import RoundTimings
from peer.node.snapshot import Snapshot, write_snapshot
from peer.node.trainer_client import NO_PROGRESS, TrainerClient
from peer.store import Store, StoreError
from protocol.errors import os_reason
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import LocalStatus

log = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 1.0

GOODBYE = "goodbye"
"""Name of the value in the store."""


def last_goodbye(store: Store) -> int:
    """Return the sequence of our last goodbye; 0 when none is stored. Raises StoreError."""
    text = (store.read_value(GOODBYE) or b"").decode(errors="replace")
    return int(text) if text.isdigit() else 0


def store_goodbye(store: Store, sequence: int) -> None:
    """Store the sequence of a goodbye. A failure is logged: the peer leaves all the same."""
    try:
        store.write_value(GOODBYE, str(sequence).encode())
    except StoreError as e:
        log.warning(
            "the number of the goodbye was not kept: %s. If this machine's clock is set back before the next start, "
            "others ignore this peer until the clock has passed the present time",
            e,
        )


def local_status(
    membership: Enrollment,
    network: Network,
    trainer: TrainerClient | None,
    end: EndOfRun,
    *,
    goodbye: int,
    is_peer: bool,
    shows_device: bool,
) -> LocalStatus:
    """Return the part of our heartbeats that the machine does not know. An observer (`is_peer` False) has no admission.

    `goodbye`: the sequence of our last one. Others ignore heartbeats that are not newer, as they would be if the clock
    was set back since. `shows_device`: whether they name the kind of our device.
    """
    return LocalStatus(
        sequence=max(int(time.time() * 1000), goodbye + 1),
        bytes_up=network.bytes_up,
        bytes_down=network.bytes_down,
        addresses=tuple(network.addresses),
        admission=membership.admission if is_peer else b"",
        device=trainer.device if trainer is not None and shows_device else "",
        unreachable=network.relay.unreachable(),
        is_awaited=end.is_awaited,
    )


@dataclass(eq=False)
class StatusReporter:
    """The one place where a `Snapshot` is made; every other view of a peer is derived from it or from heartbeats."""

    membership: Enrollment
    folder: Path
    network: Network
    machine: RoundMachine
    directives: DirectiveHandler
    timings: RoundTimings
    work: DeviceWork
    bus: NodeEvents

    def __post_init__(self) -> None:
        self._finish_reason = ""
        self.bus.subscribe(RunOver, self._note_end)
        self._write_failed = False
        self._up, self._down = RateMeter(), RateMeter()
        self.latest = self.snapshot()
        """A snapshot of at most SNAPSHOT_SECONDS ago, for other threads: they must not access the node itself."""

    def _note_end(self, event: RunOver) -> None:
        self._finish_reason = self._finish_reason or event.reason

    def snapshot(self) -> Snapshot:
        now = time.monotonic()
        view = self.machine.summary(now)
        spec, network, work = self.membership.spec, self.network, self.work
        t, auditor = work.trainer, work.auditor
        progress = NO_PROGRESS if t is None else t.progress
        window = spec.data.window_tokens
        same = [m.heartbeat.windows for m in view.members if m.heartbeat.head == view.head]
        return Snapshot(
            run=spec.name,
            name=self.membership.name,
            peer=str(self.membership.identity.key),
            phase=view.phase,
            round=view.round,
            head=str(view.head),
            state=str(view.state or ""),
            state_round=view.round,
            accepted_tokens=view.weight * window,
            total_tokens=spec.total_tokens,
            round_tokens=(sum(same) + progress.windows) * window,
            target_tokens=self.directives.target_tokens,
            loss=progress.loss,
            tokens_per_second=progress.tokens_per_second,
            members=len(view.members),
            bytes_up=network.bytes_up,
            bytes_down=network.bytes_down,
            device="" if t is None else t.device,
            own_updates=0 if t is None else t.made,
            missed_updates=0 if t is None else t.missed,
            exchange_seconds=asdict(self.timings.times),
            exchange_rounds=[asdict(r) for r in self.timings.rounds],
            trainer_restarts=0 if t is None else t.restarts,
            finished=self._finish_reason,
            mfu=progress.mfu,
            memory_used=progress.memory.used if progress.memory else 0,
            memory_whole=progress.memory.whole if progress.memory else 0,
            time_shares=asdict(progress.spent) if progress.spent else {},
            trained_windows=0 if t is None else t.trained,
            open_windows=progress.windows,
            is_waiting=progress.waiting,
            next_window=progress.next_window,
            orders=self.directives.description,
            rest=work.rest.reason,
            devices_free=work.rest.is_free,
            audits=asdict(auditor.counts) | {"waiting": auditor.waiting} if auditor else {},
            swarm_tokens_per_second=sum(m.heartbeat.tokens_per_second for m in view.members)
            + progress.tokens_per_second,
            round_seconds_left=view.seconds_left,
            up_per_second=round(self._up.note(network.bytes_up, now), 1),
            down_per_second=round(self._down.note(network.bytes_down, now), 1),
            last_update=view.fate,
            downloads=network.downloads.under_way(),
        )

    async def keep_writing(self) -> None:
        """Write the status file every SNAPSHOT_SECONDS, until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(SNAPSHOT_SECONDS)

    def write(self) -> None:
        """Write the status file. A failure is logged once."""
        self.latest = self.snapshot()
        try:
            write_snapshot(self.folder, self.latest)
            self._write_failed = False
        except OSError as e:
            if not self._write_failed:
                log.warning("status.json is not written: %s", os_reason(e))
            self._write_failed = True
