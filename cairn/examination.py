"""The examination of a machine for `cairn peer doctor`: all measurements, then the findings in their order."""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import async_timeout

from cairn import __version__
from cairn.connection import connect
from cairn.peer_screen import page_address
from cairn.visibility import seen_in_a_line
from coordinator.checkpoints.archive import MODEL
from coordinator.checkpoints.copies import file_reader
from peer.channel import MomentForm
from peer.coordinator_client import WrongClock
from peer.doctor import links, pace
from peer.doctor.clock import clock_finding
from peer.doctor.device import device_finding, files_finding, memory_finding
from peer.doctor.device_process import try_device
from peer.doctor.disk import disk_finding, files_room, state_bytes, to_save
from peer.doctor.findings import DoctorFinding, Verdict, verdict_of
from peer.doctor.measurements import DownloadProbe, Trial
from peer.doctor.probes import DiskSpace, dial, disk_space, own_address
from peer.fetched_data import data_bytes
from peer.node.enrollment import run_folder
from peer.node.options import NodeOptions
from protocol.errors import CairnError
from protocol.ids import RunId
from protocol.invite import Invite
from protocol.spec import RunSpec
from protocol.training_memory import round_bytes
from protocol.version import PROTOCOL

LEAST_DOWNLOAD = 10**6
MOST_DOWNLOAD = 32 * 10**6
"""Bytes of a checkpoint between which a download tells a rate."""

DOWNLOAD_SECONDS = 8.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Examined:
    """The machine as `cairn peer join` would use it: its options of the same names."""

    invite: Invite
    home: Path
    disk: int
    private_data: bool
    device: str
    parallel: str
    gpu_memory: int = 0
    """Bytes; 0: all."""
    moments: MomentForm = "fp32"


@dataclass(frozen=True)
class Report:
    """The findings, and the figures of what was measured or computed, for scripts."""

    run: RunId
    findings: tuple[DoctorFinding, ...]
    figures: dict[str, float] = field(default_factory=dict)
    is_over: bool = False
    """The run has nothing left to train; the machine was not examined."""

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.findings)


async def examine(machine: Examined, via: Sequence[str], progress: Progress = lambda text: None) -> Report:
    """Return the report on a machine. A coordinator that does not answer is a finding. Raises CairnError."""
    versions = _versions()
    try:
        async with connect(str(machine.invite), via) as connection:
            info = await connection.client.get_run_again()
            before = time.time()
            status = await connection.client.status()
            if info.over:
                return Report(info.spec.run_id, (versions, links.run_finding(info, status)), is_over=True)
            ahead = (before + time.time()) / 2 - (status.time + 0.5) if status.time else None
            progress("looking at the network")
            reached = await dial(connection.members)
            page, download = page_address(status.page), None
            if page and status.checkpoint is not None:
                download = await measure_download(page, status.checkpoint_round)
    except CairnError as e:
        name = "clock" if isinstance(e, WrongClock) else "run"
        return Report(machine.invite.run, (versions, DoctorFinding(name, "no", str(e))))
    spec, place = info.spec, machine.invite.coordinators[0]
    own = await asyncio.to_thread(own_address, place.host, place.port)
    run = run_folder(machine.home, spec.run_id)
    space = disk_space(run / "store")
    findings = [
        versions, links.run_finding(info, status), clock_finding(ahead), links.reach_finding(reached, own),
        _disk(machine, space, spec, saves := to_save(spec, run / "trainer")),
    ]  # fmt: skip
    room = files_room(
        spec, limit=machine.disk, used=space.used, free=space.free, saves=saves, private_data=machine.private_data
    )
    trial = await _trial(machine, spec, space, room, progress)
    swarm = links.swarm_of(status)
    speed = pace.pace_of(spec, swarm, trial)
    first = data_bytes(spec, private_data=machine.private_data) + state_bytes(spec)
    traffic = pace.traffic_of(spec, swarm, speed, first, private_data=machine.private_data)
    figures = {"members": float(swarm.members), "first_bytes_in": float(first), "exchange_mbits": traffic.mbits}
    figures |= {"bytes_in_an_hour": traffic.in_an_hour, "bytes_out_an_hour": traffic.out_an_hour}
    findings.append(device_finding(trial))
    judged = memory_finding(trial, state_bytes(spec)), files_finding(trial), pace.step_finding(spec, trial, speed)
    findings += filter(None, judged)
    findings += [pace.traffic_finding(traffic), pace.link_finding(traffic, download)]
    if download is not None:
        figures["download_mbits"] = download.mbits
    if speed is not None:
        findings.append(pace.credit_finding(spec, speed))
        figures |= {
            "step_seconds": speed.step_seconds, "tokens_per_second": speed.tokens_per_second,
            "round_seconds": speed.round_seconds, "windows_a_round": speed.windows,
            "micro_credits_an_hour": float(pace.micro_credits_an_hour(spec, speed)),
        }  # fmt: skip
    findings.append(DoctorFinding("seen", "note", f"what others see of a peer: {seen_in_a_line()}"))
    return Report(spec.run_id, tuple(findings), figures)


