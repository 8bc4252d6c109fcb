"""A round's exchange on an emulated WAN: Cairn's codecs, hivemind's averager, gloo, PCCL, and the floor.

    python -m benchmarks.exchange_wan [--quick] [--json FILE] [--parameters 25M] [--peers 4] [--rows sparse,gloo]
                                      [--dies] [--add]

Each row starts real processes, each peer on a host of its own. Links are 100 Mbit/s up and down, 50 ms one way
between any two, in all rows (--mbit, --rtt-ms). Cairn's peers are the product's node, swarm, store, codec and round
machine (by QUIC; in the rows -no-udp by TCP, as behind a firewall that drops UDP). A stand-in for the trainer makes
updates of noise of the codec's real size and applies accepted ones for real. All announce at the same instant; --warm
rounds before those that are measured warm up what there is to warm (the table gives the first, cold one, too). The
peers share the machine's cores: CPU seconds are given, for each peer and round.

The floor of a row is its own bytes / bandwidth + 2 round trips: n - 1 updates into each peer, or 2 (n - 1) / n times
the values for an all-reduce. Plain TCP rows send an update's bytes and do nothing else. hivemind's search for a group
(0.6 s where it goes well) is not in its round. With --dies one peer gets SIGKILL in the middle of one more round. The
others' result is checked by values (or by the state's digest), not by return codes. Needs root
(see tests/wan).

JSON keys: machine; command; rows: a list of `setting.Row` (seconds, bytes of IP), by name, parameters and peers. --add
keeps the file's other rows. goals: a list of goal, value, met.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.convergence.wan_hosts import BenchError
from benchmarks.exchange_wan.setting import PAUSE, SYSTEMS, Setting
from benchmarks.exchange_wan.stage import play
from tests.wan import why_not

MOST_RATIO, LEAST_GAIN = 1.25, 20.0
RATE = 100.0
"""Mbit/s at which the goals are."""
RMEM_MAX, USUAL_BUFFER = Path("/proc/sys/net/core/rmem_max"), 212_992


def main(argv: list[str] | None = None) -> int:
    """Play the rows, print, save. Return 1 when a goal is missed, or a row could not be played."""
    parser = report.command_line(__doc__ or "", "exchange_wan")
    parser.add_argument("--parameters", type=number, default=25_000_000, metavar="N", help="e.g. 25M (the default)")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rows", help=f"of {','.join(SYSTEMS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="that are measured")
    parser.add_argument("--warm", type=int, default=1, help="rounds before those; quic-go's windows grow slowly")
    parser.add_argument("--mbit", type=float, default=RATE)
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--pause", type=float, default=PAUSE, help="seconds before each round")
    parser.add_argument("--ordinary-user", action="store_true", help="peers whose sockets have the usual buffers")
    parser.add_argument("--tcp", default=congestion_control(), help="congestion control; by default the machine's")
    parser.add_argument("--dies", action="store_true", help="kill one peer in the middle of one more round")
    parser.add_argument("--seconds", type=float, default=280.0, help="how long a row may take")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and diaries there")
    parser.add_argument("--add", action="store_true", help="add to the rows that the JSON file has")
    options = parser.parse_args(argv)
    if reason := why_not(nat=True):  # nftables: for rows where UDP is blocked
        print(f"no emulated internet: {reason}", file=sys.stderr)
        return 2
    wanted = options.rows.split(",") if options.rows else list(SYSTEMS)
    if options.quick and not options.rows:
        wanted = ["sparse", "sign"]
    if unknown := [name for name in wanted if name not in SYSTEMS]:
        parser.error(f"--rows: there is no {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    if find_spec("pccl") is None and (unplayable := [name for name in wanted if name.startswith("pccl")]):
        missing = (
            f"{', '.join(unplayable)}: no module pccl; benchmarks/exchange_wan/pccl_peer.py says how to install it"
        )
        if options.rows:
            parser.error(f"--rows: {missing}")
        print(f"left out: {missing}", file=sys.stderr)
        wanted = [name for name in wanted if name not in unplayable]
    parameters, rounds = (4_000_000, 2) if options.quick else (options.parameters, options.rounds)
    if min(rounds, options.warm) < 1:
        parser.error("--rounds, --warm: one at least")
    if options.ordinary_user and (most := int(RMEM_MAX.read_text())) > USUAL_BUFFER:
        parser.error(f"--ordinary-user: this machine allows {most} bytes: sysctl -w net.core.rmem_max={USUAL_BUFFER}")
    setting = Setting(
        parameters, options.peers, options.mbit, options.rtt_ms, rounds, options.tcp, options.pause,
        options.ordinary_user, options.warm,
    )  # fmt: skip
    rows = old_rows(options.json) if options.add and options.json else []
    provenance, failed = report.provenance("exchange_wan", argv), False
    for name in wanted:
        keep = options.keep / name if options.keep else None
        try:
            dies = options.dies and not name.startswith("tcp")
            row = asdict(play(name, SYSTEMS[name], setting, dies=dies, seconds=options.seconds, keep=keep))
        except BenchError as e:
            print(f"{name}: {e}", file=sys.stderr)
            failed = True
            continue
        row |= {k: provenance[k] for k in ("commit", "changed", "date", "machine")}
        rows = [r for r in rows if key(r) != key(row)] + [row]
        print(line(row), flush=True)
        if options.json:
            report.save(options.json, results(rows, provenance))
    found = results(rows, provenance)
    return max(int(failed), report.ended(found, options, "\n" + show(found)))


def number(text: str) -> int:
    """25M, 100M, 1B or plain digits."""
    factor = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper())
    return int(float(text[:-1]) * factor) if factor else int(text)


def congestion_control() -> str:
    """Return this machine's congestion control, e.g. bbr or cubic: it decides how TCP starts after a pause."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def key(row: Mapping[str, Any]) -> tuple[str, int, int, float, float, str, float, bool]:
    """Return the key that makes two rows the same row."""
    how = row.get("pause", PAUSE), row.get("ordinary", False)  # older files do not have these keys
    return row["name"], row["parameters"], row["peers"], row["mbit"], row["rtt_ms"], row["tcp"], *how


