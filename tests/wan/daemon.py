"""The daemon of an emulated internet: it builds the namespaces, runs the router for its time, and removes everything.

A process of its own (`python -m tests.wan serve NAME SECONDS`), so that whatever becomes of those who asked for it, the
namespaces and what runs in them are gone when its time is over.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.wan.namespaces import build, remove_all, sh, tcp_allowed
from tests.wan.topology import Topology

SOURCE = Path(__file__).with_name("router.c")
CONTROL, TOPOLOGY, LOG = "control", "topology.json", "log"


def folder(wan: str) -> Path:
    """Return the files that the daemon shares with its clients: a socket, the topology, a log."""
    return Path(f"/run/{wan}.wan")


def serve(wan: str, seconds: float) -> None:
    """Run until the router ends (by a command, or after its time) or SIGTERM comes. Raises WanError."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what follows is cleaned up
    router: subprocess.Popen[bytes] | None = None
    work = tempfile.mkdtemp(prefix="cairn-wan-")
    try:
        program = f"{work}/router"
        sh("gcc", "-O2", "-Wall", "-o", program, str(SOURCE))
        topology = Topology.parse(json.loads((folder(wan) / TOPOLOGY).read_text()))
        arguments: list[object] = []
        tuns: list[int] = []
        with tcp_allowed(topology.tcp):
            for h in topology.hosts.values():
                tuns.append(build(wan, h, topology))
                arguments += [tuns[-1], h.ip, h.up, h.down, h.up_queue, h.down_queue]
        control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        control.bind(str(folder(wan) / CONTROL))
        router = subprocess.Popen(
            [program, *map(str, [control.fileno(), seconds, topology.seed, *arguments])],
            pass_fds=[control.fileno(), *tuns],
        )
        try:  # keeps delays right when the hosts use every core
            os.sched_setscheduler(router.pid, os.SCHED_RR, os.sched_param(1))
        except OSError:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, router.pid, -20)
        router.wait()
    finally:
        if router:
            router.kill()
        remove_all(wan)
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(folder(wan), ignore_errors=True)
