"""The demo's processes: started with their output in files, watched, and gone when the demo is."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from protocol.errors import CairnError

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
"""Loaded here: between fork and exec as little as possible is done."""


class Process:
    """One `cairn` command (`module`: by another one). `within`: a command that runs it, such as nsenter; `environment`
    is added to ours."""

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
        self.name = name
        self.home = folder / name
        self.home.mkdir(parents=True, exist_ok=True)
        self.output = self.home / "output.txt"
        with open(self.output, "wb") as out:
            self._process = subprocess.Popen(
                [*within, sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(environment or {})},
                # A Ctrl-C is for the demo, which then stops its processes in order.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def last_words(self, lines: int = 6) -> str:
        """The end of what it printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, as a power cut would."""
        self._process.kill()
        self._process.wait()

    def ask_to_stop(self) -> None:
        if self.running:
            self.signal(signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within this time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def stop_all(processes: Sequence[Process], seconds: float = 15.0) -> None:
    """Ask all to stop, then kill those that did not."""
    for p in processes:
        p.ask_to_stop()
    end = time.monotonic() + seconds
    for p in processes:
        if not p.wait(max(0.1, end - time.monotonic())):
            p.kill()


def free_ports(n: int) -> list[int]:
    """Ports of loopback that are free now."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def wait_for_file(path: Path, process: Process, seconds: float) -> str:
    """The content of a file that a process is to write. Raises CairnError when it does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text().strip()):
            return text
        if not process.running:
            raise CairnError(f"the {process.name} ended (code {process.code}):\n{process.last_words()}")
        time.sleep(0.1)
    raise CairnError(f"the {process.name} was not ready within {seconds:.0f} s:\n{process.last_words()}")


def serve(run_file: Path, folder: Path) -> tuple[Process, str]:
    """A coordinator of this run on free ports of loopback, with its home in folder/coordinator; its page's address."""
    grpc, page, swarm = free_ports(3)
    process = Process(
        "coordinator",
        ["coordinator", "serve", str(run_file), "--home", str(folder / "coordinator"),
         "--grpc", f"127.0.0.1:{grpc}", "--page", f"127.0.0.1:{page}", "--swarm", f"/ip4/127.0.0.1/tcp/{swarm}"],
        folder,
    )  # fmt: skip
    return process, f"http://127.0.0.1:{page}/"


def _die_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