def more_of(row: Mapping[str, Any]) -> str:
    """Return the unusual conditions of a row, in words."""
    pause = row.get("pause", PAUSE)
    words = f", {pause:g} s between rounds" if pause != PAUSE else ""
    return words + (", peers as an ordinary user's" if row.get("ordinary", False) else "")


def old_rows(file: Path) -> list[dict[str, Any]]:
    """Return the results of an earlier run."""
    return json.loads(file.read_text())["rows"] if file.exists() else []


def results(rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON's content, with the rows in the table's order."""
    order = list(SYSTEMS)
    ordered = sorted(rows, key=lambda r: (*key(r)[1:], order.index(r["name"])))
    return {**provenance, "rows": ordered, "goals": goals(ordered)}


def goals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Exchange at most 1.25 times its floor; at 100 Mbit/s, 20 times less wall-clock than hivemind's best right row."""
    found = []
    for r in rows:
        if r["name"] not in ("sparse", "sign", "int8", "none"):
            continue
        where = f"{r['name']}, {r['parameters'] / 1e6:.0f}M x {r['peers']}, {r['mbit']:g} Mbit/s, {r['tcp']}"
        where += more_of(r)
        found.append(
            report.goal(
                f"exchange at most {MOST_RATIO:g} times its floor ({where})", r["ratio"], r["ratio"] <= MOST_RATIO
            )
        )
        rivals = [
            h for h in rows
            if h["name"].startswith("hivemind") and key(h)[1:] == key(r)[1:] and verdict(h) == "right"
        ]  # fmt: skip
        if rivals and r["name"] == "sparse" and r["mbit"] == RATE:
            best = min(rivals, key=lambda h: h["applied"])
            for what, their in (
                ("all-reduce", best["applied"]),
                ("round", best["applied"] + (best["matchmaking"] or 0.0)),
            ):
                gain = their / r["applied"]
                found.append(
                    report.goal(
                        f"{best['name']}'s {what} at least {LEAST_GAIN:g} times ours until applied ({where})",
                        gain,
                        gain >= LEAST_GAIN,
                    )
                )
    return found


def line(row: Mapping[str, Any]) -> str:
    """One row as it is done, for whoever waits."""
    return (
        f"{row['name']}: exchange {row['exchange']:.2f} s (floor {row['floor']:.2f}, x{row['ratio']:.2f}), applied "
        f"{row['applied']:.2f}, {row['up'] / 1e6:.2f} MB up, cpu {sum_of(row['cpu']):.1f} s, "
        f"{verdict(row)}, late {row['router_late_ms']:.0f} ms" + (f"; one dies: {death(row)}" if row["death"] else "")
    )


def sum_of(cpu: Mapping[str, float]) -> float:
    """CPU seconds of all processes of a peer; parts of the trainer's count once."""
    return sum(seconds for kind, seconds in cpu.items() if "(" not in kind)


def megabytes(count: float | None) -> float | None:
    """Return bytes as MB; None if they were not measured."""
    return None if count is None else round(count / 1e6, 2)


def cold(row: Mapping[str, Any]) -> str | None:
    """Return the exchange of the first round and the number of warm-up rounds; None for older files."""
    warming = row.get("warming", [])
    if not warming:
        return None
    return f"{warming[0]:.2f}" + (f" (of {len(warming)})" if len(warming) > 1 else "")


def verdict(row: Mapping[str, Any]) -> str:
    """Return whether the results were right, for the table."""
    if row["name"].startswith("tcp"):
        return "-"
    wrong = sum(not r["right"] for r in row["rounds"])
    return f"WRONG in {wrong} of {len(row['rounds'])}" if wrong else "right"


def death(row: Mapping[str, Any]) -> str:
    d = row["death"]
    if d is None:
        return "-"
    took = "never" if d["seconds"] is None else f"{d['seconds']:.1f} s"
    then = "no next round" if d["next_seconds"] is None else f"next round {d['next_seconds']:.1f} s"
    return f"{took}, {'right' if d['right'] else 'WRONG'}: {d['says']}; {then}"


def show(found: Mapping[str, Any]) -> str:
    """Return all rows as tables, one for each size of swarm."""
    parts = []
    for where in dict.fromkeys(key(r)[1:] for r in found["rows"]):
        rows = [r for r in found["rows"] if key(r)[1:] == where]
        parts.append(
            f"{where[1]} peers, {where[0]:,} parameters, {where[2]:g} Mbit/s each way, {where[3] / 2:g} ms one way, "
            f"TCP with {where[4]}" + more_of(rows[0]) + "\n\n" + table(rows)
        )
        if told := searched(rows):
            parts.append(told)
        if any(r["death"] for r in rows):
            parts.append(deaths(rows))
    return "\n\n".join(parts)


def deaths(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of what happened to the others when one peer was killed."""
    told = [[r["name"], death(r)] for r in rows if r["death"]]
    return report.table(["one of them is killed in mid-round", "what happens to the others"], told)


def searched(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about hivemind's searches for a group, which are not part of its rounds."""
    found = [
        f"{r['name'].partition('-')[2]} {r['matchmaking']:.1f} s"
        + (f" ({again} begun again)" if (again := r.get("searches", 0)) else "")
        for r in rows if r["matchmaking"] is not None
    ]  # fmt: skip
    if not found:
        return ""
    said = f"hivemind's search for a group before each round is not counted: {', '.join(found)}."
    return said + (" A search that left a peer out was begun again." if "again" in said else "")


def beside_hivemind(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of Cairn's rows beside hivemind's of the same swarm, until the last peer is done.

    Small updates are beside its 8-bit row, which is its fastest; int8 and fp32 are beside the same number of bits.
    """
    pairs = [("sparse", "hivemind-u8"), ("sign", "hivemind-u8"), ("int8", "hivemind-u8"), ("none", "hivemind-none")]
    cells = []
    for where in dict.fromkeys(key(r)[1:] for r in rows):
        here = {r["name"]: r for r in rows if key(r)[1:] == where}
        for ours, theirs in ((here[a], here[b]) for a, b in pairs if a in here and b in here):
            names = ours["says"].removeprefix("Cairn, "), theirs["says"].rpartition(" ")[2]
            cells.append(
                [f"{where[1]} peers, {where[0] / 1e6:.0f}M", *names,
                 *(f"{r[k]:.2f}" for r, k in ((ours, "exchange"), (ours, "applied"), (theirs, "applied"))),
                 *(f"{theirs['applied'] / ours[k]:.2f}" for k in ("exchange", "applied")), verdict(theirs)]
            )  # fmt: skip
    columns = ("swarm", "Cairn", "hivemind", "Cairn: exchange s", "applied s", "hivemind: all-reduce s",
               "all-reduce / exchange", "all-reduce / applied", "hivemind's result")  # fmt: skip
    return report.table(columns, cells)


def transports(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of signs by QUIC beside the same swarm by TCP alone, with UDP blocked."""
    by_tcp = {key(r)[1:]: r for r in rows if r["name"] == "sign-no-udp"}
    cells = []
    for quic in (r for r in rows if r["name"] == "sign" and key(r)[1:] in by_tcp):
        tcp = by_tcp[key(quic)[1:]]
        cells.append(
            [quic["peers"], quic["tcp"], *(f"{r[k]:.1f}" for k in ("exchange", "applied") for r in (quic, tcp))]
        )
    return report.table(["peers", "TCP with", "exchange s: QUIC", "TCP", "applied s: QUIC", "TCP"], cells)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rounds, seconds, MB and CPU seconds of each row."""
    columns = ["", "rounds", "MB each", "floor s", "first s", "exchange s", "/ floor", "certified s", "applied s",
               "MB up", "MB down", "CPU s", "result"]  # fmt: skip
    cells = []
    for r in rows:
        cells.append(
            [r["says"], len(r["rounds"]), round(r["size"] / 1e6, 2), round(r["floor"], 2), cold(r),
             *(round(r[k], 2) for k in ("exchange", "ratio", "certified", "applied")), megabytes(r["up"]),
             megabytes(r["down"]), round(sum_of(r["cpu"]), 1) if r["cpu"] else None, verdict(r)]
        )  # fmt: skip
    return report.table(columns, cells)


if __name__ == "__main__":
    sys.exit(main())
