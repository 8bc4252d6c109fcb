"""The demo's processes: started with their output in files, watched, and stopped with the demo."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from peer.parent_process import exit_with_parent
from protocol.errors import CairnError
from protocol.python_command import python_command

FIRST_PORT = 10_000
"""The least port that `free_ports` returns."""

PORT_TRIES = 512
"""Ports that `free_ports` looks at."""


LAST_LINES = 6
"""Lines of a process's output that an error shows."""

STOP_SECONDS = 15.0
"""A process that was asked to stop is killed after this time."""


class Running:
    """A command that runs; its output is in a file. `environment` is added to this process's own."""

    def __init__(self, name: str, command: Sequence[str], output: Path, environment: Mapping[str, str] | None = None):
        self.name = name
        self.output = output
        with open(output, "wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(environment or {})},
                # Only the demo receives a Ctrl-C; it then stops its processes in order.
                start_new_session=True,
                preexec_fn=partial(exit_with_parent, number=signal.SIGTERM),
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def last_words(self) -> str:
        """Return the last lines of its output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-LAST_LINES:])

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process with SIGKILL, as a power cut would."""
        self._process.kill()
        self._process.wait()

    def ask_to_stop(self) -> None:
        if self.running:
            self.signal(signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Wait for its end; return whether it came within this time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


class Process(Running):
    """One `cairn` command, or another Python `module`. `within` is a command that runs it, such as nsenter."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        *,
        within: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        module: str = "cairn",
    ):
        self.home = folder / name
        self.home.mkdir(parents=True, exist_ok=True)
        command = [*within, *python_command(module, *arguments)]
        super().__init__(name, command, self.home / "output.txt", environment)


def stop_all(processes: Sequence[Running]) -> None:
    """Ask all processes to stop, then kill those that are still running."""
    for p in processes:
        p.ask_to_stop()
    end = time.monotonic() + STOP_SECONDS
    for p in processes:
        if not p.wait(max(0.1, end - time.monotonic())):
            p.kill()


def free_ports(n: int) -> list[int]:
    """Return ports of loopback that are free now. Raises CairnError.

    They are below those that the system gives to outgoing connections: one of these could have the port before the
    process that it is for, which may start seconds later.
    """
    found: dict[int, None] = {}
    for port in random.SystemRandom().sample(range(FIRST_PORT, _first_ephemeral_port()), PORT_TRIES):
        if len(found) == n:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found[port] = None
    if len(found) < n:
        raise CairnError("this machine has no free ports on 127.0.0.1: stop other programs that listen there")
    return list(found)


def _first_ephemeral_port() -> int:
    """Return the first port that the system gives to outgoing connections; Linux's default where it is not known."""
    with contextlib.suppress(OSError, ValueError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        return max(first, FIRST_PORT + PORT_TRIES)
    return 32_768


def wait_for_file(path: Path, process: Process, seconds: float) -> str:
    """Return the content of a file that a process writes. Raises CairnError if it does not appear in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text().strip()):
            return text
        if not process.running:
            raise CairnError(f"the {process.name} ended (code {process.code}):\n{process.last_words()}")
        time.sleep(0.1)
    raise CairnError(f"the {process.name} was not ready within {seconds:.0f} s:\n{process.last_words()}")


def serve(run_file: Path, folder: Path) -> tuple[Process, str]:
    """Start a coordinator on free ports of loopback, with its home in folder/coordinator.

    Return the process and the address of its page.
    """
    grpc, page, swarm = free_ports(3)
    process = Process(
        "coordinator",
        ["coordinator", "serve", str(run_file), "--home", str(folder / "coordinator"),
         "--grpc", f"127.0.0.1:{grpc}", "--page", f"127.0.0.1:{page}", "--swarm", f"/ip4/127.0.0.1/tcp/{swarm}"],
        folder,
    )  # fmt: skip
    return process, f"http://127.0.0.1:{page}/"
