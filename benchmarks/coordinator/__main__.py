"""The load that a coordinator carries on this machine: peers, callers, viewers, rounds and floods.

Server and callers are processes of their own on the same cores. Calls are open loop; a call's time counts from when it
was due. The swarm is simulated behind `SwarmView`: verifying heartbeats and records is the observer's work, not here.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  growth: a list by peers: peers, seconds, idle_percent (of a core, before anybody calls), busy_percent, megabytes,
    viewers, events (updates sent to viewers), late_ms (how late the callers themselves were at most),
    calls: by method, p50, p99 and max in ms, calls, codes (REFUSED_STREAM: by the server's gRPC, unread)
  flood: calls and late_ms as above, at 10,000 peers while ten times as many bad calls come; rate (honest calls a
    second), bad (their codes), megabytes_before, megabytes_after
  hour: peers, rounds, processor_seconds (for so many rounds, a minute of simulated time each), wall_seconds,
    followed_ms (median from a round's arrival to its being followed), followed_max_ms, bytes_per_round,
    final_rounds, restart_seconds, peak_megabytes
  goals: a list of goal, value, met
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import report
from protocol.wire import coordinator_pb2 as wire

TICK = os.sysconf("SC_CLK_TCK")

RATES = {"Account": 167.0, "Admit": 17.0, "GetRun": 17.0, "Status": 10.0}
"""Calls a second of 10,000 peers: totals each minute, all admitted again within ten minutes; twenty watchers."""

if "Receipts" in wire.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name:
    RATES["Receipts"] = 17.0  # each peer's within ten minutes

METHODS = tuple(sorted(RATES))


class Server:
    """A coordinator in a process of its own."""

    def __init__(self, place: dict[str, Any]):
        self.place = place
        self.pid: int = place["pid"]

    def processor_seconds(self) -> float:
        """Return the processor seconds used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def megabytes(self) -> float:
        """Resident."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0


@contextmanager
def serving(peers: int, *options: str) -> Iterator[Server]:
    """Run a coordinator with a number of simulated peers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.coordinator.server", folder, str(peers), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise RuntimeError("the coordinator did not start: what it said is above")
            yield Server(json.loads(line))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def start_load(server: Server, **plan: Any) -> subprocess.Popen[str]:
    """Callers in a process of their own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.coordinator.load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if process.stdin:
        process.stdin.write(json.dumps(server.place | plan))
        process.stdin.close()
    return process


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the results of the callers."""
    text = process.stdout.read() if process.stdout else ""
    if process.wait(120):
        raise RuntimeError("the callers failed: what they said is above")
    return json.loads(text)


def grown(peers: int, seconds: float, viewers: int, rates: dict[str, float]) -> dict[str, Any]:
    """One size: at rest, then under load."""
    with serving(peers) as server:
        time.sleep(3)
        before, began = server.processor_seconds(), time.monotonic()
        time.sleep(min(10.0, seconds))
        idle = (server.processor_seconds() - before) / (time.monotonic() - began)
        load = start_load(server, peers=peers, rates=rates, seconds=seconds, viewers=viewers)
        time.sleep(2)
        before, began = server.processor_seconds(), time.monotonic()
        time.sleep(seconds / 2)
        busy = (server.processor_seconds() - before) / (time.monotonic() - began)
        found = result(load)
        return {
            "peers": peers, "seconds": seconds, "idle_percent": 100 * idle, "busy_percent": 100 * busy,
            "megabytes": server.megabytes(), "viewers": viewers, **found,
        }  # fmt: skip


def flooded(peers: int, seconds: float, rate: float) -> dict[str, Any]:
    """Honest calls while ten times as many bad ones come."""
    with serving(peers) as server:
        time.sleep(3)
        before = server.megabytes()
        bad = start_load(
            server, peers=peers, rates={"bad": 10 * rate}, seconds=seconds + 4, bad=True, channels=8, seed=2
        )
        time.sleep(2)
        share = rate / sum(RATES.values())
        found = result(start_load(server, peers=peers, rates={k: v * share for k, v in RATES.items()}, seconds=seconds))
        theirs = result(bad)
        return found | {
            "bad": theirs["calls"]["bad"]["codes"], "rate": rate,
            "megabytes_before": before, "megabytes_after": server.megabytes(),
        }  # fmt: skip


