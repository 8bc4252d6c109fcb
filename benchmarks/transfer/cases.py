"""The lines that blobs are sent over, and what can be known of each without sending anything. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.wan import Topology

MB = 1_000_000
MBIT = 1e6 / 8


@dataclass(frozen=True)
class Case:
    """`donors` hold one blob of `size` bytes, and `fetchers` want it. Rates in Mbit/s, up and down, of each of them."""

    name: str
    size: int
    donors: int = 1
    fetchers: int = 1
    donor_mbit: float = 100.0
    fetcher_mbit: float = 100.0
    rtt_ms: float = 100.0
    loss: float = 0.0
    tcp: str = ""
    """The hosts' congestion control; "" is the machine's."""

    udp: bool = True
    """False: firewalls drop UDP, and peers have TCP alone."""

    kind: Literal["time", "memory"] = "time"

    @property
    def donor_names(self) -> list[str]:
        return [f"d{i}" for i in range(self.donors)]

    @property
    def fetcher_names(self) -> list[str]:
        return [f"f{i}" for i in range(self.fetchers)]

    @property
    def floor(self) -> float:
        """Minimum seconds until every fetcher has the blob.

        Each byte leaves the donors once and enters each fetcher once, and there are two round trips.
        """
        up = self.size / (self.donors * self.donor_mbit * MBIT)
        down = self.size / (self.fetcher_mbit * MBIT)
        return max(up, down) + 2 * self.rtt_ms / 1e3

    def topology(self) -> Topology:
        rates = dict.fromkeys(self.donor_names, self.donor_mbit) | dict.fromkeys(self.fetcher_names, self.fetcher_mbit)
        hosts = [{"name": name, "up_mbit": rate, "down_mbit": rate} for name, rate in rates.items()]
        default = {"rtt_ms": self.rtt_ms, "loss": self.loss}
        return Topology.parse({"hosts": hosts, "default": default, "tcp": self.tcp})


CASES = (
    Case("far", 64 * MB, rtt_ms=200),
    Case("far-fat", 128 * MB, donor_mbit=500, fetcher_mbit=500, rtt_ms=200),
    Case("lossy", 32 * MB, rtt_ms=50, loss=0.01),
    Case("lossy-cubic", 8 * MB, rtt_ms=50, loss=0.01, tcp="cubic"),
    Case("far-no-udp", 64 * MB, rtt_ms=200, udp=False),
    Case("far-fat-no-udp", 128 * MB, donor_mbit=500, fetcher_mbit=500, rtt_ms=200, udp=False),
    Case("lossy-no-udp", 32 * MB, rtt_ms=50, loss=0.01, udp=False),
    Case("lossy-cubic-no-udp", 8 * MB, rtt_ms=50, loss=0.01, tcp="cubic", udp=False),
    Case("author", 16 * MB, donor_mbit=20, fetchers=7),
    Case("author-no-udp", 16 * MB, donor_mbit=20, fetchers=7, udp=False),
    Case("join", 64 * MB, donors=6, donor_mbit=20),
    Case("join-no-udp", 64 * MB, donors=6, donor_mbit=20, udp=False),
    Case("memory-100", 100 * MB, donor_mbit=1000, fetcher_mbit=1000, rtt_ms=5, kind="memory"),
    Case("memory-1000", 1000 * MB, donor_mbit=1000, fetcher_mbit=1000, rtt_ms=5, kind="memory"),
)
QUICK = (
    Case("far", 16 * MB, rtt_ms=200),
    Case("author", 8 * MB, donor_mbit=20, fetchers=3),
    Case("join", 16 * MB, donors=4, donor_mbit=20),
)


def judged(case: Case, found: Sequence[dict[str, Any]], sent: dict[str, float], plain: float | None) -> dict[str, Any]:
    """One row of the results. `found`: what each fetcher says of itself; `sent`: bytes, by donor; `plain`: seconds."""
    seconds = max(f["seconds"] for f in found)
    return {
        "name": case.name,
        "size": case.size,
        "donors": case.donors,
        "fetchers": case.fetchers,
        "donor_mbit": case.donor_mbit,
        "fetcher_mbit": case.fetcher_mbit,
        "rtt_ms": case.rtt_ms,
        "loss": case.loss,
        "tcp": case.tcp,
        "udp": case.udp,
        "seconds": seconds,
        "all_seconds": [f["seconds"] for f in found],
        "floor": case.floor,
        "ratio": seconds / case.floor,
        "plain": plain,
        "copies": sum(sent.values()) / case.size,
        "came": max(f["bytes_down"] for f in found) / case.size,
        "rss_mb": max(f["rss"] for f in found) / MB,
        "rss_before_mb": max(f["rss_before"] for f in found) / MB,
        "daemon_rss_mb": max(f["daemon_rss"] for f in found) / MB,
        "cpu_seconds": max(f["cpu_seconds"] for f in found),
    }
