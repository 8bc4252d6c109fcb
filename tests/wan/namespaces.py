"""The kernel's side of an emulated internet: network namespaces, TUN devices, NAT gateways. Needs root."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.wan.topology import Host, Topology, WanError

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TUN_FLAGS = 0x0001 | 0x1000 | 0x4000
"""IFF_TUN, IFF_NO_PI, IFF_VNET_HDR."""

OFFLOADS = 0x1 | 0x2 | 0x8
"""Checksums, TSO for IPv4, TSO with ECN: the router handles packets of up to 64 KiB."""

CLONE_NEWNET = 0x40000000
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def sh(*command: str, text: str | None = None) -> str:
    """Run a command; what it printed. Raises WanError."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise WanError(f"{' '.join(command)}: {e}") from None
    if done.returncode:
        raise WanError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def namespace(wan: str, host: str) -> str:
    """Return the name of a host's network namespace."""
    return f"{wan}-{host}"


def inside(name: str, command: Sequence[str]) -> list[str]:
    """Return the argument list that runs a command in a namespace, under the process id that it is started with."""
    return ["nsenter", f"--net=/run/netns/{name}", "--", *command]


def build(wan: str, host: Host, topology: Topology) -> int:
    """One host's namespace, its gateway's if it has one, and its TUN device, whose descriptor this gives."""
    me = namespace(wan, host.name)
    edge = f"{me}-gw" if host.nat or host.behind else me
    for name in dict.fromkeys([me, edge]):
        sh("ip", "netns", "add", name)
        sh("ip", "-n", name, "link", "set", "lo", "up")
        settings = ["net.ipv4.tcp_no_metrics_save=1"]
        settings += [f"net.ipv6.conf.{which}.disable_ipv6=1" for which in ("all", "default")]
        settings += [f"net.ipv4.tcp_congestion_control={topology.tcp}"] if topology.tcp else []
        sh(*inside(name, ["sysctl", "-qw", *settings]))
    tun = _open_tun(edge)
    sh("ip", "-n", edge, "addr", "add", f"{host.ip}/{topology.net.prefixlen}", "dev", "wan0")
    sh("ip", "-n", edge, "link", "set", "wan0", "mtu", str(topology.mtu), "txqueuelen", "2000", "up")
    sh("ip", "-n", edge, "route", "add", "default", "dev", "wan0")
    if host.nat:
        _put_behind_gateway(edge, host)
    if host.nat or host.behind:
        # Behind another's gateway the own line's end is in a namespace of nobody's.
        gateway = f"{namespace(wan, host.behind)}-gw" if host.behind else edge
        _connect(me, gateway, host, topology.mtu)
    return tun


def _connect(me: str, gateway: str, host: Host, mtu: int) -> None:
    """Make a separate network between a host and its gateway."""
    lan, device, size = f"192.168.{host.index + 1}", f"lan{host.index}", str(mtu)
    ends = ["eth0", "mtu", size, "netns", me, "type", "veth", "peer", "name", device, "mtu", size, "netns", gateway]
    sh("ip", "link", "add", *ends)
    for name, end, address in ((gateway, device, f"{lan}.1/24"), (me, "eth0", f"{lan}.2/24")):
        sh("ip", "-n", name, "addr", "add", address, "dev", end)
        sh("ip", "-n", name, "link", "set", end, "up")
    sh("ip", "-n", me, "route", "add", "default", "via", f"{lan}.1")


def _put_behind_gateway(edge: str, host: Host) -> None:
    sh(*inside(edge, ["sysctl", "-qw", "net.ipv4.ip_forward=1"]))
    rules = f"""table ip wan {{
        chain post {{ type nat hook postrouting priority 100;
          oifname wan0 masquerade {"fully-random" if host.nat == "symmetric" else ""}; }};
        chain forw {{ type filter hook forward priority 0; policy drop;
          ct state established,related accept; iifname "lan*" accept; }};
        chain inp {{ type filter hook input priority 0; policy drop;
          ct state established,related accept; iifname "lan*" accept; ip protocol icmp accept; }};
    }}"""
    sh(*inside(edge, ["nft", "-f", "-"]), text=rules)


def _open_tun(name: str) -> int:
    """Make the device wan0 in a namespace; its descriptor is good in every namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as home, open(f"/run/netns/{name}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {name} cannot be entered")
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"wan0", TUN_FLAGS))
            fcntl.ioctl(tun, TUNSETOFFLOAD, OFFLOADS)
        finally:
            if libc.setns(home.fileno(), CLONE_NEWNET):
                os._exit(70)  # never go on in the wrong namespace
    return tun


@contextmanager
def tcp_allowed(algorithm: str) -> Iterator[None]:
    """Allow ordinary users a congestion control, as a namespace can only have such a one."""
    before = ALLOWED.read_text().strip() if algorithm else ""
    add = bool(algorithm) and algorithm not in before.split()
    if add:
        try:
            ALLOWED.write_text(f"{before} {algorithm}")
        except OSError as e:
            raise WanError(f"the congestion control {algorithm} is not to be had: {e.strerror}") from None
    try:
        yield
    finally:
        if add:
            ALLOWED.write_text(before)


def kill_in(name: str) -> None:
    """SIGKILL every process in a namespace (neither the router nor its daemon is ever in one)."""
    for _ in range(1000):
        pids = sh("ip", "netns", "pids", name).split()
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def remove_all(wan: str) -> None:
    """Remove every namespace of an emulated internet, with its processes."""
    for line in sh("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{wan}-"):
            kill_in(name)
            sh("ip", "netns", "del", name)
