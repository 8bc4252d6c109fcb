"""Cairn's real processes over an emulated internet: the row that shows whether the simulator tells the truth.

    python -m benchmarks.convergence.over_wan [--profile tiny] [--steps N] [--h 30] [--k 64] [--json FILE]

`cairn coordinator serve` and as many `cairn peer join` as the profile has peers, each on a host of its own, until the
run's tokens are accepted. Needs root and iproute2 (see tests/wan). All peers share the cores, so computing takes far
longer than on separate machines. The results are bytes, exchange times and loss, not wall-clock seconds.

JSON: the fields of `benchmarks.report.provenance` and of `WanResult`. Wire bytes are IP bytes at a host's line; payload
is what the node counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.convergence.job import CURVE_WINDOWS, FINAL_WINDOWS
from benchmarks.convergence.setting import PROFILES, Setting
from benchmarks.convergence.wan_hosts import Hosts, Wire, hosts
from benchmarks.convergence.wan_run_file import Tables, tables_of, toml
from benchmarks.report import provenance, save
from cairn.demo.processes import Running, stop_all
from coordinator.checkpoints.archive import read_manifest
from coordinator.checkpoints.evaluation import load_archived, measure
from peer.node.snapshot import Snapshot, read_snapshot
from protocol.errors import CairnError
from tests.wan import Topology, star, why_not

COORDINATOR = "coord"
START_SECONDS, END_SECONDS = 120.0, 45.0
GRPC, PAGE, SWARM = 7410, 7411, 7412


@dataclass(frozen=True)
class Point:
    """Validation loss, nats a token, of the archived state after a number of accepted tokens."""

    tokens: int
    round: int
    loss: float


@dataclass(frozen=True)
class PeerTraffic:
    """One peer's bytes.

    `payload` is its own count over its whole life. `wire` is all IP while the run trained. `wire_joining` is all IP
    before, when it fetched the run, the data and the first state.
    """

    name: str
    payload: Wire
    wire: Wire
    wire_joining: Wire
    updates: int
    missed: int
    restarts: int
    cpu_seconds: dict[str, float]


@dataclass(frozen=True)
class WanResult:
    """One run; per token: of all accepted tokens of the swarm. `loss` is of more windows than the curve's points.

    `exchange_seconds` are the median peer's medians from its announcement until it held the updates, the certificate
    and the new state. `exchange_floor` is every other peer's update over this peer's downlink, and two round trips.
    `between_peers` is the wire bytes that peers sent each other, by token and peer: updates, votes, heartbeats, the
    DHT and TCP's own. `updates` is the blobs alone. `control_bytes_per_second` is the rest, by peer, which a faster
    machine spreads over more tokens. `to_coordinator`: what all peers sent it, mostly the curve's `checkpoints`.
    """

    run: str
    parameters: int
    peers: int
    mbit: float
    rtt_ms: float
    target_tokens: int
    total_tokens: int
    accepted_tokens: int
    rounds: int
    tokens_per_round: float
    contributors_per_round: float
    update_bytes: int
    loss: float
    curve: list[Point]
    between_peers_per_token: float
    updates_per_token: float
    control_bytes_per_second: float
    to_coordinator: int
    checkpoints: int
    traffic: list[PeerTraffic]
    digests_equal: bool
    exchange_seconds: dict[str, float]
    exchange_floor: float
    train_seconds: float
    start_seconds: float
    trainer_cpu_seconds_per_step: float
    router_late_ms: float
    load: list[float]
    tables: Tables = field(repr=False)


def run(
    tables: Tables,
    *,
    peers: int = 4,
    topology: Topology | None = None,
    mbit: float = 100.0,
    rtt_ms: float = 100.0,
    seconds: float = 300.0,
    keep: Path | None = None,
) -> WanResult:
    """Run it until its tokens are accepted.

    Args:
        tables: of the run.toml (see `wan_run_file.tables_of`); run.total_tokens must be set.
        topology: hosts "coord", "p1", "p2", ...; by default all alike with `mbit` each way, `rtt_ms` apart.
        seconds: how long training may take.
        keep: a folder for logs and checkpoints; a temporary one by default.

    Raises BenchError when there can be no emulated internet here, or something fails.
    """
    names = [f"p{i + 1}" for i in range(peers)]
    topology = topology or star([COORDINATOR, *names], mbit=mbit, rtt_ms=rtt_ms)
    with hosts(topology, ttl=seconds + START_SECONDS + END_SECONDS + 60, keep=keep) as world:
        return _Run(world, tables, names, mbit, rtt_ms, seconds).result()


class _Run:
    """The parts of `run`, in the order in which they happen."""

    def __init__(self, world: Hosts, tables: Tables, names: list[str], mbit: float, rtt_ms: float, seconds: float):
        self.world, self.tables, self.names = world, tables, names
        self.mbit, self.rtt_ms, self.seconds = mbit, rtt_ms, seconds
        self.file = world.folder / "run.toml"
        self.home = world.folder / COORDINATOR / "coordinated" / tables["run"]["name"].replace(" ", "_")
        self.processes: dict[str, Running] = {}
        self.kept: dict[int, Path] = {}
        self.late = 0.0

    def result(self) -> WanResult:
        began = time.monotonic()
        self._start()
        self.world.until("every peer trains", self._all_train, START_SECONDS)
        ready, at_start = time.monotonic(), self.world.wire()
        cpu: dict[str, dict[str, float]] = {}
        self.world.until("the run's tokens are accepted", lambda: self._over(cpu), self.seconds, every=0.5)
        over, at_end = time.monotonic(), self.world.wire()
        self.late = self.world.wan.counters().late_ms
        self.world.until("the peers leave", self._left, END_SECONDS)
        self.world.until("the last state is archived", self._archived, END_SECONDS)
        stop_all(self.world.running)
        snapshots = {n: s for n in self.names if (s := self._snapshot(n)) is not None}
        return self._judge(snapshots, at_start, at_end, cpu, ready - began, over - ready)

    # -- what is started -------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.file.write_text(toml(self.tables) + "\n")
        ip = self.world.ip(COORDINATOR)
        coordinator = self.world.start(
            COORDINATOR,
            [*_cairn(), "coordinator", "serve", str(self.file), "--home", str(self.world.folder / COORDINATOR),
             "--grpc", f"{ip}:{GRPC}", "--page", f"{ip}:{PAGE}", "--swarm", f"/ip4/{ip}/tcp/{SWARM}"],
        )  # fmt: skip
        invite = self.home / "invite"
        self.world.until("the coordinator writes its invite", invite.exists, START_SECONDS)
        self.processes[COORDINATOR] = coordinator
        for name in self.names:
            self.processes[name] = self.world.start(
                name,
                [*_cairn(), "peer", "join", invite.read_text().strip(), "--home", str(self.world.folder / name),
                 "--name", name, "--threads", "1", "--device", "cpu", "--plain",
                 "--listen", f"/ip4/{self.world.ip(name)}/tcp/{SWARM}"],
            )  # fmt: skip

    # -- what is seen ----------------------------------------------------------------------------------------

    def _snapshot(self, name: str) -> Snapshot | None:
        found = sorted((self.world.folder / name).glob("runs/*/status.json"))
        return read_snapshot(found[0].parent) if found else None

    def _all_train(self) -> bool:
        seen = [self._snapshot(n) for n in self.names]
        return all(s is not None and s.phase in ("training", "exchanging") for s in seen)

    def _over(self, cpu: dict[str, dict[str, float]]) -> bool:
        """Return whether all tokens are accepted; link new checkpoints and note CPU times meanwhile."""
        self._set_aside()
        for name in self.names:
            for kind, seconds in self.world.cpu_seconds(name).items():  # the trainer ends before the node
                cpu.setdefault(name, {})[kind] = max(seconds, cpu.get(name, {}).get(kind, 0.0))
        seen = [self._snapshot(n) for n in self.names]
        return all(s is not None and s.accepted_tokens >= s.total_tokens for s in seen)

    def _left(self) -> bool:
        self._set_aside()
        return all(self.processes[n].code is not None for n in self.names)

    def _archived(self) -> bool:
        self._set_aside()
        last = read_manifest(self.kept[max(self.kept)]) if self.kept else None
        return last is not None and last.tokens >= self.tables["run"]["total_tokens"]

    def _set_aside(self) -> None:
        """Link the archived states before the coordinator removes them: it keeps the newest five."""
        for folder in (self.home / "checkpoints").glob("round-*"):
            if (sheet := read_manifest(folder)) is not None and sheet.round not in self.kept:
                shutil.copytree(folder, self.world.folder / "curve" / folder.name, copy_function=_link)
                self.kept[sheet.round] = self.world.folder / "curve" / folder.name

    # -- what came out ---------------------------------------------------------------------------------------

    def _judge(
        self,
        snapshots: dict[str, Snapshot],
        at_start: dict[str, Wire],
        at_end: dict[str, Wire],
        cpu: dict[str, dict[str, float]],
        start_seconds: float,
        train_seconds: float,
    ) -> WanResult:
        from benchmarks.convergence.wan_chain import read_chain, read_spec

        spec = read_spec(self.home)
        chain = read_chain(spec, self.home / "store")
        window = spec.data.window
        accepted = sum(r.windows for r in chain) * window
        shards = [self._shard(str(s.digest)) for s in spec.data.validation]
        curve = []
        for number, folder in sorted(self.kept.items()):
            at = measure(load_archived(folder), spec.data, shards, max_windows=CURVE_WINDOWS).loss
            sheet = read_manifest(folder)
            curve.append(Point(sheet.tokens if sheet else 0, number, at))
        newest = self.kept[max(self.kept)]
        loss = measure(load_archived(newest), spec.data, shards, max_windows=FINAL_WINDOWS).loss
        last = read_manifest(newest)
        states = {s.state for s in snapshots.values()} | {str(last.state) if last else ""}
        traffic = []
        for name, s in snapshots.items():
            wire = at_end[name] - at_start[name]
            traffic.append(
                PeerTraffic(
                    name, Wire(s.bytes_up, s.bytes_down), wire, at_start[name],
                    s.own_updates, s.missed_updates, s.trainer_restarts, cpu[name],
                )
            )  # fmt: skip
        size = max((u for r in chain for u in r.update_sizes), default=0)
        peers = len(self.names)
        # Every byte that a peer sends goes to the coordinator or to a peer.
        to_coordinator = at_end[COORDINATOR].down - at_start[COORDINATOR].down
        between = sum(t.wire.up for t in traffic) - to_coordinator
        blobs = sum(sum(r.update_sizes) for r in chain) * (peers - 1)
        steps = accepted / (window * spec.inner.batch * peers)
        trained = median(c.get("trainer", 0.0) for c in cpu.values())
        return WanResult(
            run=spec.name,
            parameters=spec.model.layout.numel,
            peers=peers,
            mbit=self.mbit,
            rtt_ms=self.rtt_ms,
            target_tokens=spec.round.target_tokens,
            total_tokens=spec.total_tokens,
            accepted_tokens=accepted,
            rounds=len(chain),
            tokens_per_round=accepted / len(chain),
            contributors_per_round=sum(len(r.update_sizes) for r in chain) / len(chain),
            update_bytes=size,
            loss=loss,
            curve=curve,
            between_peers_per_token=between / accepted / peers,
            updates_per_token=blobs / accepted / peers,
            control_bytes_per_second=(between - blobs) / peers / train_seconds,
            to_coordinator=to_coordinator,
            checkpoints=len(curve) - 1,
            traffic=traffic,
            digests_equal=len(states) == 1 and len(snapshots) == peers,
            exchange_seconds={
                what: median(s.exchange_seconds[what] for s in snapshots.values())
                for what in ("blobs", "certified", "applied")
            },
            exchange_floor=(peers - 1) * size * 8 / (self.mbit * 1e6) + 2 * self.rtt_ms / 1e3,
            train_seconds=train_seconds,
            start_seconds=start_seconds,
            trainer_cpu_seconds_per_step=trained / steps,
            router_late_ms=self.late,
            load=[round(x, 2) for x in os.getloadavg()],
            tables=self.tables,
        )

    def _shard(self, digest: str) -> Path:
        return Path(self.tables["data"]["prepared"]) / f"{digest}.tokens"


def _link(source: str, target: str) -> None:
    os.link(source, target)


def _cairn() -> list[str]:
    return [sys.executable, "-m", "cairn"]


def show(r: WanResult) -> str:
    """Return a few lines for a terminal."""
    exchange = ", ".join(f"{what} {seconds:.3f} s" for what, seconds in r.exchange_seconds.items())
    step = r.trainer_cpu_seconds_per_step * 1e3
    return f"""\
{r.run}: {r.parameters:,} parameters, {r.peers} peers, {r.mbit:g} Mbit/s, {r.rtt_ms:g} ms round trip
loss        {r.curve[0].loss:.4f} -> {r.loss:.4f} after {r.accepted_tokens:,} tokens
rounds      {r.rounds} of {r.tokens_per_round:,.0f} tokens (asked: {r.target_tokens:,}), \
{r.contributors_per_round:.2f} peers in each
wire        {r.between_peers_per_token:.4f} bytes a token and peer between peers; updates alone: \
{r.updates_per_token:.4f} ({r.update_bytes:,} bytes each)
            {r.control_bytes_per_second:,.0f} bytes a second and peer of all else
            {r.to_coordinator / 1e6:.2f} MB to the coordinator, with {r.checkpoints} checkpoints
