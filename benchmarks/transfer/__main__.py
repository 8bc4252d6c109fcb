"""Blobs over an emulated internet: how long until all have them, beside the line's own time and plain TCP sockets.

Each peer is a process on a host of its own with a Swarm and a Store; no rounds and no training. The floor: every byte
leaves the donors once and enters each fetcher once, at the lines' rates, and two round trips. Plain TCP: one socket
from each fetcher to each donor, on the same hosts right after; donors share the bytes, but each fetcher gets all of
them. Needs root (see tests/wan), and nftables for the cases -no-udp.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  rows: a list, each with
    name, size (bytes), donors, fetchers, donor_mbit, fetcher_mbit, rtt_ms, loss, tcp (congestion control, "": the
      machine's), udp (false: dropped, so that peers have TCP alone): the case
    seconds: until the last fetcher had it; all_seconds: each one's; floor, plain: likewise; ratio: seconds to floor
    copies: bytes that the donors sent, in blobs; came: bytes that reached the fetcher that got most, in blobs
    rss_mb, daemon_rss_mb: highest resident memory of a fetcher's process and of its libp2p's meanwhile;
      rss_before_mb: of its process before; cpu_seconds: of its process
  goals: a list of goal, value, met
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.transfer.cases import CASES, QUICK, Case, judged
from protocol.errors import CairnError
from tests.wan import Wan, WanError, why_not

HOST, PLAIN = "benchmarks.transfer.host", "benchmarks.transfer.plain"
WITHIN = 240.0
COPIES, DOWNLINK = 1.25, 0.8
"""Goals: copies that an author sends, and the share of a newcomer's downlink that is used."""


class BenchError(CairnError):
    """The benchmark cannot be run here, or what it runs has failed; says why."""


