"""The topology of an emulated internet: its hosts, their rates, and the delay and loss between each two. Pure.

As JSON or a dictionary (only "hosts" is required; rates are of IP bytes, loss is by MTU packet and direction):

    {"net": "10.77.0.0/24", "tcp": "cubic", "queue_ms": 100, "mtu": 1500, "seed": 0,
     "default": {"rtt_ms": 50, "loss": 0},
     "hosts": [{"name": "a", "up_mbit": 100, "down_mbit": 100, "nat": false}, ...],
     "pairs": [{"a": "a", "b": "b", "rtt_ms": 120, "loss": 0.01}, ...]}

"tcp" is the hosts' congestion control (default: the machine's). Host number n (from 1) has the WAN address <net>.n.
With "nat": true that address belongs to a masquerading gateway, which refuses unsolicited traffic (port-restricted
cone). The host itself is 192.168.<n>.2. "symmetric" also picks a random port for each connection. A host with
"behind": "a" has no line of its own: it is 192.168.<n>.2 behind the gateway of host a, which comes before it, and
shares a's line and address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_HOSTS = 64
"""As in router.c."""

MIN_QUEUE, MAX_QUEUE = 65_536, 64 << 20
"""Bytes of a drop-tail queue: one TSO packet must fit."""

NAME = re.compile(r"[a-z0-9]{1,12}")
Nat = Literal[False, True, "symmetric"]


class WanError(Exception):
    """The emulated internet cannot be had, or was asked for something that it has not; says why."""


@dataclass(frozen=True)
class Host:
    """One host; `index` counts from 0. Rates in bytes a second, queues in bytes."""

    name: str
    index: int
    ip: str
    up: float
    down: float
    up_queue: float
    down_queue: float
    nat: Nat = False
    behind: str = ""


@dataclass(frozen=True)
class Line:
    """The path between two hosts: the round trip in milliseconds, and the share of packets lost each way."""

    rtt_ms: float = 50.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.rtt_ms <= 10_000 and 0 <= self.loss <= 1):
            raise WanError(f"a line has rtt_ms from 0 to 10000 and loss from 0 to 1, not {self.rtt_ms} and {self.loss}")


@dataclass(frozen=True)
class Topology:
    """Hosts by name, and the line of each ordered pair of names."""

    hosts: dict[str, Host]
    lines: dict[tuple[str, str], Line]
    net: ipaddress.IPv4Network
    tcp: str = ""
    mtu: int = 1500
    seed: int = 0
    source: Mapping[str, Any] = field(default_factory=dict)
    """The JSON that it was parsed from."""

    @classmethod
    def parse(cls, source: Mapping[str, Any]) -> Topology:
        """Parse the form above. Raises WanError."""
        try:
            return cls._parse(source)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise WanError(f"not a topology: {type(e).__name__}: {e}") from None

    @classmethod
    def _parse(cls, source: Mapping[str, Any]) -> Topology:
        net = ipaddress.IPv4Network(source.get("net", "10.77.0.0/24"))
        given, queue_seconds = list(source["hosts"]), float(source.get("queue_ms", 100)) / 1e3
        if not 0 < len(given) <= min(MAX_HOSTS, net.num_addresses - 2):
            raise WanError(f"{len(given)} hosts: want 1 to {min(MAX_HOSTS, net.num_addresses - 2)}")
        hosts = {h["name"]: _host(i, h, net, queue_seconds) for i, h in enumerate(given)}
        if len(hosts) != len(given):
            raise WanError("two hosts have one name")
        for h in hosts.values():
            before = hosts.get(h.behind)
            if h.behind and (h.nat or before is None or not before.nat or before.index > h.index):
                raise WanError(f"{h.name} is behind {h.behind!r}: want an earlier host with nat, and none of its own")
        line = Line(**source.get("default", {}))
        lines = {(a, b): line for a in hosts for b in hosts if a != b}
        for pair in source.get("pairs", []):
            for key in ((pair["a"], pair["b"]), (pair["b"], pair["a"])):
                if key not in lines:
                    raise WanError(f"there is no pair of hosts {key}")
                lines[key] = Line(float(pair.get("rtt_ms", line.rtt_ms)), float(pair.get("loss", line.loss)))
        mtu = int(source.get("mtu", 1500))
        if not 576 <= mtu <= 9000:
            raise WanError(f"mtu {mtu}: want 576 to 9000")
        tcp = str(source.get("tcp", ""))
        if tcp and not re.fullmatch(r"[a-z0-9_]{1,16}", tcp):
            raise WanError(f"tcp {tcp!r} is no congestion control")
        return cls(hosts, lines, net, tcp, mtu, int(source.get("seed", 0)), source)

    def host(self, name: str) -> Host:
        """Raises WanError when there is none of this name."""
        if name not in self.hosts:
            raise WanError(f"there is no host {name!r}; there are {', '.join(self.hosts)}")
        return self.hosts[name]


def _host(index: int, given: Mapping[str, Any], net: ipaddress.IPv4Network, queue_seconds: float) -> Host:
    name, nat, behind = given["name"], given.get("nat", False), str(given.get("behind", ""))
    if not NAME.fullmatch(name):
        raise WanError(f"host name {name!r}: want 1 to 12 of a-z 0-9")
    if nat not in (False, True, "symmetric"):
        raise WanError(f'{name}: nat is true, false or "symmetric", not {nat!r}')
    up, down = (float(given.get(key, 100)) * 1e6 / 8 for key in ("up_mbit", "down_mbit"))
    if min(up, down) <= 0:
        raise WanError(f"{name}: rates must be positive")
    up_queue, down_queue = (min(MAX_QUEUE, max(MIN_QUEUE, rate * queue_seconds)) for rate in (up, down))
    return Host(name, index, str(net[index + 1]), up, down, up_queue, down_queue, nat, behind)


def star(names: Iterable[str], *, mbit: float = 100.0, rtt_ms: float = 100.0, loss: float = 0.0) -> Topology:
    """Hosts that are all alike, and as far from each other."""
    return Topology.parse(
        {
            "hosts": [{"name": name, "up_mbit": mbit, "down_mbit": mbit} for name in names],
            "default": {"rtt_ms": rtt_ms, "loss": loss},
        }
    )