exchange    {exchange}; floor {r.exchange_floor:.3f} s
wall        {r.train_seconds:.0f} s training, {r.start_seconds:.0f} s before; {step:.1f} ms of CPU a step; load {r.load}
digests     {"equal" if r.digests_equal else "DIFFERENT"}"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence.over_wan", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--profile", choices=PROFILES, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="inner steps of each peer (default: the profile's)")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--h", type=int, default=30, help="inner steps of each peer in a round")
    parser.add_argument("--codec", choices=("sparse", "sign", "int8", "none"), default="sparse")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long training may take")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.FIELD=JSON", help="of run.toml")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and checkpoints")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if reason := why_not():
        print(f"no emulated internet: {reason}", file=sys.stderr)
        return 2
    about = provenance("convergence.over_wan", seeds=[options.seed])
    profile = PROFILES[options.profile]
    setting = Setting.of(profile, options.seed)
    codec: dict[str, Any] = {"kind": options.codec} | ({"k": options.k} if options.codec == "sparse" else {})
    tables = tables_of(
        profile, prepared=setting.corpus.prepared.folder, seed=options.seed, lr=options.lr, steps=options.steps,
        h=options.h, codec=codec,
    )  # fmt: skip
    try:
        for change in options.set:
            place, _, value = change.partition("=")
            table, _, name = place.partition(".")
            tables.setdefault(table, {})[name] = json.loads(value)
        result = run(
            tables, peers=profile.peers, mbit=options.mbit, rtt_ms=options.rtt_ms, seconds=options.seconds,
            keep=options.keep,
        )  # fmt: skip
    except (CairnError, ValueError) as e:
        print(f"failed: {e}", file=sys.stderr)
        return 1
    print(show(result))
    if options.json:
        save(options.json, about | asdict(result))
    return 0 if result.digests_equal else 1


if __name__ == "__main__":
    sys.exit(main())