class Remote:
    """A process on a host that answers orders, a line each."""

    def __init__(self, wan: Wan, host: str, module: str, *arguments: object, folder: Path):
        self._name = host
        self._log = folder / f"{host}.txt"
        self._process = subprocess.Popen(
            wan.command(host, [sys.executable, "-m", module, *map(str, arguments)]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(self._log, "wb"), text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        )  # fmt: skip

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            words = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
            raise BenchError(f"{self._name} ended (code {self._process.wait(5)}):\n{words}")
        return line

    def ask(self, do: str, **order: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()
        return json.loads(self.hear())

    def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(8)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def world(case: Case) -> Iterator[tuple[Wan, Path]]:
    """Make the case's hosts, and a folder that is removed with them."""
    with (
        tempfile.TemporaryDirectory(prefix="cairn-transfer-", ignore_cleanup_errors=True) as folder,
        Wan(case.topology(), name=f"x{os.getpid() % 10_000_000}", ttl=600) as wan,
    ):
        yield wan, Path(folder)


def by_swarm(case: Case, wan: Wan, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the fetchers' results, and the bytes sent by each donor."""
    names = case.donor_names + case.fetcher_names
    with ExitStack() as stack:
        remotes: dict[str, Remote] = {}
        for number, name in enumerate(names):
            remotes[name] = Remote(
                wan, name, HOST, folder / f"store-{name}", wan.host(name).ip, number, folder=folder
            )  # fmt: skip
            stack.callback(remotes[name].end)
        told = {name: json.loads(remote.hear()) for name, remote in remotes.items()}
        with ThreadPoolExecutor(len(names)) as threads:
            made = list(threads.map(lambda n: remotes[n].ask("make", size=case.size, seed=1), case.donor_names))
            # Each dials those before it: of two who dial each other at the same instant neither may get through.
            for i, name in enumerate(names[1:], 1):
                addresses = [a for n in names[:i] for a in told[n]["addresses"]]
                if remotes[name].ask("connect", addresses=addresses)["met"] < i:
                    raise BenchError(f"{name} does not reach all others")

            def fetch(name: str) -> dict[str, Any]:
                holders = [told[n]["key"] for n in names if n != name]
                return remotes[name].ask(
                    "fetch", digest=made[0]["digest"], size=case.size, holders=holders, within=WITHIN
                )  # fmt: skip

            found = list(threads.map(fetch, case.fetcher_names))
        return found, {n: remotes[n].ask("sent")["bytes_up"] for n in case.donor_names}


def by_plain_tcp(case: Case, wan: Wan, folder: Path) -> float:
    """Seconds until the last fetcher has all."""
    with ExitStack() as stack:
        for name in case.donor_names:
            donor = Remote(wan, name, PLAIN, "serve", case.size // case.donors, folder=folder)
            stack.callback(donor._process.kill)
            donor.hear()
        addresses = [wan.host(n).ip for n in case.donor_names]
        takers = [Remote(wan, name, PLAIN, "take", *addresses, folder=folder) for name in case.fetcher_names]
        return max(float(taker.hear()) for taker in takers)


def measured(case: Case) -> dict[str, Any]:
    """One row. Raises BenchError, WanError."""
    with world(case) as (wan, folder):
        for host in () if case.udp else (*case.donor_names, *case.fetcher_names):
            wan.block_udp(host)
        found, sent = by_swarm(case, wan, folder)
        plain = by_plain_tcp(case, wan, folder) if case.kind == "time" else None
        late = wan.counters().late_ms
    if late > 20:
        print(f"{case.name}: the emulated lines were {late:.0f} ms late at worst: too little CPU", file=sys.stderr)
    return judged(case, found, sent, plain)


def show(results: Mapping[str, Any]) -> str:
    """Return the tables."""
    rows = results["rows"]

    def line(r: Mapping[str, Any]) -> str:
        rates = f"{r['donor_mbit']:g}" + (f"/{r['fetcher_mbit']:g}" if r["donor_mbit"] != r["fetcher_mbit"] else "")
        extra = (f", {r['loss']:.0%} loss" if r["loss"] else "") + (f", {r['tcp']}" if r["tcp"] else "")
        extra += "" if r["udp"] else ", by TCP"
        return f"{r['donors']} -> {r['fetchers']}, {rates} Mbit/s, {r['rtt_ms']:g} ms{extra}"

    times = [
        [r["name"], line(r), round(r["size"] / 1e6), *(round(r[k], 2) for k in ("seconds", "floor", "ratio")),
         None if r["plain"] is None else round(r["plain"], 2), round(r["copies"], 2), round(r["came"], 2)]
        for r in rows
    ]  # fmt: skip
    memory = [
        [r["name"], round(r["size"] / 1e6), *(round(r[k]) for k in ("rss_before_mb", "rss_mb", "daemon_rss_mb")),
         round(r["cpu_seconds"], 1)]
        for r in rows
    ]  # fmt: skip
    return (
        report.table(
            [
                "case",
                "donors -> fetchers",
                "MB",
                "seconds",
                "floor",
                "ratio",
                "plain TCP",
                "copies sent",
                "copies come",
            ],
            times,
        )
        + "\n\n"
        + report.table(["MB resident", "blob", "before", "at most", "libp2p", "CPU seconds"], memory)
    )


def transports(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the cases that were played by QUIC and by TCP alone."""
    by_tcp = {r["name"].removesuffix("-no-udp"): r["seconds"] for r in rows if not r["udp"]}
    cells = [
        [r["name"], *(round(s, 1) for s in (r["floor"], r["seconds"], by_tcp[r["name"]], r["plain"]))]
        for r in rows
        if r["name"] in by_tcp and r["udp"]
    ]
    return report.table(["case", "floor", "by QUIC", "by TCP", "plain TCP"], cells)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, save. Return 1 when a goal is missed."""
    parser = report.command_line(__doc__ or "", "transfer")
    parser.add_argument("--only", metavar="NAME,...", help="these cases: " + ", ".join(c.name for c in CASES))
    options = parser.parse_args(argv)
    cases = QUICK if options.quick else CASES
    if options.only:
        cases = [c for c in cases if c.name in options.only.split(",")]
    if reason := why_not(nat=not all(c.udp for c in cases)):
        raise BenchError(reason)
    results: dict[str, Any] = report.provenance("transfer", argv) | {"rows": []}
    for case in cases:
        results["rows"].append(measured(case))
        r = results["rows"][-1]
        print(f"{case.name}: {r['seconds']:.2f} s, floor {r['floor']:.2f}", file=sys.stderr, flush=True)
        results["goals"] = goals(results["rows"])
        if options.json:
            report.save(options.json, results)
    return report.ended(results, options, show(results))


def goals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the goals of the rows that there are. By TCP alone has none: it is measured to be compared."""
    found = []
    for r in rows:
        if r["name"] == "author":
            found.append(report.goal("author: each byte leaves at most 1.25 times", r["copies"], r["copies"] <= COPIES))
        if r["name"] == "join":
            share = r["floor"] / r["seconds"]
            found.append(report.goal("join: at least 80% of the downlink is used", share, share >= DOWNLINK))
        if r["plain"] is not None and r["udp"]:
            ratio = r["seconds"] / r["plain"]
            found.append(report.goal(f"{r['name']}: no longer than plain TCP", ratio, ratio <= 1))
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (CairnError, WanError) as e:
        sys.exit(f"benchmarks.transfer: {e}")
