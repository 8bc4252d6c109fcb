"""`Wan`: an emulated internet for as long as a `with` lasts, and what can be done to it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.wan.daemon import CONTROL, LOG, TOPOLOGY, folder
from tests.wan.namespaces import inside, kill_in, namespace, remove_all, sh
from tests.wan.topology import NAME, Host, Line, Topology, WanError

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 120.0, 60.0, 30.0
TOOLS = {"ip": "iproute2", "nsenter": "util-linux", "sysctl": "procps", "gcc": "gcc"}


def why_not(*, nat: bool = False) -> str:
    """Why there can be no emulated internet here, in one line with the remedy; "" when there can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root: run it as root, or in a container with NET_ADMIN and SYS_ADMIN"
    wanted = TOOLS | ({"nft": "nftables"} if nat else {})
    missing = [package for tool, package in wanted.items() if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install {' '.join(missing)}"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun is missing: load the kernel's tun, or start the container with --device /dev/net/tun"
    probe = f"cairn-probe-{os.getpid()}"
    try:
        sh("ip", "netns", "add", probe)
        sh("ip", "netns", "del", probe)
    except WanError as e:
        return f"network namespaces are refused ({e}): the container lacks SYS_ADMIN"
    return ""


@dataclass(frozen=True)
class HostCounters:
    """IP bytes on a host's line since the start, and packets that did not arrive: lost by chance, or to a full queue.

    `tx_bytes` and `rx_bytes` are of packets that a queue took; TCP's repeats count each time. `stray`: to no host.
    """

    ip: str
    tx_bytes: int
    rx_bytes: int
    packets: int
    lost: int
    overflow: int
    stray: int


@dataclass(frozen=True)
class Counters:
    """`late_ms`: how far behind its time the router was at worst since the last look; above a few ms, do not trust."""

    router_cpu_seconds: float
    late_ms: float
    queued: int
    hosts: dict[str, HostCounters]


class Wan:
    """Use with `with`, or `up` and `down`. After `ttl` seconds it is removed, whatever became of its users.

    `name` (1 to 12 of a-z 0-9) lets several run at once. Nothing is connected to the outside: packets to an address
    that is no host's are dropped. All methods raise WanError.
    """

    def __init__(self, topology: Topology, *, name: str = "wan", ttl: float = 600.0):
        if not NAME.fullmatch(name):
            raise WanError(f"the name {name!r}: want 1 to 12 of a-z 0-9")
        self.topology = topology
        self.name = name
        self.ttl = ttl

    @classmethod
    def running(cls, name: str) -> Wan:
        """One that somebody else has started."""
        try:
            return cls(Topology.parse(json.loads((folder(name) / TOPOLOGY).read_text())), name=name)
        except OSError:
            raise WanError(f"no emulated internet {name!r} runs here: `up` starts one") from None

    def __enter__(self) -> Wan:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Build it; an older one of the same name is removed first."""
        if reason := why_not(nat=any(h.nat for h in self.topology.hosts.values())):
            raise WanError(reason)
        self.down()
        place = folder(self.name)
        place.mkdir(mode=0o700)
        (place / TOPOLOGY).write_text(json.dumps(self.topology.source))
        with open(place / LOG, "wb") as log:
            daemon = subprocess.Popen(
                [sys.executable, "-m", "tests.wan", "serve", self.name, str(self.ttl)],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if daemon.poll() is not None:
                words = (place / LOG).read_text() if (place / LOG).exists() else f"exit code {daemon.returncode}"
                self.down()
                raise WanError(f"the emulated internet did not start: {words.strip()}")
            if (place / CONTROL).exists():
                for (a, b), line in self.topology.lines.items():
                    self._set(self.host(a), self.host(b), line)
                return
            time.sleep(0.02)
        self.down()
        raise WanError(f"the emulated internet did not start within {START_SECONDS:.0f} s")

    def down(self) -> None:
        """Remove it, with all that runs in it. A missing one is no error."""
        remove(self.name)

    def host(self, name: str) -> Host:
        return self.topology.host(name)

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the argument list that runs a command on a host: same files, user and process id."""
        self.host(host)
        return inside(namespace(self.name, host), command)

    def cut(self, a: str | None = None, b: str | None = None, *, oneway: bool = False, heal: bool = False) -> None:
        """Black-hole what goes from a to b and, unless `oneway`, from b to a; None stands for every host."""
        for x in [self.host(a)] if a else list(self.topology.hosts.values()):
            for y in [self.host(b)] if b else list(self.topology.hosts.values()):
                for p, q in ((x, y),) if oneway else ((x, y), (y, x)):
                    self._ask("cut", p.index, q.index, 0 if heal else 1)

    def heal(self, a: str | None = None, b: str | None = None, *, oneway: bool = False) -> None:
        """Undo cuts; all of them without names."""
        self.cut(a, b, oneway=oneway, heal=True)

    def set(self, a: str, b: str, *, rtt_ms: float, loss: float = 0.0) -> None:
        """Change the line between two hosts while it runs."""
        line = Line(rtt_ms, loss)
        self._set(self.host(a), self.host(b), line)
        self._set(self.host(b), self.host(a), line)

    def block_udp(self, host: str) -> None:
        """Drop all UDP packets to a host silently from now on, as some firewalls do. Needs nft."""
        rules = "table ip firewall { chain inp { type filter hook input priority 0; ip protocol udp drop; }; }"
        sh(*self.command(host, ["nft", "-f", "-"]), text=rules)

    def kill(self, host: str) -> None:
        """Cut the power: cut the link first, so that no FIN or RST gets out, then kill all processes of the host."""
        self.cut(host)
        kill_in(namespace(self.name, host))

    def pids(self, host: str) -> list[int]:
        """Return the processes that run on a host now."""
        self.host(host)
        return [int(pid) for pid in sh("ip", "netns", "pids", namespace(self.name, host)).split()]

    def counters(self) -> Counters:
        """Return the traffic of the links so far."""
        words = self._ask("stat")
        try:
            counts = [int(w) for w in words[3:]]
            hosts = {
                h.name: HostCounters(h.ip, *counts[6 * h.index : 6 * h.index + 6]) for h in self.topology.hosts.values()
            }
            return Counters(float(words[0]), float(words[1]), int(words[2]), hosts)
        except (ValueError, IndexError, TypeError):
            raise WanError(f"the router's counters cannot be read: {' '.join(words)[:200]}") from None

    def flows(self, to: str) -> dict[str, int]:
        """IP bytes that have come to a host since the start, by the host that sent them."""
        words = self._ask("flow", self.host(to).index)
        try:
            return {h.name: int(words[h.index]) for h in self.topology.hosts.values()}
        except (ValueError, IndexError):
            raise WanError(f"the router's flows cannot be read: {' '.join(words)[:200]}") from None

    def _set(self, a: Host, b: Host, line: Line) -> None:
        self._ask("set", a.index, b.index, int(line.rtt_ms * 500), line.loss)

    def _ask(self, *message: object) -> list[str]:
        """Say one thing to the router; the words of its answer."""
        return _ask(self.name, *message)


def remove(name: str) -> None:
    """Remove the emulated internet of this name and all that runs in it; none is no error. Raises WanError."""
    try:
        _ask(name, "quit")
        end = time.monotonic() + STOP_SECONDS
        while folder(name).exists() and time.monotonic() < end:
            time.sleep(0.02)
    except WanError:
        pass  # no router answers; what a daemon left that was killed is removed below
    remove_all(name)
    shutil.rmtree(folder(name), ignore_errors=True)


def _ask(name: str, *message: object) -> list[str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        try:
            s.bind("")  # an abstract address, for the answer
            s.settimeout(ANSWER_SECONDS)
            s.connect(str(folder(name) / CONTROL))
            s.send(" ".join(map(str, message)).encode())
            return s.recv(1 << 14).decode().split()
        except OSError as e:
            raise WanError(f"the emulated internet {name!r} does not answer ({e}): is its time over?") from None
