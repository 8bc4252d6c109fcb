"""Rounds of 16 to 1,000 peers: the product's round machines on modelled links in virtual time.

Real: every decision (`protocol.rounds`), each message's size as the product encodes it, the outbox's rules (64 calls
under way), each update's size by its codec. Of more than 32 peers 32 have machines, which receive all messages. The
others copy them with their own keys (`shadows.py`). Modelled:

- links: up and down rates, and a delay for each pair (within a fifth). Every packet costs 450 bytes beside its
content, and an arriving message costs 200 us for its signature;
- blobs: fluids that share 82% of the links (`--efficiency`: what four real peers fill, docs/results/scale.md) max-min
  fairly, relayed by all (`fluid.py`);
- the trainer: a step of 2 s (1B: 131,072 tokens at 40% of an H200) or 0.5 s (25M), 30 wanted a round. On the GPU an
update takes 100 bytes a parameter, a round 24 and 16 for each update, at 1 TB/s (estimates: no GPU was measured). The
  state's digest takes 12 ns a parameter on a core, the check of an update 0.75, on four (docs/results/codec.md);
- the owner's policy: at least 60 s for an exchange, and twice the needed time; heartbeats of 2 s or more
(`--heartbeat`);
- reduced rounds: a slice is the 256 KiB chunks of an update that cover a shard. One core sums a shard, 3 ns a
parameter and update (docs/results/codec.md). All peers can fetch its blob when one committee member attests it.

The floor is the bytes of an exchange into the peer that gets most, and two round trips (reduced: four). "Training" is
the share of the GPU's time that is not an update or a round. "No overlap" is the same if training stopped from an
announcement to the new state.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  rows: a list, each with
    peers, parameters, codec, exchange, records ("names" or "whole"), heartbeat (s), up, down (bit/s), rtt (s), blob
    (bytes), efficiency, floor, rounds, and the fields of `world.Counts`: bytes and messages of one peer and round,
    times in seconds
  heartbeats: a list, each with peers, seconds, bytes (a second, each way, of one peer), known_bytes (what comes to
    that while all are exchanging and know all headers)
  goals: a list of goal, value, met
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import pages, report
from benchmarks.exchange_wan.setting import PAUSE
from benchmarks.scale.shape import EFFICIENCY, Shape
from benchmarks.scale.sizes import PACKET, Sizes
from benchmarks.scale.world import World
from cairn.commands.options import parse_count
from protocol.rounds.header_repair import LIST_ALWAYS, LIST_EVERY

GOAL = 0.98
FITTED_PEERS = 4
"""Of the real swarms to which `--efficiency` was fitted."""
REAL_PARAMETERS = {"25M": 25_165_824, "100M": 100_663_296}
"""Of the real rows beside which a model is put."""
LONGEST = 200_000.0
"""Seconds of virtual time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print, save. Return 1 when a goal is missed."""
    parser = report.command_line(__doc__ or "", "scale")
    parser.add_argument("--peers", default="16,100", help="how many, with commas between")
    parser.add_argument("--parameters", default="1B,25M")
    parser.add_argument("--codec", default="sparse,sign")
    parser.add_argument("--exchange", default="gather", help="gather, reduce")
    parser.add_argument("--records", default="names", choices=("names", "whole"), help="how large records travel")
    parser.add_argument(
        "--heartbeat", type=float, default=0.0, metavar="S", help="seconds; 0: 2, or more for many peers"
    )
    parser.add_argument("--up", type=float, default=100.0, metavar="MBIT")
    parser.add_argument("--down", type=float, default=100.0, metavar="MBIT")
    parser.add_argument("--rtt", type=float, default=100.0, metavar="MS")
    parser.add_argument("--efficiency", type=float, default=EFFICIENCY, help="share of the lines that blobs fill")
    parser.add_argument("--rounds", type=int, default=2, help="after one to warm up; 0: the first one alone")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE", help="rows that were saved before")
    o = parser.parse_args(argv)
    if o.quick:
        o.peers, o.parameters, o.codec, o.rounds = "16,50", "1B", "sparse", 1
    peers_of = [int(n) for n in o.peers.split(",") if n]
    rows: list[dict[str, Any]] = []
    for file in o.add:
        rows += json.loads(file.read_text())["rows"]
    results: dict[str, Any] = report.provenance("scale", argv) | {"rows": rows}
    for parameters in o.parameters.split(","):
        for codec in o.codec.split(","):
            for exchange in o.exchange.split(","):
                for peers in peers_of:
                    shape = Shape(
                        peers, parameters, codec, o.up * 1e6, o.down * 1e6, o.rtt / 1e3, exchange,
                        names=o.records == "names", heartbeat=o.heartbeat, efficiency=o.efficiency,
                    )  # fmt: skip
                    row = row_of(shape, o.rounds)
                    rows[:] = [r for r in rows if _name(r) != _name(row)] + [row]
                    print(shown([row]), flush=True)
                    if o.json is not None:
                        report.save(o.json, finished(results))
    return report.ended(finished(results), o, show(results))


def show(results: Mapping[str, Any]) -> str:
    """Return the tables."""
    return "\n" + shown(results["rows"]) + "\n\n" + heartbeats_shown(results["heartbeats"])


def row_of(shape: Shape, rounds: int) -> dict[str, Any]:
    """Play one row."""
    counts = World(shape).play(rounds, LONGEST)
    return {
        "peers": shape.peers, "parameters": shape.parameters, "codec": shape.codec, "exchange": shape.exchange,
        "records": "names" if shape.names else "whole", "heartbeat": shape.policy.heartbeat_seconds, "up": shape.up,
        "down": shape.down, "rtt": shape.rtt, "blob": shape.blob, "efficiency": shape.efficiency,
        "floor": shape.floor, "rounds": max(1, rounds),
        **asdict(counts),
    }  # fmt: skip


def _name(row: dict[str, Any]) -> tuple[object, ...]:
    return tuple(
        row[k] for k in ("parameters", "codec", "exchange", "peers", "records", "up", "down", "rtt", "efficiency")
    )


def finished(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with heartbeats and goals."""
    sizes = Sizes()
    results["heartbeats"] = [
        {
            "peers": n, "seconds": s, "bytes": (n - 1) * (sizes.heartbeat + PACKET) / s,
            "known_bytes": (n - 1) * 8 * n / s / (LIST_EVERY if n > LIST_ALWAYS else 1),
        }
        for n, s in ((16, 2.0), (100, 2.0), (300, 2.0), (1000, 2.0), (1000, 10.0), (1000, 30.0))
    ]  # fmt: skip
    of_16 = [r["round_seconds"] for r in results["rows"] if r["peers"] == 16 and r["parameters"] == "1B"]
    most = 1 - gpu_seconds() / min(of_16) if of_16 else None
    text = f"1B, 16 peers: at least {GOAL:.0%} of the time training, beside the work that was measured on a GPU"
    results["goals"] = [report.goal(text, most, None if most is None else most >= GOAL)]
    return results


