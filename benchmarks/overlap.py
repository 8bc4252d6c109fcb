"""The gain of overlap: the share of time that peers spend in inner steps, with it and without, on slow links.

A coordinator and 4 real peers train the demo's model on an emulated internet of home links: 2 Mbit/s up, 100 down, 50
ms one way. The uplinks are so slow that the exchange takes a large part of a round. There is one run with `--overlap
on`, the default, and one with `--overlap off`, where a peer does not train between its update and the new state.
The shares are the trainer's own (`time_shares` in status.json, of its last minute). The peers share the machine's
cores, so a share is of wall-clock in which others may hold the core; the swarm's speed is in tokens a second. Needs
root.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  parameters, blob_bytes, peers, up_mbit, rtt_ms
  runs: a list, each with overlap; seconds (measured); rounds, round_seconds; tokens_per_second (accepted, all peers);
    shares (mean of the peers); exchange_seconds (median of the peers' medians until applied)
  goals: a list of goal, value, met
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import report
from benchmarks.convergence.wan_hosts import BenchError, Hosts, hosts
from benchmarks.exchange import RUN_FILE, endless
from peer.node.snapshot import Snapshot, read_snapshot
from tests.wan import Topology, why_not

COORDINATOR, PEERS = "coord", ("p1", "p2", "p3", "p4")
START_SECONDS = 200.0
SETTLE_SECONDS = 10.0
GOAL_SHARE = 0.95
GRPC, PAGE, SWARM = 7410, 7411, 7412


def main(argv: list[str] | None = None) -> int:
    """Measure, print, save. Return 1 when a goal is missed."""
    parser = report.command_line(__doc__ or "", "overlap")
    parser.add_argument("--up-mbit", type=float, default=2.0)
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--modes", default="on,off", help="which of the two; the other is taken from the JSON file")
    parser.add_argument("--seconds", type=float, default=70.0, help="how long each is measured; shares are of a minute")
    options = parser.parse_args(argv)
    if reason := why_not():
        print(f"no emulated internet: {reason}", file=sys.stderr)
        return 2
    from benchmarks.codec import SMALL_CODEC, small_llama
    from protocol.codec import make_codec

    seconds = 15.0 if options.quick else options.seconds
    provenance, layout = report.provenance("overlap", argv), small_llama()
    old = json.loads(options.json.read_text())["runs"] if options.json and options.json.exists() else []
    modes = options.modes.split(",")
    runs = [r for r in old if r["overlap"] not in modes]
    results: dict[str, Any] = provenance | {
        "parameters": layout.numel,
        "blob_bytes": make_codec(SMALL_CODEC, layout).size,
        "peers": len(PEERS),
        "up_mbit": options.up_mbit,
        "rtt_ms": options.rtt_ms,
    }
    for mode in modes:
        runs.append(measure(mode, options.up_mbit, options.rtt_ms, seconds))
        results["runs"] = sorted(runs, key=lambda r: r["overlap"], reverse=True)
        results["goals"] = goals(results["runs"])
        if options.json:
            report.save(options.json, results)
    return report.ended(results, options, show(results))


def goals(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the goals of the runs that there are."""
    training = {r["overlap"]: r["shares"]["training"] for r in runs}
    speed = {r["overlap"]: r["tokens_per_second"] for r in runs}
    gain = speed["on"] / speed["off"] if len(speed) == 2 else None
    return [
        report.goal(
            f"training for at least {GOAL_SHARE:.0%} of the time, with overlap", training.get("on"),
            None if "on" not in training else training["on"] >= GOAL_SHARE,
        ),
        report.goal("more tokens a second with overlap than without", gain, None if gain is None else gain > 1),
    ]  # fmt: skip


def run_file(text: str, folder: Path) -> str:
    """Return the demo's run file without an end and without checkpoints, which would travel on the same links."""
    return re.sub(r"^every\s*=.*$", "every = 256", endless(text, folder), flags=re.MULTILINE)


def topology(up_mbit: float, rtt_ms: float) -> Topology:
    """Return a coordinator with a fast link, and homes."""
    homes = [{"name": name, "up_mbit": up_mbit, "down_mbit": 100} for name in PEERS]
    return Topology.parse({"hosts": [{"name": COORDINATOR}, *homes], "default": {"rtt_ms": rtt_ms}})