def _versions() -> DoctorFinding:
    found = {"cairn": __version__, "protocol": str(PROTOCOL), "Python": platform.python_version()}
    found |= {name: version(name) for name in ("torch", "transformers", "hivemind")}
    return links.versions_finding(found)


async def _trial(machine: Examined, spec: RunSpec, space: DiskSpace, room: int, progress: Progress) -> Trial:
    """Return the trial of the device, or why there was none. `room`: bytes of files that the trainer may have."""
    # On the disk of --home if the trainer's files have room there: they would fill a /tmp that lies in memory.
    parent = space.folder if room >= round_bytes(spec.model.layout, spec.outer) else None
    options = NodeOptions(
        machine.home, device=machine.device, parallel=machine.parallel, gpu_memory=lambda: machine.gpu_memory
    )
    share = options.gpu_share(replayable=spec.audit.replayable)
    try:
        with tempfile.TemporaryDirectory(prefix="cairn-doctor-", dir=parent) as folder:
            file = Path(folder) / "spec.json"
            file.write_bytes(spec.canonical())
            return await try_device(
                file, machine.device, machine.parallel, os.cpu_count() or 1, progress, share, machine.moments, room
            )
    except OSError as e:
        return Trial(refused=f"it was not tried, since that takes a file for a minute ({e}): free some of that disk")


def _disk(machine: Examined, space: DiskSpace, spec: RunSpec, saves: int) -> DoctorFinding:
    """Judge the disk of --home, of which nothing need exist yet."""
    if not space.is_writable:
        remedy = "name another folder with --home, or fix this one"
        return DoctorFinding("disk", "no", f"{space.folder} cannot be written to", remedy)
    return disk_finding(
        spec, space.folder, limit=machine.disk, used=space.used, free=space.free, saves=saves,
        private_data=machine.private_data,
    )  # fmt: skip


async def measure_download(page: str, round: int) -> DownloadProbe | None:
    """Return the rate of a piece of the checkpoint of a round from the run's page; None when too little came to tell.

    It takes at most DOWNLOAD_SECONDS.
    """
    read = file_reader(f"{page}checkpoints/round-{round:06d}", redirects=False)
    loop, done, over = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    came: list[tuple[float, int]] = []
    """The time of each chunk, and the bytes until then."""

    def fetch() -> None:
        # An error ends the piece, which counts if it is large enough.
        with suppress(CairnError):
            for chunk in read(MODEL):
                came.append((time.monotonic(), len(chunk) + (came[-1][1] if came else 0)))
                if over.is_set() or came[-1][1] >= MOST_DOWNLOAD:
                    break
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(done.set)

    # A daemon, since a server that stalls must not hold the process.
    threading.Thread(target=fetch, daemon=True).start()
    with suppress(asyncio.TimeoutError):
        async with async_timeout.timeout(DOWNLOAD_SECONDS):
            await done.wait()
    over.set()
    if not came:
        return None
    (began, before), (ended, until) = came[0], came[-1]
    return DownloadProbe(until - before, ended - began) if until - before >= LEAST_DOWNLOAD and ended > began else None