def gpu_seconds() -> float:
    """Return the seconds in a round that a GPU took to make an update of 1B parameters and to apply four.

    They are those of docs/results/gpu.json. A round of more peers has more to apply.
    """
    part = pages.one(pages.results("gpu")["parts"], part="trainer 1B, compiled")
    size = part["result"]["sizes"][0]
    return size["announce_seconds"] + size["apply_seconds"]


def shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: large models first, then by codec, exchange and number of peers."""
    columns = (
        "peers", "model", "codec", "exchange", "round s", "steps", "exchange s", "floor s", "of floor", "blobs MB",
        "messages", "up kB", "most kB", "training", "no overlap", "machine ms",
    )  # fmt: skip
    ordered = sorted(rows, key=lambda r: (-parse_count(r["parameters"], ""), r["codec"], r["exchange"], r["peers"]))
    return report.table(
        columns,
        [
            (
                r["peers"], r["parameters"], r["codec"] + ("" if r["records"] == "names" else ", records whole"),
                r["exchange"], f"{r['round_seconds']:.1f}", f"{r['inner_steps']:.0f}", f"{r['exchange_seconds']:.2f}",
                f"{r['floor']:.2f}", f"{r['exchange_seconds'] / r['floor']:.2f}", f"{r['blob_bytes'] / 1e6:,.1f}",
                f"{r['messages']:,.0f}", f"{r['message_up'] / 1e3:,.0f}", f"{r['message_most'] / 1e3:,.0f}",
                f"{r['training']:.1%}", f"{r['training_without_overlap']:.1%}", f"{1e3 * r['machine_seconds']:,.0f}",
            )
            for r in ordered
        ],
    )  # fmt: skip


def calibration_shown(simulated: Sequence[Mapping[str, Any]], real: Sequence[Mapping[str, Any]]) -> str:
    """Return simulated exchanges beside real ones: rows of benchmarks.exchange_wan with usual pauses and buffers."""
    cells = []
    for s in simulated:
        wanted = REAL_PARAMETERS[s["parameters"]], s["peers"], s["codec"], s["up"] / 1e6, 1e3 * s["rtt"]
        same = [r for r in real if tuple(r[k] for k in ("parameters", "peers", "name", "mbit", "rtt_ms")) == wanted]
        usual = [r for r in same if r.get("pause", PAUSE) == PAUSE and not r.get("ordinary") and r["tcp"] == "bbr"]
        if len(usual) != 1:
            raise ValueError(f"{len(usual)} real rows are like {wanted}")
        took = usual[0]["certified"]
        cells.append(
            [f"{s['peers']} peers, {s['up'] / 1e6:g} Mbit/s", f"{s['codec']}, {s['parameters']}",
             "fitted" if s["peers"] == FITTED_PEERS else "out of sample", f"{s['floor']:.2f}", f"{took:.2f}",
             f"{s['exchange_seconds']:.2f}", f"{s['exchange_seconds'] / took:.2f}"]
        )  # fmt: skip
    return report.table(("swarm", "update", "", "floor s", "real s", "simulated s", "simulated / real"), cells)


def heartbeats_shown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the share of a link that heartbeats alone take."""
    return report.table(
        ("peers", "heartbeat s", "Mbit/s each way", "while exchanging"),
        [
            (
                r["peers"], r["seconds"], f"{8 * r['bytes'] / 1e6:.2f}",
                f"{8 * (r['bytes'] + r['known_bytes']) / 1e6:.2f}",
            )
            for r in rows
        ],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