def measure(overlap: str, up_mbit: float, rtt_ms: float, seconds: float) -> dict[str, Any]:
    """One run. Raises BenchError."""
    with hosts(topology(up_mbit, rtt_ms), ttl=START_SECONDS + seconds + 120) as world:
        _start(world, overlap)
        world.until("every peer has had a part in 2 rounds", lambda: _rounds(world) >= 2, START_SECONDS, every=1)
        time.sleep(SETTLE_SECONDS)
        first, began = _snapshots(world), time.monotonic()
        time.sleep(seconds)
        world.check()
        return judged(overlap, first, _snapshots(world), time.monotonic() - began)


def judged(overlap: str, first: Mapping[str, Snapshot], last: Mapping[str, Snapshot], seconds: float) -> dict[str, Any]:
    """Return the results between two samples of all peers."""
    rounds = median(last[n].round - first[n].round for n in last)
    tokens = median(last[n].accepted_tokens - first[n].accepted_tokens for n in last)
    shares = {what: mean(s.time_shares.get(what, 0.0) for s in last.values()) for what in last["p1"].time_shares}
    return {
        "overlap": overlap,
        "seconds": seconds,
        "rounds": rounds,
        "round_seconds": seconds / max(1, rounds),
        "tokens_per_second": tokens / seconds,
        "shares": shares,
        "exchange_seconds": median(s.exchange_seconds["applied"] for s in last.values()),
    }


def _start(world: Hosts, overlap: str) -> None:
    file = world.folder / "run.toml"
    file.write_text(run_file(RUN_FILE.read_text(), RUN_FILE.parent))
    ip, cairn = world.ip(COORDINATOR), [sys.executable, "-m", "cairn"]
    world.start(
        COORDINATOR,
        [*cairn, "coordinator", "serve", str(file), "--home", str(world.folder / COORDINATOR),
         "--grpc", f"{ip}:{GRPC}", "--page", f"{ip}:{PAGE}", "--swarm", f"/ip4/{ip}/tcp/{SWARM}"],
    )  # fmt: skip
    invite = world.folder / COORDINATOR / "coordinated" / "sotu" / "invite"
    world.until("the coordinator writes its invite", invite.exists, START_SECONDS)
    for name in PEERS:
        world.start(
            name,
            [*cairn, "peer", "join", invite.read_text().strip(), "--home", str(world.folder / name), "--name", name,
             "--threads", "1", "--device", "cpu", "--plain", "--overlap", overlap,
             "--listen", f"/ip4/{world.ip(name)}/tcp/{SWARM}"],
        )  # fmt: skip


def _snapshots(world: Hosts) -> dict[str, Snapshot]:
    found = {}
    for name in PEERS:
        for file in (world.folder / name).glob("runs/*/status.json"):
            if (snapshot := read_snapshot(file.parent)) is not None:
                found[name] = snapshot
    if len(found) < len(PEERS):
        raise BenchError(f"no status of {', '.join(set(PEERS) - set(found))}")
    return found


def _rounds(world: Hosts) -> int:
    """Return the least number of rounds to which any peer has contributed."""
    world.prefer()
    try:
        return min(len(s.exchange_rounds) for s in _snapshots(world).values())
    except BenchError:
        return 0


def show(results: Mapping[str, Any]) -> str:
    """Return a table of both runs."""
    rows = []
    for r in results["runs"]:
        shares = [f"{r['shares'].get(what, 0.0):.1%}" for what in ("training", "waiting", "compressing", "applying")]
        rows.append(
            [r["overlap"], *shares, round(r["exchange_seconds"], 2), round(r["round_seconds"], 2),
             round(r["tokens_per_second"])]
        )  # fmt: skip
    return (
        f"{results['peers']} peers, {results['parameters']:,} parameters, {results['blob_bytes']:,} bytes an update, "
        f"{results['up_mbit']:g} Mbit/s up, {results['rtt_ms'] / 2:g} ms one way\n\n"
        + report.table(
            ["overlap", "training", "waiting", "compressing", "applying", "exchange s", "round s", "tokens/s"], rows
        )
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as e:
        sys.exit(f"benchmarks.overlap: {e}")
