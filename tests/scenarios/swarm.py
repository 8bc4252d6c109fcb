"""A scenario's coordinator and peers, each on its host. The files of all are on this machine, as in tests/e2e."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.convergence.wan_run_file import toml
from cairn.demo.processes import Process
from coordinator.authoring.resolve import GENESIS, SPEC
from coordinator.authoring.toml_file import tomllib
from peer.keyfile import load_or_make
from peer.node.snapshot import FILE, Snapshot
from protocol.identity import parse_key_file
from protocol.ids import PeerKey
from protocol.invite import Invite
from tests.e2e.world import LIMIT, World
from tests.scenarios.history import make_history
from tests.scenarios.script import HOME, Scenario
from tests.wan.namespaces import sh
from tests.wan.testbed import Wan
from tests.wan.topology import WanError

GRPC, PAGE, SWARM = 7100, 7200, 7300

TIMERS = {"exchange_seconds": 5, "patience_seconds": 5, "member_seconds": 3}
"""Shorter than in tests/e2e: scenarios also judge how soon a swarm gets over a fault."""

CLOCK = Path(__file__).with_name("clock.c")


class Swarm(World):
    """Use with `with`, inside of the `Wan`'s."""

    def __init__(self, scenario: Scenario, wan: Wan):
        super().__init__(target_tokens=32_768, tables={"round": {"max_seconds": 20, "max_update_tokens": 65_536}})
        self.scenario = scenario
        self.wan = wan
        self.grpc, self.page, self.swarm = GRPC, PAGE, SWARM
        tables = tomllib.loads(self.run_file.read_text())
        tables["round"] |= TIMERS
        for name, table in scenario.run.items():
            tables[name] = {**tables.get(name, {}), **table}
        if founders := tables.get("admission", {}).get("founders"):
            keys = [load_or_make(self.folder / host / "identity.key").key for host in founders]
            tables["admission"]["founders"] = sorted(str(key) for key in keys)
        self.run_file.write_text(toml(tables))
        self._clock = self.folder / "clock.so"
        if any(h.clock for h in scenario.hosts):
            sh("gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", str(self._clock), str(CLOCK), "-ldl")
        self._mounted: list[Path] = []
        self.old_invite: Invite | None = None
        """The one before the coordinator moved."""
        self._born: dict[str, float] = {}

    def __enter__(self) -> Swarm:
        super().__enter__()
        return self

    def __exit__(self, *given: object) -> None:
        for pid in self._frozen():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        super().__exit__(*given)
        for place in self._mounted:
            subprocess.run(["umount", "-l", str(place)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _frozen(self) -> list[int]:
        with suppress(WanError):
            return [pid for host in self.wan.topology.hosts for pid in self.wan.pids(host)]
        return []

    # -- processes -------------------------------------------------------------------------------------------

    def start_coordinator(self) -> Process:
        ip = self.wan.host(HOME).ip
        return self._on(
            HOME, "coordinator",
            "coordinator", "serve", str(self.run_file), "--home", str(self.folder / "coordinator"),
            "--grpc", f"{ip}:{self.grpc}", "--page", f"{ip}:{self.page}", "--swarm", f"/ip4/{ip}/tcp/{self.swarm}",
            "--evaluate-every", "0",
        )  # fmt: skip

    def start_peer(
        self, name: str, *, device: str = "cpu", parallel: str = "auto", invite: Invite | None = None
    ) -> Process:
        """Start a peer as a volunteer would, without any addresses."""
        host = next(h for h in self.scenario.hosts if h.name == name)
        environment = {}
        if host.clock:
            environment = {"LD_PRELOAD": str(self._clock), "CLOCK_AHEAD": str(round(host.clock))}
        return self._on(
            name, name,
            "peer", "join", str(invite or self.invite), "--home", str(self.folder / name), "--name", name,
            "--threads", "1", "--device", device, "--parallel", parallel, "--plain",
            "--audit-device", "cpu" if host.audits else "off",
            environment=environment,
            module=(
                "tests.scenarios.faulty" if host.faulty else "tests.e2e.lying_peer" if host.liar else "cairn"
            ),
        )  # fmt: skip

    def _on(
        self,
        host: str,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        module: str = "cairn",
    ) -> Process:
        within = self.wan.command(host, [])
        process = Process(name, arguments, self.folder, within=within, environment=environment, module=module)
        self._born[name] = time.time()
        self.processes[name] = process
        self.started.append(process)
        return process

    async def coordinator_ready(self) -> None:
        process = self.processes["coordinator"]
        probe = f"</dev/tcp/{self.wan.host(HOME).ip}/{self.grpc}"

        def answers() -> bool:
            assert process.running, self.logs("coordinator")
            there = self.wan.command(HOME, ["bash", "-c", probe])
            return self._began and not subprocess.run(there, capture_output=True, check=False).returncode

        await self.until("the coordinator answers", answers, LIMIT, every=0.5)

    def move_coordinator(self) -> None:
        """Move the coordinator to other ports for its next start."""
        self.old_invite = self.old_invite or self.invite
        self.grpc += 1
        self.swarm += 1

    def status_on(self, host: str) -> dict[str, Any]:
        """Return the output of `cairn status` on a host. Raises CalledProcessError."""
        invite = str(self.old_invite or self.invite)
        command = self.wan.command(host, [sys.executable, "-m", "cairn", "status", invite, "--json"])
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT)
        return json.loads(done.stdout)

    def make_history(self, names: Sequence[str], rounds: int) -> None:
        """Make the run's past, with these peers in it. Before they are started, and when the coordinator is there."""
        run = self.coordinator_home / "run"
        envelope, genesis = (run / SPEC).read_bytes(), (run / GENESIS).read_bytes()
        make_history(self.spec, envelope, genesis, self.owner, {n: self.folder / n for n in names}, rounds)

    # -- what is done to hosts -------------------------------------------------------------------------------

    def shown(self, name: str) -> Snapshot | None:
        """Return the status of a running peer in this life."""
        with suppress(OSError):
            if self._born.get(name, 0.0) <= (self.peer_folder(name) / FILE).stat().st_mtime:
                return self.snapshot(name)
        return None

    def alive(self, name: str) -> str:
        """Return the name. Fail with the end of its log if the peer has ended."""
        assert self.processes[name].running, f"{name} has ended\n{self.logs(name)}"
        return name

    def age(self, name: str) -> float:
        """Return the seconds since a peer's last status."""
        return time.time() - (self.peer_folder(name) / FILE).stat().st_mtime

    def arriving(self, name: str) -> int:
        """Return the size of the largest blob that a peer is fetching now, in bytes; 0 if there is none."""
        sizes = [0]
        for path in (self.peer_folder(name) / "store" / "partial").glob("*"):
            with suppress(OSError):
                sizes.append(path.stat().st_size)
        return max(sizes)

    def running(self) -> list[str]:
        """Peers whose process runs."""
        return [n for n in self.scenario.peers if n in self.processes and self.processes[n].running]

    def power_off(self, host: str) -> None:
        self.wan.kill(host)
        with suppress(KeyError):
            self.processes["coordinator" if host == HOME else host].wait(LIMIT)

    def power_on(self, host: str) -> None:
        """Restore a host's link after a power cut; its processes must be started."""
        self.wan.heal(host)

    def signal(self, host: str, number: int) -> None:
        for pid in self.wan.pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def tear(self, name: str) -> str:
        """Cut off the end of the largest blob in a peer's store, as after a power cut; return its name."""
        blobs = [p for p in (self.peer_folder(name) / "store" / "blobs").rglob("*") if p.is_file()]
        torn = max(blobs, key=lambda p: (p.stat().st_size, p.stat().st_mtime))
        os.truncate(torn, torn.stat().st_size // 2)
        return torn.name

    def fill_disk(self, name: str) -> None:
        """Make a peer's home a disk without free space."""
        home, copy = self.folder / name, self.folder / f"{name}.copy"
        home.rename(copy)
        home.mkdir()
        used = sum(p.stat().st_size + 4096 for p in copy.rglob("*"))
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={used + 65536}", "full", str(home)], check=True)
        self._mounted.append(home)
        shutil.copytree(copy, home, dirs_exist_ok=True)

    # -- what they show --------------------------------------------------------------------------------------

    def key_of(self, name: str) -> PeerKey | None:
        """Return a peer's key; None before it has made one."""
        file = self.folder / name / "identity.key"
        return parse_key_file(file.read_text()).key if file.exists() else None

    def printed(self, name: str, pattern: str) -> bool:
        process = self.processes.get(name)
        return process is not None and re.search(pattern, process.output.read_text(errors="replace")) is not None