def one_hour(peers: int, rounds: int) -> dict[str, Any]:
    """Measure in a separate process, so that the memory is its own."""
    command = [sys.executable, "-m", "benchmarks.coordinator.hour", str(peers), str(rounds)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save. Return 1 when a goal is missed."""
    options = report.command_line(__doc__ or "", "coordinator").parse_args(arguments)
    quick = options.quick
    seconds = 6.0 if quick else 20.0
    provenance = report.provenance("coordinator", arguments, seeds=[2])
    sizes = (100, 10_000) if quick else (100, 1000, 10_000)
    growth = [
        grown(n, seconds, 20, {k: v * n / 10_000 for k, v in RATES.items()} | {"Status": 2.0}) for n in sizes[:-1]
    ]
    growth.append(grown(sizes[-1], seconds, 20 if quick else 200, RATES))
    flood = flooded(10_000, seconds, 10.0 if quick else 30.0)
    hour = one_hour(1000, 10 if quick else 60)
    results = provenance | {"growth": growth, "flood": flood, "hour": hour, "goals": goals(growth, flood, hour)}
    return report.ended(results, options, show(results))


def goals(growth: Sequence[Any], flood: dict[str, Any], hour: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the goals with what was measured."""
    worst = max(call["p99"] for call in growth[-1]["calls"].values())
    flooded = max(call["p99"] for call in flood["calls"].values())
    own = sum(flood["bad"].get(code, 0) for code in ("INTERNAL", "UNKNOWN"))
    busy, seconds = growth[-1]["busy_percent"], hour["processor_seconds"] / hour["rounds"]
    return [
        report.goal("10,000 peers: at most half of a core, in per cent", busy, busy <= 50),
        report.goal("10,000 peers: 99% of each kind of call within 500 ms", worst, worst <= 500),
        report.goal("beside a flood: 99% of each kind of honest call within 500 ms", flooded, flooded <= 500),
        report.goal("no bad call ends in INTERNAL or UNKNOWN", own, own == 0),
        report.goal("a round of 1,000 updates: at most 0.5 s of processor", seconds, seconds <= 0.5),
    ]


def show(results: Mapping[str, Any]) -> str:
    """Return the tables."""
    growth, flood, hour = (results[k] for k in ("growth", "flood", "hour"))
    methods = sorted({m for g in growth for m in g["calls"]})  # the service's of today may be others
    columns = ("peers", "at rest, % of a core", "under load", "MB", *(f"{m} p99 ms" for m in methods), "viewers")
    rows: list[Sequence[object]] = [
        [f"{g['peers']:,}", f"{g['idle_percent']:.0f}", f"{g['busy_percent']:.0f}", f"{g['megabytes']:.0f}"]
        + [_p99(g, m) for m in methods]
        + [g["viewers"]]
        for g in growth
    ]
    rows.append(
        ["10,000 and a flood", "-", "-", f"{flood['megabytes_after']:.0f}", *(_p99(flood, m) for m in methods), 0]
    )
    bad = ", ".join(f"{n:,} {code}" for code, n in sorted(flood["bad"].items(), key=lambda x: -x[1]))
    rates = f"{10 * flood['rate']:.0f} bad calls a second beside {flood['rate']:.0f} honest ones"
    floods = f"Flood: {rates}. Replies: {bad}."
    rounds = (
        f"{hour['rounds']} rounds of {hour['peers']:,} updates: {hour['processor_seconds']:.1f} s of processor, "
        f"{hour['bytes_per_round'] / 1e3:.0f} kB a round on disk, followed after {hour['followed_ms']:.0f} ms, "
        f"ready {hour['restart_seconds']:.1f} s after a restart."
    )
    return "\n\n".join([report.table(columns, rows), floods, rounds])


def _p99(found: dict[str, Any], method: str) -> str:
    calls = found["calls"].get(method)
    return "-" if calls is None else f"{calls['p99']:.0f}"


if __name__ == "__main__":
    sys.exit(main())
