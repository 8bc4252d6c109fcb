"""Real processes on the hosts of an emulated internet, for benchmarks: started, counted, and gone at the end.

`over_wan` (Cairn's own processes) and `rival_hivemind` share this module. Everything that a process writes lies in one
temporary folder, which goes with it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cairn.demo.processes import Running, stop_all
from protocol.errors import CairnError
from tests.wan import Topology, Wan, WanError

NICENESS = -10
"""Of a process, and of its session: Linux may share the cores by session (autogroup in sched(7))."""

_TICKS = os.sysconf("SC_CLK_TCK")


class BenchError(CairnError):
    """The benchmark cannot be run here, or what it runs has failed; says why."""


@dataclass(frozen=True)
class Wire:
    """IP bytes that left a host and that reached it."""

    up: int
    down: int

    def __sub__(self, other: Wire) -> Wire:
        return Wire(self.up - other.up, self.down - other.down)


class Hosts:
    """An emulated internet and what runs on it; see `hosts`."""

    def __init__(self, wan: Wan, folder: Path):
        self.wan = wan
        self.folder = folder
        self.running: list[Running] = []
        self.temporary = folder / "tmp"
        self.temporary.mkdir()

    def start(self, host: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Running:
        """Run a command on a host. It ends when this process does, and its temporary files are in the folder."""
        output = self.folder / f"{host}-{len(self.running)}.txt"
        given = {"TMPDIR": str(self.temporary), **(environment or {})}
        self.running.append(Running(host, self.wan.command(host, command), output, given))
        return self.running[-1]

    def ip(self, host: str) -> str:
        return self.wan.host(host).ip

    def wire(self) -> dict[str, Wire]:
        """Bytes on each host's line so far."""
        return {name: Wire(c.tx_bytes, c.rx_bytes) for name, c in self.wan.counters().hosts.items()}

    def cpu_seconds(self, host: str) -> dict[str, float]:
        """CPU time so far of the processes that run on a host now, by what they are."""
        found: dict[str, float] = {}
        for pid in self.wan.pids(host):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            kind = claimed_kind(command)
            found[kind] = found.get(kind, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS
        return found

    def prefer(self) -> None:
        """Give the processes on the hosts priority over other work on the machine, which should not be measured."""
        for name in self.wan.topology.hosts:
            for pid in self.wan.pids(name):
                with suppress(OSError):  # it has just ended, or this kernel does not group by session
                    os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
                    Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))

    def check(self) -> None:
        """Raise BenchError if a process has failed."""
        for process in self.running:
            if process.code not in (None, 0):
                raise BenchError(f"{process.name} ended with code {process.code}:\n{process.last_words()}")

    def until(self, what: str, look: Callable[[], bool], seconds: float, every: float = 0.1) -> None:
        """Wait for something. Raises BenchError when it does not come in time, or a process fails."""
        end = time.monotonic() + seconds
        while not look():
            self.check()
            if time.monotonic() > end:
                words = "\n".join(f"--- {p.name}\n{p.last_words()}" for p in self.running)
                raise BenchError(f"not within {seconds:.0f} s: {what}\n{words}")
            time.sleep(every)


def claimed_kind(command: str) -> str:
    """Return the kind of a process, from its command line: trainer, daemon (libp2p's), or node."""
    if "peer.training" in command or "stand_in" in command:
        return "trainer"
    return "daemon" if "p2pd" in command.split(" ", 1)[0] or "watchdog" in command else "node"


@contextmanager
def hosts(topology: Topology, *, ttl: float, keep: Path | None = None) -> Iterator[Hosts]:
    """Make an emulated internet with its own name, and a folder that is removed unless it is `keep`.

    Raises BenchError.
    """
    folder = keep or Path(tempfile.mkdtemp(prefix="cairn-wan-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BenchError(f"{folder} is not empty: name a folder that is, or does not exist, to keep logs in")
    try:
        with Wan(topology, name=f"b{os.getpid()}", ttl=ttl) as wan:
            world = Hosts(wan, folder)
            try:
                yield world
            finally:
                stop_all(world.running)
    except WanError as e:
        raise BenchError(f"no emulated internet: {e}") from None
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
